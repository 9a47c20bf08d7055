"""What SearchQA's retrieval costs, for environments.py; and its server with nothing to search.

    built       a BM25 index of the Factbook made anew, over the same one opened from the cache
    batched     queries a second that the encoder of dense retrieval answers in batches of 32, over
                one query at a time; it needs its packages (envs/searchqa/requirements.txt)
    --constant  the env server with a retriever that answers the corpus's first passages: what all
                but the search costs

Run it:  python benchmarks/retrieval.py        a minute; environments.py keeps what it measures
"""

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import median, seconds_of, show  # noqa: E402
from envs.searchqa import retrieval  # noqa: E402
from envs.searchqa.corpus import Corpus, open_corpus  # noqa: E402
from envs.searchqa.dense import Dense, Encoder  # noqa: E402
from envs.searchqa.questions import own_questions  # noqa: E402
from envs.searchqa.ranking import RetrievalError, Retriever, Scored  # noqa: E402
from envs.server import main as serve  # noqa: E402

GOALS = {"built": 3.0, "batched": 4.0}
QUERIES = 256
BATCH = 32
PASSAGES = 256  # of the dense index: what is measured is the encoder


class Constant(Retriever):
    """The first passages, whatever is asked."""

    WAIT_S = retrieval.BM25.WAIT_S

    def __init__(self) -> None:
        self.corpus = open_corpus(None)

    def scored(self, queries: Sequence[str], top_k: int) -> list[list[Scored]]:
        found = [Scored(self.corpus[number], 0.0) for number in range(top_k)]
        return [found] * len(queries)


@contextlib.contextmanager
def empty_cache() -> Iterator[Path]:
    """A cache in which no index is yet."""
    before = os.environ.get("AGENT_RL_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AGENT_RL_CACHE"] = folder
        try:
            yield Path(folder)
        finally:
            del os.environ["AGENT_RL_CACHE"]
            if before is not None:
                os.environ["AGENT_RL_CACHE"] = before


def built_over_loaded() -> float:
    corpus = open_corpus(None)
    with empty_cache():
        built = seconds_of(lambda: retrieval.BM25(corpus))
        return built / seconds_of(lambda: retrieval.BM25(corpus))


def batched_over_single(retriever: Retriever) -> float:
    queries = [question.question for question in own_questions()[:QUERIES]]
    batches = [queries[start : start + BATCH] for start in range(0, QUERIES, BATCH)]
    retriever.search(queries[:BATCH], 3)
    single = seconds_of(lambda: [retriever.search([query], 3) for query in queries])
    return single / seconds_of(lambda: [retriever.search(batch, 3) for batch in batches])


def small_dense(folder: Path) -> Retriever:
    path = folder / "corpus.jsonl"
    corpus = open_corpus(None)
    with corpus.path.open(encoding="utf-8") as lines:
        path.write_text("".join(next(lines) for _ in range(PASSAGES)), encoding="utf-8")
    return Dense(Corpus(path), Encoder())


def measure(repeats: int) -> dict[str, Any]:
    """The ratios of GOALS, medians of repeats; `batched` is None where its packages are missing."""
    built = [built_over_loaded() for _ in range(repeats)]
    batched: list[float] = []
    with empty_cache() as folder:
        try:
            dense = small_dense(folder)
        except RetrievalError as error:
            print(f"not measured: {error}", file=sys.stderr)
        else:
            batched = [batched_over_single(dense) for _ in range(repeats)]
    return {"built": median(built, 1), "batched": median(batched, 2) if batched else None}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--constant", action="store_true", help="serve that")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    if options.constant:
        retrieval.open_retriever = Constant  # type: ignore[assignment]
        return serve(["--env", "searchqa", "--port", str(options.port)])
    ratios = measure(options.repeats)
    show((name, f"{ratio} (goal {GOALS[name]:g})") for name, ratio in ratios.items())
    return 0


if __name__ == "__main__":
    sys.exit(main())
