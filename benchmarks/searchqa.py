"""Is SearchQA a world in which searching pays, and one search is not enough?

For every sub-task, test questions, top 3 passages:

    raw         an answer stands in what the question itself finds: the most that one search gives,
                to a reader who never errs
    oracle's    every step of the plan is shown by the first query that the plan has for it
    no search   to what is asked for (a currency, a capital) the answer that the training questions
                have most often is given, or, where there are two to choose from, the first: what
                who never searches can learn
    oracle      plays over HTTP: exact match, and the turns it takes

Questions whose plan found nothing with BM25 were left out when they were generated, so BM25's
`oracle's` says how many first queries do, not how often a plan can work; `--method dense` was asked
for none of it.

Run it:  python benchmarks/searchqa.py                   half a minute
         python benchmarks/searchqa.py --method dense    and a quarter of an hour for its index
It prints a table and writes benchmarks/results/searchqa-<method>.json.
"""

import collections
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import Results, arguments  # noqa: E402
from envclient import StepOutsideEpisode, connect, local_server  # noqa: E402
from envs.searchqa.oracle import shows  # noqa: E402
from envs.searchqa.questions import (  # noqa: E402
    FIRST_OWN,
    Question,
    find_question,
    kinds,
    own_questions,
    splits,
)
from envs.searchqa.retrieval import open_retriever  # noqa: E402
from envs.searchqa.text import exact_match, normalize  # noqa: E402
from envs.searchqa.wording import FIELDS  # noqa: E402
from recipes.common import markdown  # noqa: E402

TOP_K = 3
METHODS = ("bm25", "dense")


def shown_by(retriever: Any, queries: Sequence[str], values: Sequence[Sequence[str]]) -> list[bool]:
    """Whether one of its values stands in what each query finds."""
    found = retriever.search(list(queries), TOP_K)
    return [
        any(shows(passage, value) for passage in passages for value in wanted)
        for passages, wanted in zip(found, values, strict=True)
    ]


def retrieval_rates(retriever: Any, questions: Sequence[Question]) -> dict[str, float]:
    raw = shown_by(
        retriever, [q.question for q in questions], [q.golden_answers for q in questions]
    )
    steps = [(q, step) for q in questions for step in q.plan]
    shown = shown_by(retriever, [s.queries[0] for _, s in steps], [s.finds for _, s in steps])
    missed = {q.question for (q, _), there in zip(steps, shown, strict=True) if not there}
    oracles = [q.question not in missed for q in questions]
    return {"raw": statistics.fmean(raw), "oracles": statistics.fmean(oracles)}


def guessed(kind: str, questions: Sequence[Question]) -> float:
    """Exact match of who never searches."""
    if kind == "comparison":
        return statistics.fmean(
            exact_match(first_choice(q.question), q.golden_answers) for q in questions
        )
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for question, split in zip(own_questions(), splits(), strict=True):
        if split == "train" and question.kind == kind:
            counts[asked_for(question)].update({normalize(a) for a in question.golden_answers})
    likeliest = {asked: answers.most_common(1)[0][0] for asked, answers in counts.items()}
    return statistics.fmean(
        exact_match(likeliest.get(asked_for(q), ""), q.golden_answers) for q in questions
    )


def asked_for(question: Question) -> str:
    """
    >>> asked_for(Question("What is the currency of the country whose capital is X?", (), "bridge"))
    'currency'
    """
    for field, words in FIELDS.items():
        before, _, after = words.question.partition("{}")
        if question.question.startswith(before) and question.question.endswith(after):
            return field
    raise ValueError(f"no template asks: {question.question}")


def first_choice(question: str) -> str:
    """
    >>> first_choice("Which has more airports, Moldova or Saint Helena, Ascension, and T.?")
    'Moldova'
    """
    return question.partition(", ")[2].partition(" or ")[0]


def play(client: Any, index: int) -> tuple[bool, int]:
    """Whether the oracle answered right, and in how many turns; where no search of its plan shows
    what it looks for it gives up."""
    client.reset(index)
    for turn in range(1, 20):
        try:
            thought, action = client.oracle()
        except StepOutsideEpisode:
            return False, turn
        result = client.step(f"{thought}\n{action}")
        if result.terminated or result.truncated:
            return result.info["success"], turn
    return False, 20


def main() -> int:
    parser = arguments(__doc__, None, "searchqa-<method>.json")
    parser.add_argument("--method", choices=METHODS, default="bm25")
    options = parser.parse_args()
    os.environ["SEARCHQA_RETRIEVAL_METHOD"] = options.method
    results = Results(options.out, f"searchqa-{options.method}.json")
    test = [FIRST_OWN + n for n, split in enumerate(splits()) if split == "test"]
    of_kind: dict[str, list[int]] = {}
    for index in test:
        of_kind.setdefault(kinds()[index - FIRST_OWN], []).append(index)
    retriever, table = open_retriever(), {}
    with local_server("searchqa") as url, connect("searchqa", url) as client:
        for kind, indices in of_kind.items():
            questions = [find_question(index) for index in indices]
            played = [play(client, index) for index in indices]
            table[kind] = {"questions": len(questions), **retrieval_rates(retriever, questions)}
            table[kind] |= {
                "no_search": guessed(kind, questions),
                "oracle": statistics.fmean(solved for solved, _ in played),
                "turns": statistics.fmean(turns for _, turns in played),
            }
    rounded = {kind: {n: round(v, 4) for n, v in row.items()} for kind, row in table.items()}
    results.write({"method": options.method, "top_k": TOP_K, "kinds": rounded})
    rows = [
        (kind, row["questions"], *(f"{row[n]:.2f}" for n in ("no_search", "raw", "oracles")))
        + (f"{row['oracle']:.3f}", f"{row['turns']:.2f}")
        for kind, row in rounded.items()
    ]
    titles = "sub-task | questions | no search | raw | oracle's queries | oracle | its turns"
    print("\n".join(markdown(titles, rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
