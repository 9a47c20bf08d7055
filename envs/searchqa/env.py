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
    reset(task_index, seed=0). A task leaves nothing open, so the seed changes nothing. The options
    are environment variables: envs/searchqa/options.py, of retrieval envs/searchqa/retrieval.py.

(task index, actions) fix every text, as long as the corpus and its index are the same (and but for
near-ties of retrieval by meaning: envs/searchqa/dense.py). A search that fails (an index
server that is down) is an error of the world, never an observation.

Differences from AgentGym's server, whose numbers are therefore not the same
    - There the episode goes on after a wrong answer (SEARCHQA_WRONG_ANSWER), and of several in a
      text the last one counts.
    - There passages are shown whole.

    env = SearchQA()
    print(env.reset(task_index=221_328))
    thought, action = env.oracle()        # '<search> ... </search>'
    observation, reward, terminated, truncated, info = env.step(action)

`python -m envs.searchqa` lets you play; `--write-questions` and `--write-ids` write its questions
and its id lists again. Read next: envs/searchqa/actions.py, then envs/searchqa/oracle.py.
"""

import contextlib
from typing import ClassVar

from envs import OracleLost, ParseError, TaskIndexError
from envs.common import Stage, require_task
from envs.searchqa.actions import INSTRUCTIONS, QUESTION, parse, read_tag, say, written
from envs.searchqa.options import read_options, variant
from envs.searchqa.oracle import Search, next_move
from envs.searchqa.questions import PUBLISHED, Question, find_question, kind_of, num_questions
from envs.searchqa.shared import close_shared, shared_batcher
from envs.searchqa.text import (
    MAX_TITLE,
    Passage,
    exact_match,
    f1,
    first_words,
    harmless,
    information,
    shortened,
)
from envs.searchqa.wire import SearchWire

MAX_TURNS = 100
RIGHT, WRONG = "Your answer is correct.", "Your answer is not correct."


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
        shared_batcher()

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
        found = shared_batcher().search_one(query, self._options.top_k)
        num_words = self._options.passage_words
        # What was not shown is not kept: it counts for nobody, and a server has many sessions.
        shown = tuple(
            Passage(p.number, p.title[:MAX_TITLE], first_words(p.text, num_words)) for p in found
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
