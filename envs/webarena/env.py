"""WebArena: do tasks on web sites in a real browser.

The agent reads a web page as an accessibility tree ("[4] link 'My orders'"), acts by the numbers in
it, and stops with an answer. The tasks are those of people: find the cheapest kettle, answer a
review, close an issue, plan a route. WebArena (https://arxiv.org/abs/2307.13854) has five sites as
docker images. Ours are five small sites that start in a second (sites/), with tasks of the same
kinds; the same code drives the official sites if they are configured.

Description: Tasks 0-811 are the official ones (they need the sites and the package `libwebarena`);
    ours follow. Sub-tasks: Shopping, CMS, Maps, GitLab, Reddit (tasks.py).
Action Space: see actions.py. The policy writes an action between triple backticks.
Observation Space: The open tabs, the tree of the part of the page that is in a window of 1280 x 720
    pixels (tree.py), the address, the objective and the previous action:
        OBSERVATION:
        Tab 0 (current): Kettles

        [1] link 'Copper kettle'
        URL: http://onestopmarket.com/kettles
        OBJECTIVE: What does the copper kettle cost?
        PREVIOUS ACTION: click [3] where [3] is link 'Kettles'
    If an action has no effect, or something else happened (a dialog, a new tab), the last line
    tells. Texts of pages are data: names are quoted, and have no line breaks.
Rewards: 1 for a `stop` after which all evaluators of the task agree (evaluators.py), otherwise 0.
Episode End: Terminated by `stop`; truncated after 100 actions.
Arguments: reset(task_index, seed=0); the seed has no effect. The same actions give the same texts,
    also in other sessions. Sessions do not see each other's changes.

Environment variables:
    SHOPPING, SHOPPING_ADMIN, REDDIT, GITLAB, MAP, WIKIPEDIA, HOMEPAGE
                              addresses of the official sites
    WEBARENA_AUTH             folder with the cookies (SITE_state.json) for the official sites, as
                              WebArena's auto_login.py writes them (default: .auth)
    WEBARENA_JUDGE_URL, WEBARENA_JUDGE_MODEL, WEBARENA_JUDGE_KEY_ENV
                              a chat server (http://HOST:PORT/v1), its model, and the name of the
                              variable with its key, for official tasks whose answers a model judges
    CHROMIUM                  path of the browser (default: the first on the PATH)

Differences from AgentGym's server: one browser for all sessions, no fixed waiting time, our own
numbers of elements, the action `select`, texts of errors, and a turn with several actions is an
error (there the first one is played).

    env = WebArena()
    print(env.reset(task_index=812))
    thought, action = env.oracle()
    observation, reward, terminated, truncated, info = env.step(action)

Read next: envs/webarena/actions.py, then envs/webarena/tree.py and envs/webarena/browser.py.
"""

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import envs.webarena.tasks as tasks
from envs import OracleLost, ParseError, TaskIndexError, Wire
from envs.common import Stage, require_task, version_of, without_thought
from envs.webarena.actions import (
    BLOCK,
    INSTRUCTIONS,
    RULES,
    TOOLS,
    Action,
    action_text,
    parse,
    read,
    say,
)
from envs.webarena.browser import Addresses, Browser
from envs.webarena.evaluators import evaluate, needs_judge
from envs.webarena.oracle import next_move
from envs.webarena.session import Session
from envs.webarena.sites import SITES, Sites
from envs.webarena.tasks import PUBLIC
from envs.wire import Outcome

MAX_TURNS = 100
KEPT = ("success", "score", "error", "failed")  # of info


class WebArenaWire(Wire):
    """AgentGym's WebArena server: the answer of /reset holds the bare tree, and its client reads
    the first observation from /observation. /reset answers "TimeoutError" if the browser failed."""

    session_field, index_field = "env_idx", "idx"
    first_from_observation = True
    list_path = "/list_envs"

    def root(self) -> Any:
        return "ok"

    def reset(self, session_id: int, turn: dict, task_index: int) -> Any:
        text = turn["observation"].removeprefix("OBSERVATION:\n")
        task = tasks.task(task_index)
        return {
            self.session_field: session_id,
            "observation": text.rpartition("\nURL: ")[0],
            "sites": task["sites"],
            "object": task["intent"],
        }

    def close(self, was_open: bool) -> Any:
        return {"closed": "closed"} if was_open else {"closed": "was not open"}

    def was_open(self, answer: Any) -> bool:
        return answer == {"closed": "closed"}

    def first_observation(self, answer: Any) -> Any:
        text = super().first_observation(answer)
        if text == "TimeoutError":
            raise ValueError("an observation, not the report that the browser failed")
        return text

    def outcome(self, answer: Mapping[str, Any], past_return: float) -> Outcome:
        """AgentGym's server sends a reward at every step; it counts only at the end. Its info holds
        whole pages, which are dropped."""
        fields = dict(answer)
        if answer.get("terminated") is False:
            fields["reward"] = 0
        if isinstance(info := fields.get("info"), Mapping):
            fields["info"] = {name: info[name] for name in KEPT if name in info}
        return super().outcome(fields, past_return)


# ---------------------------------------------------- one browser and one set of sites for all


class _Shared:
    """What all sessions of this process use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sites: Sites | None = None
        self._browser: Browser | None = None

    def start(self) -> tuple[Sites, Browser]:
        """The running sites and browser, started when they are first needed; another browser if it
        has ended. Raises BrowserMissing."""
        with self._lock:
            self._sites = self._sites or Sites()
            if self._browser and self._browser.has_ended:
                self._browser.close()
                self._browser = None
            if not self._browser:
                official = {urlsplit(address).hostname for address in _addresses().values()}
                rules = [f"MAP *.test 127.0.0.1:{self._sites.port}"]
                rules += [f"EXCLUDE {host}" for host in official]
                self._browser = Browser(", ".join([*rules, "MAP * ~NOTFOUND"]))
            return self._sites, self._browser

    def close(self) -> None:
        with self._lock:
            if self._browser:
                self._browser.close()
            if self._sites:
                self._sites.shutdown()
            self._browser = self._sites = None


_shared = _Shared()


def _addresses() -> dict[str, str]:
    """The configured addresses of the official sites, by variable."""
    return {name: os.environ[name].rstrip("/") for name in PUBLIC if os.environ.get(name)}


class WebArena:
    """One WebArena session; see the module docstring."""

    PROMPT: ClassVar = [{"role": "system", "content": INSTRUCTIONS}]
    RULES = RULES
    TOOLS = TOOLS
    WIRE = WebArenaWire()
    IS_FAST = False
    HORIZON = 15
    PACKAGE = "playwright"
    PAPER: ClassVar = {
        "rounds": (8, 12, 15),
        "max_tokens_per_turn": 512,
    }
    LAPTOP: ClassVar = {
        "tasks": "short_train",
        "eval_tasks": "short_test",
        "rounds": (6,),
        "group_size": 4,
        "mini_batch_size": 32,
        "max_trajectory_tokens": 6144,
        "eval_samples": 2,
    }

    num_tasks = staticmethod(tasks.num_tasks)
    subtask = staticmethod(tasks.subtask)
    parse = staticmethod(parse)
    say = staticmethod(say)

    def __init__(self) -> None:
        self._stage = Stage()
        self._opened = contextlib.ExitStack()  # what close() closes

    @staticmethod
    def variant() -> str:
        parts = [f"playwright {version_of('playwright')}"]
        return " ".join([*parts, *(f"{k}={v}" for k, v in _addresses().items())])

    # A server without a browser fails at startup.
    open_shared = staticmethod(_shared.start)
    close_shared = staticmethod(_shared.close)

    def reset(self, task_index: int, seed: int = 0) -> str:
        """Start an episode and return the first observation. Also raises TaskIndexError if an
        official task needs something that is not configured, and BrowserLost if the browser fails;
        the next reset uses another one."""
        require_task(type(self), task_index)
        is_official, task = task_index < tasks.NUM_OFFICIAL, tasks.task(task_index)
        cookies = self._cookies(task, task_index) if is_official else None  # our own need none
        self.close()
        self._task, self._task_index = task, task_index
        self._open(is_official, cookies)
        self._num_turns = 0
        self._reward = 0.0
        self._previous = ""  # the latest action that could be read
        self._outcome = "None"
        self._acted_on: list[int] = []
        self._stage.begin()
        return self._observation()

    def _open(self, is_official: bool, cookies: Path | None) -> None:
        self._sites, self._browser = _shared.start()
        if is_official:
            real = {PUBLIC[name]: address for name, address in _addresses().items()}
        else:
            self._token = self._sites.open()
            self._opened.callback(self._sites.close, self._token)
            real = {PUBLIC[n.upper()]: self._sites.base_url(n, self._token) for n in SITES}
        addresses = Addresses(real)
        self._session = Session(self._browser, addresses)
        self._opened.callback(self._close_tabs)
        start = [addresses.to_real(url) for url in self._task["start_url"].split(" |AND| ")]
        self._page = self._browser.call(self._session.open(start, cookies))

    @staticmethod
    def _cookies(task: Mapping[str, Any], task_index: int) -> Path | None:
        """The file with the cookies for an official task. Raises TaskIndexError if the task cannot
        be played here."""
        if needs_judge(task) and not os.environ.get("WEBARENA_JUDGE_URL"):
            raise TaskIndexError(
                f"a language model judges the answer to task {task_index}; name a chat "
                "server in WEBARENA_JUDGE_URL"
            )
        if not task.get("storage_state"):
            return None
        folder = Path(os.environ.get("WEBARENA_AUTH") or ".auth")
        path = folder / Path(task["storage_state"]).name
        if not path.is_file():
            raise TaskIndexError(
                f"task {task_index} needs {path}, which WebArena's auto_login.py writes; "
                "name its folder in WEBARENA_AUTH"
            )
        return path

    def _observation(self) -> str:
        return (
            f"OBSERVATION:\n{self._page.text}\nURL: {self._page.url}\n"
            f"OBJECTIVE: {self._task['intent']}\nPREVIOUS ACTION: {self._outcome}"
        )

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Play one action; return observation, reward, terminated, truncated, info. Raises
        BrowserLost if the browser fails."""
        self._stage.require_running()
        self._num_turns += 1
        error, self._acted_on = "", []
        try:  # AgentGym's client sends the policy's whole text
            text = without_thought(action)
            parsed = read(action_text(text) if BLOCK.search(text) else text)
        except ParseError as problem:
            error = self._outcome = str(problem)
        else:
            self._previous = str(parsed)
            if parsed.kind == "stop":
                self._reward = evaluate(self._task, parsed.text, self)
                self._outcome = str(parsed)
                self._stage.end()
            else:
                error = self._act(parsed)
        terminated = self._stage.is_over
        truncated = self._num_turns >= MAX_TURNS and not terminated
        if truncated:
            self._stage.end()
        info = {"success": self._reward == 1, "score": self._reward, "error": error}
        info["failed"] = bool(error)
        return self._observation(), self._reward, terminated, truncated, info

    def _act(self, action: Action) -> str:
        """Play an action and look at the page; return why it had no effect, or ""."""
        self._outcome, node = str(action), None
        if action.kind in ("click", "hover", "type", "select"):
            node = self._page.element(action.number)
        if node is not None:
            self._acted_on = [round(pixels) for pixels in node.box]
            self._outcome += f" where [{node.element_id}] is {node.line().partition(' ')[2]}"
        self._page, error, notes = self._browser.call(self._session.step(action, node))
        self._outcome = ". ".join(filter(None, [self._outcome, f"{error} {notes}".strip()]))
        return error

    # What the evaluators may look at (evaluators.Final).

    @property
    def url(self) -> str:
        return self._page.url

    def read(self, url: str, locator: str, preparations: Sequence[str]) -> str:
        return self._browser.call(self._session.read(url, locator, preparations))

    def query(self, sql: str) -> Sequence[Sequence[Any]]:
        return self._sites.query(self._token, sql)

    def available_actions(self) -> list[str]:
        """The oracle's action, clicks, options, and moves between pages; any text can be typed."""
        self._stage.require_episode()
        actions: list[str] = []
        if self._stage.is_over:
            return actions
        with contextlib.suppress(OracleLost):
            actions.append(self.oracle()[1])
        for node in self._page.nodes:
            if node.element_id:
                actions.append(str(Action("click", node.element_id)))
                actions += [str(Action("select", node.element_id, name)) for name in node.options]
        actions += ["scroll [down]", "scroll [up]", "go_back", "go_forward", "stop []"]
        return list(dict.fromkeys(actions))

    def oracle(self) -> tuple[str, str]:
        """A thought and the next action of the task's plan. Raises OracleLost for an official task,
        which has no plan."""
        self._stage.require_running()
        if self._task_index < tasks.NUM_OFFICIAL:
            raise OracleLost("the official tasks have no plan")
        plan = tasks.ours()[self._task_index - tasks.NUM_OFFICIAL].plan
        return next_move(self._page, plan, self._task["start_url"], self._previous)

    def state_for_people(self) -> dict:
        """The task, the page with a screenshot, and the box of the element that the latest action
        named, in pixels of the screen before it."""
        self._stage.require_episode()
        return {
            "objective": self._task["intent"],
            "subtask": self.subtask(self._task_index),
            "sites": self._task["sites"],
            "url": self._page.url,
            "screenshot": self._browser.call(self._session.screenshot()),
            "previous_action": self._outcome,
            "acted_on": self._acted_on,
            "num_turns": self._num_turns,
            "success": self._reward == 1,
        }

    def close(self) -> None:
        """Close this session's tabs and drop its changes; a later reset opens new ones."""
        self._stage = Stage()
        self._opened.close()

    def _close_tabs(self) -> None:
        with contextlib.suppress(Exception):  # the browser has ended, or closes them later
            self._browser.call(self._session.close())
