"""evaluate.py from the command line to the files, over a real env server and scripted models."""

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from starlette.responses import JSONResponse
from test_chatapi import ChatServer, oracle_answer, says, task_index_of
from toy_env import Letters, serve

import envs
import evaluate
from config import Config, complete
from envclient import EnvError, local_server
from envs import load_tasks
from evaluate import EvalConfig, main, num_trained_on, settings_of_run
from reporting.leaderboard import PAPER
from sampling import vllm_engine

ROOT = Path(__file__).resolve().parent.parent
TASKS = load_tasks("textcraft", "test")


@pytest.fixture(scope="module")
def env_url():
    with local_server("textcraft") as url:
        yield url


# -------------------------------------------------------------------- the command line


def test_a_model_behind_a_chat_server_from_the_command_line_to_the_files(env_url, tmp_path, capsys):
    out = tmp_path / "result"
    with ChatServer(oracle_answer) as server:
        code = main(
            ["--api-base", server.url, "--api-model", "oracle", "--env-addr", env_url]
            + ["--subtasks", "depth 1", "depth 4", "--samples", "2"]
            + ["--max-rounds", "2", "4", "40", "--out", str(out)]
        )
    assert code == 0
    printed = capsys.readouterr().out
    assert "depth 1" in printed and "100.0 % [" in printed
    names = {"config.json", "curves.png", "eval.json", "trajectories.jsonl"}
    assert {path.name for path in out.iterdir()} == names
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
    options = "--model tiny --deterministic --samples 2 --max-rounds 2 --max-tokens-per-turn 8"
    arguments = [*options.split(), "--tasks", str(ids), "--env-addr", env_url]
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


def test_ctrl_c_writes_what_has_ended_and_exits_130(env_url, tmp_path):
    def answer_some(body):
        if task_index_of(body) % 10:
            time.sleep(60)
        return oracle_answer(body)

    out = tmp_path / "out"
    log = out / "trajectories.jsonl"
    with ChatServer(answer_some) as server:
        command = [sys.executable, "evaluate.py", "--api-base", server.url, "--api-model", "m"]
        command += ["--env-addr", env_url, "--subtasks", "depth 1", "--out", str(out)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        run = subprocess.Popen(command, cwd=ROOT, **pipes)
        try:
            while not log.exists() or log.read_text().count("\n") < 4:
                assert run.poll() is None
                time.sleep(0.05)
            run.send_signal(signal.SIGINT)
            _, err = run.communicate(timeout=20)
        finally:
            run.kill()
    assert run.returncode == 130, err
    assert "stopped; 4 of 31 episodes had ended" in err and "Traceback" not in err
    result = json.loads((out / "eval.json").read_text())
    assert result["complete"] is False and result["overall"]["items"] == 4


def test_what_cannot_start_leaves_nothing_behind_and_loads_no_model(tmp_path, capsys, monkeypatch):
    def load(*_):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(evaluate, "start_player", load)
    (tmp_path / "a file").write_text("kept")
    for url, out, code, reason in (
        ("http://127.0.0.1:1", "a file/below", 2, "a file"),
        ("http://127.0.0.1:9", "out", 1, "http://127.0.0.1:9"),
    ):
        assert main(["--env-addr", url, "--out", str(tmp_path / out)]) == code
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("evaluate.py: ") and reason in line
        assert [p.name for p in tmp_path.iterdir()] == ["a file"]


# ------------------------------------------------------------------------------ --env all


FAMILIES = ("textcraft", "babyai")  # names that the paper has, over a world of two turns


@pytest.fixture
def worlds(monkeypatch, tmp_path):
    """Two toy families: `started` lists them, those in `refuse` do not start, in `dead` die."""
    state = SimpleNamespace(started=[], refuse=set(), dead=set())

    @contextlib.contextmanager
    def local_server(env):
        async def dies(request, call_next):
            if env in state.dead and request.url.path == "/step":
                return JSONResponse({"error": "the simulator died"}, 500)
            return await call_next(request)

        state.started.append(env)
        if env in state.refuse:
            raise EnvError("exited with 1 at start:\nModuleNotFoundError: No module", env)
        with serve(Letters, dies, name=env) as url:
            yield url

    for env in FAMILIES:
        ids = [{"item_id": f"{env}_{i}"} for i in range(4)]
        (tmp_path / f"{env}_test.json").write_text(json.dumps(ids))
        monkeypatch.setitem(envs.ENVS, env, "toy_env:Letters")
    for env in set(envs.ENVS) - set(FAMILIES):
        monkeypatch.delitem(envs.ENVS, env)
    monkeypatch.setattr(envs, "ids_dir", lambda env: tmp_path)
    monkeypatch.setattr("envclient.BACK_OFF_S", 0.001)
    monkeypatch.setattr(evaluate, "local_server", local_server)
    return state


def all_families(url, out, *options):
    """The exit code, and what benchmark.json says of each family."""
    command = ["--env", "all", "--api-base", url, "--api-model", "writer", "--out", str(out)]
    code = main([*command, *options])
    table = out / "benchmark.json"
    return code, json.loads(table.read_text())["families"] if table.exists() else {}


@pytest.fixture
def writer():
    """A chat server whose model solves the tasks with an even number."""

    def answer(body):
        first = next(m["content"] for m in body["messages"] if m["content"].startswith("craft"))
        return says("abc" if int(first.split()[-1]) % 2 == 0 else "xyz")

    with ChatServer(answer) as server:
        yield server.url


def test_all_families_end_in_one_table_beside_the_papers_numbers(worlds, writer, tmp_path, capsys):
    out = tmp_path / "out"
    code, families = all_families(writer, out, "--samples", "2")
    printed = capsys.readouterr().out
    assert code == 0 and worlds.started == list(FAMILIES)
    results = {env: json.loads((out / env / "eval.json").read_text()) for env in FAMILIES}
    for result in results.values():
        assert result["complete"] and result["samples"] == 2
        assert result["subtasks"]["even"]["avg"]["value"] == 1.0
        assert result["subtasks"]["odd"]["avg"]["value"] == 0.0
    assert (out / "benchmark.md").read_text() in printed
    row = "| babyai | all | 4 ! | 50.0 [0.0, 100.0] | 50.0 [0.0, 100.0] | 90 | 52.2 | 66.7 |"
    assert row in " ".join(printed.split())
    assert families["babyai"]["overall"] == results["babyai"]["overall"]


@pytest.mark.parametrize(
    ("fault", "reason"), [("refuse", "No module"), ("dead", "the simulator died")]
)
def test_a_family_that_fails_does_not_lose_the_others(
    fault, reason, worlds, writer, tmp_path, capsys
):
    getattr(worlds, fault).add("textcraft")
    code, families = all_families(writer, tmp_path / "out")
    assert code == 1 and reason in families["textcraft"]["not_measured"]
    assert families["babyai"]["overall"]["items"] == 4
    printed = capsys.readouterr()
    (line,) = [x for x in printed.err.splitlines() if x.startswith("evaluate.py: textcraft: ")]
    assert reason in line and re.search(r"\| textcraft +\| not measured: ", printed.out)


def test_resume_plays_what_is_missing_and_nothing_of_other_settings(
    worlds, writer, tmp_path, capsys
):
    out = tmp_path / "out"
    worlds.refuse.add("babyai")
    assert all_families(writer, out)[0] == 1
    kept = {path: path.read_bytes() for path in (out / "textcraft").iterdir()}
    worlds.refuse.clear()
    worlds.started.clear()
    capsys.readouterr()
    for options, said in (
        ([], "exists and is not empty"),
        (["--resume", "--max-rounds", "3", "9"], "measured with max_rounds [30], not [3, 9]"),
        (["--resume", "--api-model", "other"], "measured with model writer, not other"),
    ):
        assert all_families(writer, out, *options)[0] == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
    for _ in range(2):  # the second time there is nothing left to play
        code, families = all_families(writer, out, "--resume")
        assert (code, worlds.started) == (0, ["babyai"])
    assert kept == {path: path.read_bytes() for path in (out / "textcraft").iterdir()}
    assert [row["overall"]["items"] for row in families.values()] == [4, 4]


# ------------------------------------------------------------------------------ options


BAD_COMMANDS = {
    "--samples 0": "--samples 0",
    "--max-rounds 10 0": "--max-rounds (10, 0)",
    "--temperature 0 --samples 4": "use --samples 1",
    "--deterministic --api-base http://h --api-model m": "not possible with --api-base",
    "--tasks x.json --split test": "both name tasks",
    "--model tiny --api-base http://h --api-model m": "exclude each other",
    "--api-base http://h": "go together",
    "--api-base http://h --api-model m --api-key-env NO_SUCH_KEY": "NO_SUCH_KEY",
    "--api-base h:1 --api-model m": "not an address",
    "--env all --tasks x.json": "--env all",
    "--env textcraft --resume --out x": "--resume needs --env all",
    "--env all --resume --out tests": "--out tests holds no results",
    "--subtasks nix": "nix",
    "--compare one.json": "two files",
    "--compare a.json b.json": "a.json is not",
    "--out tests": "--out tests exists",
    "--run tests": "--run tests holds no run",
}


@pytest.mark.parametrize("command", BAD_COMMANDS)
def test_misuse_is_exit_2_with_one_line(command, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(command.split()) == 2
    out, err = capsys.readouterr()
    assert err.startswith("evaluate.py: ") and BAD_COMMANDS[command] in err
    assert len(err.splitlines()) == 1 and out == ""


def test_on_a_gpu_the_sampler_has_the_card_to_itself_in_a_format_that_the_card_knows(
    tmp_path, monkeypatch
):
    """A T4, for example, lacks bfloat16."""
    asked = {}

    def make(kind, path, length, deterministic, **options):
        asked.update(options)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(vllm_engine, "make_engine", make)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    evaluate.start_player(EvalConfig(model="tiny"), tmp_path, contextlib.ExitStack())
    assert asked == {"seed": 0, "dtype": "float32", "gpu_memory_utilization": 0.9}


def test_a_player_that_fails_loses_nothing_that_was_played_and_is_told_what_to_record(tmp_path):
    asked = []

    def player(pool, requests, settings, progress):
        asked.append((len(requests), settings.record_state))
        raise OSError(28, "No space left on device")

    config = EvalConfig(env="textcraft", model="tiny", record_state=True, limit=2, samples=3)
    pool = SimpleNamespace(env="textcraft")
    summary, code, problem = evaluate.measure(config, player, pool, TASKS, tmp_path)
    assert asked == [(4 * 2 * 3, True)]  # two tasks of each of four sub-tasks
    assert code == 1 and "No space left on device" in problem
    assert not summary["complete"] and (tmp_path / "eval.json").exists()


# ------------------------------------------------------------------------------ --run


def a_run(folder, **options):
    """What a run leaves that an evaluation reads."""
    config = complete(replace(Config(), env="textcraft", model="tiny", rounds=(3, 5), **options))
    (folder / "checkpoints" / "step_000002").mkdir(parents=True)
    (folder / "checkpoints" / "step_000004").mkdir()
    (folder / "config.json").write_text(json.dumps({"config": asdict(config)}))
    return config


def test_a_run_is_measured_as_it_measures_itself(tmp_path):
    prompt = '[{"role": "system", "content": "Craft."}]'
    config = a_run(tmp_path, prompt=prompt, seed=7, eval_samples=4)
    own = settings_of_run(str(tmp_path), set())
    assert own.model.endswith("checkpoints/step_000004") and own.max_rounds == (5,)
    assert (own.env, own.prompt, own.tasks) == ("textcraft", prompt, "short_test")
    assert (own.subtasks, own.seed, own.samples) == ((), 7, 4)
    for name in ("max_tokens_per_turn", "max_trajectory_tokens", "temperature", "engine"):
        assert getattr(own, name) == getattr(config, name)
    (tmp_path / "checkpoints" / "best").symlink_to("step_000002")
    assert settings_of_run(str(tmp_path), set()).model.endswith("checkpoints/best")
    other = settings_of_run(str(tmp_path), {"env"}, "babyai")  # with its own prompt and turns
    assert (other.env, other.prompt, other.max_rounds, other.tasks) == ("babyai", None, (), None)
    assert other.horizons("babyai") == [PAPER["babyai"].max_rounds]
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        settings_of_run(str(tmp_path), set())


def test_options_beside_a_run_override_it(tmp_path, monkeypatch):
    a_run(tmp_path)
    monkeypatch.setattr(evaluate, "check_model", lambda *_: None)
    monkeypatch.setattr(evaluate, "check_length", lambda *_: None)
    words = ["--run", str(tmp_path), "--split", "test", "--max-rounds", "7", "9"]
    config = evaluate.parse_options(words)
    assert (config.tasks, config.split, config.subtasks) == (None, "test", ())
    assert config.max_rounds == (7, 9) and config.max_tokens_per_turn == 80


def test_a_run_without_held_out_tasks_is_measured_on_those_it_trains_on(tmp_path):
    a_run(tmp_path, eval_every=0, eval_tasks=None, tasks="family_train", subtasks=("depth 2",))
    own = settings_of_run(str(tmp_path), set())
    assert (own.tasks, own.subtasks) == ("family_train", ("depth 2",))
    known = load_tasks("textcraft", None, own.tasks, own.subtasks)
    assert num_trained_on(own, known) == len(known) > 0  # and replay.py calls them so
    others = [task for task in TASKS if task not in known]
    assert num_trained_on(own, [*others, known[0]]) == 1
    saved = json.loads((tmp_path / "config.json").read_text())["config"]
    of_files = {"method": "dpo", "config": saved | {"pairs": ["mine.jsonl"]}}
    (tmp_path / "config.json").write_text(json.dumps(of_files))
    assert num_trained_on(own, known) == 0
