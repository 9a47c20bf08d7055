"""evaluate.py from the command line to the files, over a real env server and scripted models."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import uvicorn
from starlette.responses import JSONResponse
from toy_env import Letters, serve

import envs
import evaluate
from chat import ChatTemplate
from config import parse_command_line
from engines import Generation
from envclient import EnvError, EnvPool, EnvServerError
from envs import load_tasks
from envs.server import create_app
from envs.textcraft.env import TextCraft
from evaluate import EvalConfig, evaluate_policy, main
from models import load_tokenizer
from reporting.leaderboard import PAPER
from reporting.metrics import MetricsLogger, summarize_trajectories
from reporting.plots import plot
from reporting.scoring import summarize
from rollout import RolloutSettings, TooManyEnvFailures, collect
from sampling import vllm_engine
from scale.default_models import resolve_model

ROOT = Path(__file__).resolve().parent.parent
TASKS = load_tasks("textcraft", "test")


@contextlib.contextmanager
def uvicorn_thread(app):
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def env_url():
    with uvicorn_thread(create_app("textcraft")) as url:
        yield url


@pytest.fixture(scope="module")
def chat():
    return ChatTemplate(load_tokenizer(resolve_model("tiny")))


TASK_OF_GOAL = {
    TextCraft().reset(task.task_index).splitlines()[-1]: task.task_index for task in TASKS
}
assert len(TASK_OF_GOAL) == len(TASKS)


def task_index_of(observation):
    """The test task whose first observation this is; its last line names the goal."""
    return TASK_OF_GOAL[observation.splitlines()[-1]]


def oracle_text(first_observation, said):
    """What a perfect player says after `said` perfect turns."""
    env = TextCraft()
    env.reset(task_index_of(first_observation))
    for _ in range(said):
        env.step(env.oracle()[1])
    thought, action = env.oracle()
    return f"Thought: {thought}\nAction: {action}"


class ScriptedEngine:
    """Plays perfectly where `is_good(task_index, sample)`, else looks into its inventory."""

    max_open = None

    def __init__(self, chat, is_good):
        self.chat, self.is_good, self.waiting = chat, is_good, []

    @property
    def num_running(self):
        return len(self.waiting)

    def submit(self, request_id, prompt_ids, sampling):
        text = self.chat.tokenizer.decode(prompt_ids)
        users = text.split("<|im_start|>user\n")[1:]
        observation = users[0].split("<|im_end|>")[0]
        sample = int(request_id.rpartition("-k")[2])
        if self.is_good(task_index_of(observation), sample):
            answer = oracle_text(observation, len(users) - 1)
        else:
            answer = "Action: inventory"
        ids = self.chat.action(answer)
        self.waiting.append(Generation(request_id, ids, [-0.5] * len(ids), "stop"))

    def poll(self):
        done, self.waiting = self.waiting, []
        return done

    def abort(self):
        self.waiting = []


TURNS = {"textcraft": 12}


def settings_of(**options):
    defaults = {"max_tokens_per_turn": 256, "max_trajectory_tokens": 8000}
    return RolloutSettings(**{**defaults, **options})


# --------------------------------------------------------------------- evaluate_policy


def player(engine, pool, chat):
    return lambda requests, settings: collect(engine, pool, chat, requests, settings)


def test_a_policy_is_scored_per_task_and_subtask_over_a_real_server(env_url, chat):
    """Solves depth 1 always, depth 2 with every second sample, nothing deeper."""

    def is_good(task_index, sample):
        depth = TextCraft.subtask(task_index)
        return depth == "depth 1" or (depth == "depth 2" and sample % 2 == 0)

    chosen = [t for t in TASKS if t.subtask != "depth 4"][::6]
    with EnvPool("textcraft", [env_url]) as pool:
        play = player(ScriptedEngine(chat, is_good), pool, chat)
        summary, trajectories = evaluate_policy(play, chosen, 4, settings_of(seed=1), TURNS, 20)
    count = {d: sum(t.subtask == d for t in chosen) for d in ("depth 1", "depth 2", "depth 3")}
    rows = summary["subtasks"]
    assert {name: row["items"] for name, row in rows.items()} == count
    assert rows["depth 1"]["avg"]["value"] == 1.0
    assert rows["depth 2"]["avg"]["value"] == 0.5
    assert rows["depth 2"]["pass"]["value"] == 1.0
    assert rows["depth 3"]["pass"]["value"] == 0.0
    assert summary["step"] == 20 and summary["samples"] == 4
    assert len(trajectories) == 4 * len(chosen)
    assert {t.trajectory_id for t in trajectories} >= {"s000020-t0000-k00", "s000020-t0000-k03"}
    assert {t.seed for t in trajectories} == {1}
    # pass@2 with 2 solved of 4: 1 - C(2,2) / C(4,2) = 5/6
    expected = (count["depth 1"] + count["depth 2"] * 5 / 6) / len(chosen)
    assert summary["pass_curve"][1]["value"] == pytest.approx(expected)


def test_every_task_is_played_also_when_their_number_fits_no_batch(env_url, chat):
    """Trap 17: an empty or a dropped last batch."""
    with EnvPool("textcraft", [env_url]) as pool:
        play = player(ScriptedEngine(chat, lambda *_: True), pool, chat)
        summary, _ = evaluate_policy(play, TASKS[:7], 1, settings_of(), TURNS)
    assert list(summary["items"]) == [task.task_id for task in TASKS[:7]]


def test_cutting_a_long_run_gives_what_the_short_run_gives(env_url, chat):
    """The claim behind --max-rounds N N N: one run holds the curve."""
    tasks = [t for t in TASKS if t.subtask in ("depth 1", "depth 2")][::5]
    engine = ScriptedEngine(chat, lambda task_index, sample: (task_index + sample) % 3 > 0)
    with EnvPool("textcraft", [env_url]) as pool:
        play = player(engine, pool, chat)
        long, played = evaluate_policy(play, tasks, 2, settings_of(), {"textcraft": 9})
        curve = summarize(played, 2, [2, 3, 5])["rounds_curve"]
        for row in curve:
            horizons = {"textcraft": row["max_rounds"]}
            short, _ = evaluate_policy(play, tasks, 2, settings_of(), horizons)
            assert {k: row[k] for k in short["overall"]} == short["overall"]
    assert curve[0]["avg"]["value"] < long["overall"]["avg"]["value"]


class BrokenFor:
    """A pool whose environment fails whenever one of `task_indices` is reset."""

    def __init__(self, pool, task_indices):
        self.pool, self.env, self.task_indices = pool, pool.env, task_indices

    def of(self, world):
        return self

    def client(self, avoid=()):
        client = self.pool.client(avoid)
        reset = client.reset

        def failing_reset(task_index, seed=0):
            if task_index in self.task_indices:
                raise EnvServerError("the environment failed", "http://env/reset", 500)
            return reset(task_index, seed)

        client.reset = failing_reset
        return client


def test_tasks_that_the_server_lost_are_listed_and_in_no_number(env_url, chat):
    tasks = TASKS[:6]
    engine = ScriptedEngine(chat, lambda *_: True)
    with EnvPool("textcraft", [env_url]) as pool:
        play = player(engine, BrokenFor(pool, {tasks[2].task_index}), chat)
        summary, trajectories = evaluate_policy(play, tasks, 2, settings_of(), TURNS)
        assert summary["lost"]["items_without_sample"] == [tasks[2].task_id]
        assert summary["lost"]["trajectories"] == 2
        assert summary["overall"]["items"] == 5
        assert summary["overall"]["avg"]["value"] == 1.0
        assert summarize_trajectories(trajectories)["train/env_failures"] == 2
        with pytest.raises(TooManyEnvFailures, match="2 of 12"):
            evaluate_policy(play, tasks, 2, settings_of(max_env_failures=0.1), TURNS)


def test_a_training_run_plots_the_summary_as_it_is(env_url, chat, tmp_path):
    with EnvPool("textcraft", [env_url]) as pool:
        play = player(ScriptedEngine(chat, lambda *_: True), pool, chat)
        summary, trajectories = evaluate_policy(play, TASKS[:2], 1, settings_of(), TURNS, 1)
    with MetricsLogger(tmp_path) as logger:
        logger.log(1, summarize_trajectories(trajectories))
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "step_000001.json").write_text(json.dumps(summary, allow_nan=False))
    assert plot(tmp_path).stat().st_size > 10_000


# -------------------------------------------------------------------- the command line


@contextlib.contextmanager
def chat_server(answer):
    """An OpenAI-like server: `answer(messages)` gives the text, or (status, body)."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            result = answer(body["messages"])
            status, content = result if isinstance(result, tuple) else (200, None)
            content = content or {"choices": [{"message": {"content": result}}]}
            self.send_response(status)
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(json.dumps(content).encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def perfect(messages):
    users = [m["content"] for m in messages if m["role"] == "user"]
    return oracle_text(next(u for u in users if u.startswith("Crafting")), len(users) - 1)


def test_a_model_behind_a_chat_server_from_the_command_line_to_the_files(env_url, tmp_path, capsys):
    out = tmp_path / "result"
    with chat_server(perfect) as url:
        code = main(
            ["--api-base", url, "--api-model", "oracle", "--env-addr", env_url]
            + ["--subtasks", "depth 1", "depth 4", "--samples", "2"]
            + ["--max-rounds", "2", "4", "40", "--out", str(out)]
        )
    assert code == 0
    printed = capsys.readouterr().out
    assert "depth 1" in printed and "100.0 % [" in printed
    assert {p.name for p in out.iterdir()} == {
        "config.json", "curves.png", "eval.json", "trajectories.jsonl",
    }  # fmt: skip
    result = json.loads((out / "eval.json").read_text())
    assert result["complete"] and result["model"] == "oracle" and result["env"] == "textcraft"
    assert result["overall"]["items"] == 34 and result["overall"]["avg"]["value"] == 1.0
    curve = {row["max_rounds"]: row["avg"]["value"] for row in result["rounds_curve"]}
    assert curve[2] < curve[4] < curve[40] == 1.0
    lines = (out / "trajectories.jsonl").read_text().splitlines()
    assert len(lines) == 68
    assert all(json.loads(line)["success"] for line in lines)


def test_a_local_model_from_the_command_line_to_the_files(env_url, tmp_path, capsys):
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([{"item_id": "textcraft_0"}, {"item_id": "textcraft_40"}]))
    arguments = ["--model", "tiny", "--deterministic"]
    arguments += ["--tasks", str(ids), "--env-addr", env_url, "--samples", "2", "--max-rounds", "2"]
    arguments += ["--max-tokens-per-turn", "8", "--max-trajectory-tokens", "2048"]
    results = []
    for name in ("a", "b"):
        assert main([*arguments, "--out", str(tmp_path / name)]) == 0
        lines = (tmp_path / name / "trajectories.jsonl").read_text().splitlines()
        rows = sorted((json.loads(line) for line in lines), key=lambda r: r["trajectory_id"])
        results.append([(row["trajectory_id"], row["input_ids"]) for row in rows])
    assert len(results[0]) == 4
    assert results[0] == results[1]  # --deterministic
    assert results[0][0][1] != results[0][1][1]  # and still two samples of a task differ
    assert main(["--compare", str(tmp_path / "a/eval.json"), str(tmp_path / "b/eval.json")]) == 0
    assert "+0.0 points" in capsys.readouterr().out


def test_more_lost_than_allowed_is_exit_1_with_one_line_and_the_files(env_url, tmp_path, capsys):
    with chat_server(lambda _: (401, {"error": "bad key"})) as url:
        code = main(
            ["--api-base", url, "--api-model", "m", "--env-addr", env_url]
            + ["--out", str(tmp_path / "out")]
        )
    assert code == 1
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("evaluate.py")]
    assert "HTTP 401" in line and "bad key" in line
    assert json.loads((tmp_path / "out" / "eval.json").read_text())["complete"] is False


def test_what_measured_nothing_can_be_asked_for_again_and_what_did_cannot(
    env_url, tmp_path, capsys
):
    out = tmp_path / "out"
    command = ["--api-model", "m", "--env-addr", env_url, "--limit", "1", "--out", str(out)]
    with chat_server(lambda _: (401, {"error": "bad key"})) as url:
        assert main(["--api-base", url, *command]) == 1
    with chat_server(perfect) as url:
        assert main(["--api-base", url, *command]) == 0
        assert json.loads((out / "eval.json").read_text())["overall"]["items"] == 4
        assert main(["--api-base", url, *command]) == 2
    assert "exists and is not empty" in capsys.readouterr().err


def test_ctrl_c_writes_what_has_ended_and_exits_130(env_url, tmp_path):
    seen = threading.Semaphore(0)

    def slow_after_three(messages):
        observation = next(m["content"] for m in messages if m["content"].startswith("Crafting"))
        if task_index_of(observation) % 10:
            seen.release()
            time.sleep(60)
        return perfect(messages)

    out = tmp_path / "out"
    with chat_server(slow_after_three) as url:
        run = subprocess.Popen(
            [sys.executable, "evaluate.py", "--api-base", url, "--api-model", "m"]
            + ["--env-addr", env_url, "--subtasks", "depth 1", "--out", str(out)],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert seen.acquire(timeout=60)
            log = out / "trajectories.jsonl"
            while len(log.read_text().splitlines()) < 4 and run.poll() is None:
                time.sleep(0.05)
            run.send_signal(signal.SIGINT)
            _, err = run.communicate(timeout=20)
        finally:
            run.kill()
    assert run.returncode == 130, err
    assert "stopped; 4 of 31 episodes had ended" in err and "Traceback" not in err
    result = json.loads((out / "eval.json").read_text())
    assert result["complete"] is False and result["overall"]["items"] == 4


def test_limit_plays_the_first_tasks_of_each_subtask(env_url, tmp_path):
    out = tmp_path / "out"
    with chat_server(perfect) as url:
        command = ["--api-base", url, "--api-model", "m", "--env-addr", env_url]
        assert main([*command, "--limit", "2", "--out", str(out)]) == 0
    result = json.loads((out / "eval.json").read_text())
    expected = []
    for depth in ("depth 1", "depth 2", "depth 3", "depth 4"):
        expected += [task.task_id for task in TASKS if task.subtask == depth][:2]
    assert sorted(result["items"]) == sorted(expected)
    assert result["limit"] == 2 and result["max_rounds"] == [30]


@pytest.fixture
def no_model(monkeypatch):
    """A model must not be loaded: that takes minutes, which are lost if the run cannot be."""

    def load(*_):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(evaluate, "_player", load)


@pytest.mark.parametrize("place", ["a file", "a file/below", "/proc/nowhere", "/dev/null/x"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_loaded(
    place, env_url, tmp_path, capsys, no_model
):
    (tmp_path / "a file").write_text("kept")
    out = tmp_path / place  # an absolute place stays what it is
    assert main(["--env-addr", env_url, "--out", str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("evaluate.py: --out ") and str(out) in line
    assert [p.name for p in tmp_path.iterdir()] == ["a file"]


def test_a_dead_address_is_one_line_at_once_and_the_same_command_can_be_given_again(
    env_url, tmp_path, capsys, no_model
):
    out = tmp_path / "new" / "out"
    started = time.monotonic()
    for _ in range(2):
        assert main(["--env-addr", "http://127.0.0.1:9", "--out", str(out)]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "http://127.0.0.1:9" in line
        assert list(tmp_path.iterdir()) == []
    assert time.monotonic() - started < 2 * 10  # seconds: nothing is waited for
    with pytest.raises(AssertionError, match="a model was loaded"):
        main(["--env-addr", env_url, "--out", str(out)])


def test_a_folder_that_was_there_stays(tmp_path, capsys, no_model):
    out = tmp_path / "out"
    out.mkdir()
    assert main(["--env-addr", "http://127.0.0.1:9", "--out", str(out)]) == 1
    assert out.is_dir()


def test_a_world_outside_the_repository_gives_the_default_folder_its_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with evaluate._folder(EvalConfig(env="toy_env:Letters")) as out:
        assert out.name.startswith("eval-letters-2") and out.is_dir()
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------ --env all


class ShortLetters(Letters):
    HORIZON = 20


# Names that the paper has, over a world of two turns.
FAMILIES = {"textcraft": Letters, "babyai": ShortLetters}


class Worlds:
    """Two toy families whose servers start, fail to, or die as a test says."""

    def __init__(self, urls):
        self.urls, self.started, self.refuse, self.dead = urls, [], set(), set()

    @contextlib.contextmanager
    def local_server(self, env):
        self.started.append(env)
        if env in self.refuse:
            raise EnvError("exited with 1 at start:\nModuleNotFoundError: No module", env)
        yield self.urls[env]


@pytest.fixture
def worlds(monkeypatch, tmp_path):
    monkeypatch.setattr(envs, "ids_dir", lambda env: tmp_path)
    monkeypatch.setattr("envclient.BACK_OFF_S", 0.001)
    with contextlib.ExitStack() as stack:
        state = Worlds({})

        def dies(env):
            async def middleware(request, call_next):
                if env in state.dead and request.url.path == "/step":
                    return JSONResponse({"error": "the simulator died"}, 500)
                return await call_next(request)

            return middleware

        for env, world in FAMILIES.items():
            ids = [{"item_id": f"{env}_{i}"} for i in range(4)]
            (tmp_path / f"{env}_test.json").write_text(json.dumps(ids))
            state.urls[env] = stack.enter_context(serve(world, dies(env), name=env))
        entries = {env: envs.ENVS[env] for env in FAMILIES}
        stack.callback(envs.ENVS.update, dict(envs.ENVS))
        envs.ENVS.clear()
        envs.ENVS.update(entries)
        monkeypatch.setattr(evaluate, "local_server", state.local_server)
        yield state


def all_families(url, out, *options):
    command = ["--env", "all", "--api-base", url, "--api-model", "writer", "--out", str(out)]
    return main([*command, *options])


def families_of(out):
    return json.loads((out / "benchmark.json").read_text())["families"]


def good_letters(messages):
    """Solves the tasks with an even number."""
    first = next(m["content"] for m in messages if m["content"].startswith("craft"))
    return "abc" if int(first.split()[-1]) % 2 == 0 else "xyz"


def test_all_families_end_in_one_table_beside_the_papers_numbers(worlds, tmp_path, capsys):
    out = tmp_path / "out"
    with chat_server(good_letters) as url:
        assert all_families(url, out, "--samples", "2") == 0
    printed = capsys.readouterr().out
    assert worlds.started == list(FAMILIES)
    names = {"eval.json", "trajectories.jsonl", "curves.png"}
    assert all({p.name for p in (out / env).iterdir()} == names for env in FAMILIES)
    assert {p.name for p in out.iterdir()} == {
        *FAMILIES, "benchmark.json", "benchmark.md", "config.json",
    }  # fmt: skip
    results = {env: json.loads((out / env / "eval.json").read_text()) for env in FAMILIES}
    assert {env: result["max_rounds"] for env, result in results.items()} == {
        "textcraft": [30], "babyai": [20],
    }  # fmt: skip
    for env, result in results.items():
        lines = (out / env / "trajectories.jsonl").read_text().splitlines()
        assert {json.loads(line)["max_rounds"] for line in lines} == set(result["max_rounds"])
        assert result["complete"] and result["samples"] == 2
        assert result["subtasks"]["even"]["avg"]["value"] == 1.0
        assert result["subtasks"]["odd"]["avg"]["value"] == 0.0
    table = (out / "benchmark.md").read_text()
    for text in (printed, table):  # 4 tasks are not the paper's 90, and that is said
        assert "writer: 2 per task" in text
        assert "! not comparable: babyai: other tasks than the paper's test (GoTo 0 of 55" in text
    row = "| babyai | all | 4 ! | 50.0 [0.0, 100.0] | 50.0 [0.0, 100.0] | 90 | 52.2 | 66.7 |"
    assert row in table
    assert families_of(out)["babyai"]["overall"] == results["babyai"]["overall"]


@pytest.fixture
def tiny_model():
    """Built from the real TextCraft where it is not in the cache: before `worlds` replaces that."""
    return resolve_model("tiny")


def test_one_engine_plays_all_families(tiny_model, worlds, tmp_path, monkeypatch):
    made = []
    make_engine = vllm_engine.make_engine

    def counted(*args, dtype):
        assert dtype == "float32"  # of --deterministic
        made.append(make_engine(*args, dtype=dtype))
        return made[-1]

    monkeypatch.setattr(vllm_engine, "make_engine", counted)
    budget = ["--max-tokens-per-turn", "4", "--max-trajectory-tokens", "128"]
    command = ["--env", "all", "--model", tiny_model, "--deterministic", "--limit", "1"]
    out = tmp_path / "out"
    assert main([*command, *budget, "--out", str(out)]) == 0
    assert len(made) == 1
    assert main([*command, *budget, "--out", str(out), "--resume"]) == 0
    assert len(made) == 1  # nothing is left to play: none is loaded
    assert {env: row["overall"]["items"] for env, row in families_of(out).items()} == {
        "textcraft": 2, "babyai": 2,
    }  # fmt: skip


@pytest.mark.parametrize("cause", ["server does not start", "package missing", "server dies"])
def test_a_family_that_fails_does_not_lose_the_others(cause, worlds, tmp_path, capsys):
    out = tmp_path / "out"
    reason = {"server does not start": "No module", "server dies": "the simulator died"}
    if cause == "server does not start":
        worlds.refuse.add("textcraft")
    elif cause == "server dies":
        worlds.dead.add("textcraft")
    else:
        envs.ENVS["textcraft"] = "no_such_module:TextCraft"
    with chat_server(good_letters) as url:
        assert all_families(url, out) == 1
    printed = capsys.readouterr()
    reason = reason.get(cause, "No module named 'no_such_module'")
    (line,) = [x for x in printed.err.splitlines() if x.startswith("evaluate.py: textcraft: ")]
    assert reason in line
    (row,) = [x for x in printed.out.splitlines() if x.startswith("textcraft  not measured: ")]
    assert reason in row
    assert "| textcraft | not measured: " in (out / "benchmark.md").read_text()
    assert reason in families_of(out)["textcraft"]["not_measured"]
    assert families_of(out)["babyai"]["overall"]["items"] == 4


@pytest.mark.parametrize("stopped", FAMILIES)
def test_ctrl_c_keeps_the_families_that_have_ended(stopped, worlds, tmp_path, capsys):
    out, released = tmp_path / "out", threading.Event()
    log = out / stopped / "trajectories.jsonl"

    def stops_in_that_family(messages):
        if log.parent.exists() and good_letters(messages) == "xyz":
            if messages[-1]["content"] == "craft 3":
                while not log.exists() or len(log.read_text().splitlines()) < 2:
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGINT)
            released.wait(30)
        return good_letters(messages)

    with chat_server(stops_in_that_family) as url:
        assert all_families(url, out) == 130
        released.set()
    printed = capsys.readouterr()
    assert f"evaluate.py: {stopped}: stopped; 2 of 4 episodes had ended" in printed.err
    assert f"{stopped:<9}  not measured: stopped; 2 of 4" in printed.out
    assert len(log.read_text().splitlines()) == 2
    assert json.loads((out / stopped / "eval.json").read_text())["complete"] is False
    if stopped == "babyai":
        assert families_of(out)["textcraft"]["overall"]["items"] == 4
    else:
        assert families_of(out)["babyai"]["not_measured"] == "not played yet"
        assert worlds.started == ["textcraft"]


def test_resume_plays_what_is_missing_and_nothing_else(worlds, tmp_path, capsys):
    out = tmp_path / "out"
    worlds.refuse.add("babyai")
    with chat_server(good_letters) as url:
        assert all_families(url, out) == 1
        kept = (out / "textcraft" / "eval.json").stat().st_mtime_ns
        worlds.refuse.clear()
        worlds.started.clear()
        assert all_families(url, out) == 2  # nothing is overwritten by accident
        assert "exists and is not empty" in capsys.readouterr().err
        assert all_families(url, out, "--resume") == 0
        assert worlds.started == ["babyai"]
        assert (out / "textcraft" / "eval.json").stat().st_mtime_ns == kept
        assert [row["overall"]["items"] for row in families_of(out).values()] == [4, 4]
        before = (out / "benchmark.md").read_text()
        assert all_families(url, out, "--resume") == 0  # all there: the table again
        assert worlds.started == ["babyai"]
        assert (out / "benchmark.md").read_text() == before


def test_resume_of_nothing_is_misuse_and_leaves_nothing(worlds, tmp_path, capsys):
    for out in (tmp_path / "nothing", tmp_path):
        before = sorted(tmp_path.iterdir())
        assert all_families("http://127.0.0.1:9", out, "--resume") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"--out {out} holds no results of --env all to go on with" in line
        assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("content", ["", "{", "[]", "null"])
def test_resume_names_a_result_that_is_broken(content, worlds, tmp_path, capsys):
    out = tmp_path / "out"
    with chat_server(good_letters) as url:
        assert all_families(url, out) == 0
        (out / "babyai" / "eval.json").write_text(content)
        capsys.readouterr()
        assert all_families(url, out, "--resume") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{out}/babyai/eval.json is no result; remove {out}/babyai" in line


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("--samples 2", "samples 1, not 2"),
        ("--max-rounds 3 9", "max_rounds [30], not [3, 9]"),
        ("--seed 1", "seed 0, not 1"),
        ("--temperature 0.5", "temperature 1.0, not 0.5"),
        ("--limit 1", "limit None, not 1"),
        ("--api-model other", "model writer, not other"),
    ],
)
def test_resume_refuses_to_mix_results_of_two_settings(option, named, worlds, tmp_path, capsys):
    out = tmp_path / "out"
    with chat_server(good_letters) as url:
        assert all_families(url, out) == 0
        capsys.readouterr()
        before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
        assert all_families(url, out, "--resume", *option.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"textcraft/eval.json was measured with {named}; choose another --out" in line
    assert before == {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}


BAD_COMMANDS = {
    "--samples 0": "--samples 0 must be at least 1",
    "--max-rounds 10 0": "--max-rounds 10 0 must be",
    "--temperature -1": "--temperature -1.0 must be 0 or more",
    "--temperature nan": "--temperature nan must be",
    "--temperature 0 --samples 4": "--temperature 0 plays 4 times the same",
    "--seed -1": "--seed -1 must be 0 or more",
    "--max-tokens-per-turn 0": "--max-tokens-per-turn 0 must be at least 1",
    "--max-trajectory-tokens 100": "below --max-trajectory-tokens 100",
    "--env-workers 0": "--env-workers 0 must be at least 1",
    "--max-env-failures 1.5": "--max-env-failures 1.5 must be a share",
    "--deterministic --api-base http://h --api-model m": "not possible with --api-base",
    "--tasks x.json --split test": "both name tasks",
    "--model tiny --api-base http://h --api-model m": "exclude each other",
    "--api-base http://h": "--api-base and --api-model go together",
    "--api-model m": "--api-base and --api-model go together",
    "--api-key-env PATH": "--api-key-env has a use only with --api-base",
    "--api-base http://h --api-model m --api-key-env NO_SUCH_KEY": "NO_SUCH_KEY",
    "--api-base h:1 --api-model m": "--api-base 'h:1' is not an address",
    "--env-addr localhost": "--env-addr 'localhost' is not an address",
    "--env mars": "unknown environment 'mars'",
    "--limit 0": "--limit 0 must be at least 1",
    "--env all --env-addr http://h:1": "--env-addr is not possible with --env all",
    "--env all --tasks x.json": "--tasks is not possible with --env all",
    "--env all --subtasks nix": "--subtasks is not possible with --env all",
    "--env all --split train": "--split train is not possible with --env all",
    "--env all --resume": "--resume goes with --env all and --out",
    "--env textcraft --resume --out x": "--resume goes with --env all and --out",
    "--env all --resume --out tests": "--out tests holds no results of --env all",
    "--subtasks nix": "unknown sub-task 'nix'",
    "--tasks no-such-file.json": "cannot read the id list no-such-file.json",
    "--compare one.json": "--compare takes two files, got 1",
    "--compare a.json b.json": "a.json is not a result of evaluate.py",
    "--model ./no-such-model --engine transformers": "--model ./no-such-model",
    "--out tests": "--out tests exists and is not empty",
    "--split dev": "--split dev: 'dev' does not do",
    "--engine sglang": "expected one of vllm",
    "--max-rounds many": "expected whole numbers",
    "--no-such-flag 3": "there is no --no-such-flag",
}


@pytest.mark.parametrize("command", BAD_COMMANDS)
def test_misuse_is_exit_2_with_one_line_and_nothing_written(command, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = set(os.listdir(ROOT)) | set(os.listdir(ROOT / "runs") if Path("runs").exists() else ())
    try:
        code = main(command.split())
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert code == 2
    assert len(err.splitlines()) == 1, err
    assert err.startswith("evaluate.py: ") and BAD_COMMANDS[command] in err
    assert out == ""
    after = set(os.listdir(ROOT)) | set(os.listdir(ROOT / "runs") if Path("runs").exists() else ())
    assert before == after


def test_a_good_command_line_passes_the_checks():
    config = parse_command_line(EvalConfig, ["--max-rounds", "10", "20"], "evaluate.py")
    config.check()
    assert config.horizons("textcraft") == [10, 20]
    EvalConfig().check()
    EvalConfig(env="all", split="test").check()


def test_without_max_rounds_each_environment_has_its_own_horizon():
    names = ("textcraft", "babyai", "sciworld", "toy_env:Letters")  # the last one says nothing
    assert [EvalConfig().horizons(env) for env in names] == [[30], [20], [30], [30]]
    assert EvalConfig(max_rounds=(9, 3, 9)).horizons("babyai") == [3, 9]


@pytest.mark.parametrize("env", [env for env in envs.ENVS if env in PAPER])
def test_a_world_that_the_paper_has_is_measured_at_the_papers_horizon(env):
    assert EvalConfig().horizons(env) == [PAPER[env].max_rounds]


def test_help_explains_every_flag(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for name in EvalConfig.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in text


def test_on_a_gpu_the_sampler_has_the_card_to_itself_in_a_format_that_the_card_knows(
    tmp_path, monkeypatch
):
    """It asked for bfloat16, which a T4 lacks, and for half of the card, as beside a trainer."""
    asked = []

    def make(kind, path, length, deterministic, **options):
        asked.append(options)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(vllm_engine, "make_engine", make)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    with contextlib.ExitStack() as stack:
        for engine in ("vllm", "transformers"):
            evaluate._player(EvalConfig(model="tiny", engine=engine), tmp_path / engine, stack)
    vllm, transformers = asked
    assert vllm == {"seed": 0, "dtype": "float32", "gpu_memory_utilization": 0.9}
    assert transformers == {"dtype": "float32"}


def test_what_was_played_is_kept_however_the_player_ends(tmp_path):
    def player(pool, requests, settings, progress):
        raise OSError(28, "No space left on device")

    config, tasks = EvalConfig(env="textcraft", model="tiny"), load_tasks("textcraft", "test")[:1]
    pool = SimpleNamespace(env="textcraft")
    summary, outcome = evaluate._measure(config, player, pool, tasks, tmp_path)
    assert outcome.exit_code == 1 and "No space left on device" in outcome.problem
    assert not summary["complete"] and (tmp_path / "eval.json").exists()


def test_a_link_that_has_moved_is_another_model(tmp_path):
    for step in ("a", "b"):
        (tmp_path / step).mkdir()
    link, asked = tmp_path / "best", []
    for step in ("a", "b"):
        link.unlink(missing_ok=True)
        link.symlink_to(step)
        asked.append(evaluate.asked(EvalConfig(env="textcraft", model=str(link)), "textcraft"))
    assert asked[0]["model"] == asked[1]["model"] and asked[0] != asked[1]
    other = EvalConfig(env="textcraft", api_base="http://a", api_model="m")
    assert evaluate.asked(other, "textcraft")["api_base"] == "http://a"


def test_states_are_kept_on_request_for_replay(tmp_path, monkeypatch):
    asked = []

    def player(pool, requests, settings, progress):
        asked.append(settings.record_state)
        return []

    monkeypatch.setattr(evaluate, "summarize", lambda *_, **__: {})
    monkeypatch.setattr(evaluate, "plot_curves", lambda *_: None)
    pool = SimpleNamespace(env="textcraft")
    for record_state in (False, True):
        config = EvalConfig(env="textcraft", model="tiny", record_state=record_state)
        evaluate._measure(config, player, pool, load_tasks("textcraft", "test")[:1], tmp_path)
    assert asked == [False, True]
