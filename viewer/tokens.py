"""Token ids as text, one by one, with the tokenizer file alone: no model library is imported."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path


class Decoder:
    """Each id's own text. A character that several tokens make up together shows as U+FFFD."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path))
        self._known: dict[int, str] = {}

    def texts(self, ids: Sequence[int]) -> list[str]:
        for i in set(ids) - self._known.keys():
            self._known[i] = self._tokenizer.decode([i], skip_special_tokens=False)
        return [self._known[i] for i in ids]


def find_decoder(folders: Iterable[Path]) -> Decoder | None:
    """Of the first folder that holds a tokenizer.json that can be read; None: of none."""
    for folder in folders:
        path = folder / "tokenizer.json"
        if path.is_file():
            try:
                return Decoder(path)
            except Exception:  # the library raises nothing more precise; the next may do
                continue
    return None
