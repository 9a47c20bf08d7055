"""evaluate.py from the command line to the files, with a real server and scripted models."""

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
from test_chatapi import ScriptedServer, completion, oracle_answer, task_index_of
from toy_env import Letters, serve

import envs
import evaluate
from agents import Agent
from config import Config, complete
from envclient import LOCAL, EnvError, local_server
from envs import load_tasks
from evaluate import EvalConfig, main, num_trained_on, settings_of_run
from formats import Code
from reporting.leaderboard import PAPER
from rollout import RolloutSettings
from sampling import vllm_engine

ROOT = Path(__file__).resolve().parent.parent
TASKS = load_tasks("textcraft", "test")


@pytest.fixture(scope="module")
def env_url():
    with local_server("textcraft") as url:
        yield url


# -------------------------------------------------------------------- the command line


def test_an_evaluation_of_a_chat_model_writes_all_results(env_url, tmp_path, capsys):
    out = tmp_path / "result"
    with ScriptedServer(oracle_answer) as server:
        code = main(
            ["--api-base", server.url, "--api-model", "oracle", "--env-addr", env_url]
            + ["--subtasks", "depth 1", "depth 4", "--samples", "2"]
            + ["--max-rounds", "40", "2", "4", "--out", str(out)]
        )
    assert code == 0
    output = capsys.readouterr().out
    assert "depth 1" in output and "100.0 % [" in output
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


def test_an_evaluation_of_a_local_model_writes_all_results(env_url, tmp_path, capsys):
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([{"item_id": "textcraft_0"}, {"item_id": "textcraft_40"}]))
    options = "--model tiny --deterministic --samples 2 --max-rounds 2 --max-tokens-per-turn 8"
    options += " --temperature 1 0.5"
    arguments = [*options.split(), "--tasks", str(ids), "--env-addr", env_url]
    results = []
    for name in ("a", "b"):
        assert main([*arguments, "--out", str(tmp_path / name)]) == 0
        hot, cool = (tmp_path / name / f"temperature_{t}" for t in ("1", "0.5"))
        assert json.loads((cool / "eval.json").read_text())["temperature"] == 0.5
        lines = (hot / "trajectories.jsonl").read_text().splitlines()
        rows = sorted((json.loads(line) for line in lines), key=lambda r: r["trajectory_id"])
        results.append([(row["trajectory_id"], row["input_ids"]) for row in rows])
    assert len(results[0]) == 4
    assert results[0] == results[1]  # --deterministic
    assert results[0][0][1] != results[0][1][1]  # but two samples of a task differ
    pair = [str(tmp_path / name / "temperature_1/eval.json") for name in ("a", "b")]
    assert main(["--compare", *pair]) == 0
    assert "+0.0 points" in capsys.readouterr().out


def test_ctrl_c_saves_the_ended_episodes_and_exits_with_130(env_url, tmp_path):
    def answer_some(body):
        if task_index_of(body) % 10:
            time.sleep(60)
        return oracle_answer(body)

    out = tmp_path / "out"
    log = out / "trajectories.jsonl"
    with ScriptedServer(answer_some) as server:
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


def test_an_evaluation_that_cannot_start_writes_no_files_and_loads_no_model(
    tmp_path, capsys, monkeypatch
):
    def load(*_):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(evaluate, "start_player", load)
    (tmp_path / "a file").write_text("")
    for url, out, code, reason in (
        ("http://127.0.0.1:1", "a file/below", 2, "a file"),
        ("http://127.0.0.1:9", "out", 1, "http://127.0.0.1:9"),
    ):
        assert main(["--env-addr", url, "--out", str(tmp_path / out)]) == code
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("evaluate.py: ") and reason in line
        assert [p.name for p in tmp_path.iterdir()] == ["a file"]


# ------------------------------------------------------------------------------ --env all


ENVS = ("textcraft", "babyai")  # names for which the paper has results; both play Letters


@pytest.fixture
def servers(monkeypatch, tmp_path):
    """Servers of two toy environments. `start_log` lists the starts. Servers in `unstartable` do
    not start, and servers in `failing` fail at every step."""
    state = SimpleNamespace(start_log=[], unstartable=set(), failing=set())

    @contextlib.contextmanager
    def local_server(env):
        async def fail_if_asked(request, call_next):
            if env in state.failing and request.url.path == "/step":
                return JSONResponse({"error": "the simulator died"}, 500)
            return await call_next(request)

        state.start_log.append(env)
        if env in state.unstartable:
            raise EnvError("exited with 1 at start:\nModuleNotFoundError: No module", env)
        with serve(Letters, fail_if_asked, name=env) as url:
            yield url

    for env in ENVS:
        ids = [{"item_id": f"{env}_{i}"} for i in range(4)]
        (tmp_path / f"{env}_test.json").write_text(json.dumps(ids))
        monkeypatch.setitem(envs.ENVS, env, "toy_env:Letters")
    for env in set(envs.ENVS) - set(ENVS):
        monkeypatch.delitem(envs.ENVS, env)
    monkeypatch.setattr(envs, "ids_dir", lambda env: tmp_path)
    monkeypatch.setattr("envclient.BACK_OFF_S", 0.001)
    monkeypatch.setattr(evaluate, "local_server", local_server)
    return state


def evaluate_all(url, out, *options):
    """Run `--env all`; returns the exit code and the environments in benchmark.json."""
    command = ["--env", "all", "--api-base", url, "--api-model", "writer", "--out", str(out)]
    code = main([*command, *options])
    table = out / "benchmark.json"
    return code, json.loads(table.read_text())["families"] if table.exists() else {}


@pytest.fixture
def writer():
    """A chat server whose model solves the tasks with an even index."""

    def answer(body):
        messages = [message["content"] for message in body["messages"]]
        observation = next(text for text in messages if text.startswith("craft"))
        return completion("abc" if int(observation.split()[-1]) % 2 == 0 else "xyz")

    with ScriptedServer(answer) as server:
        yield server.url


def test_env_all_compares_all_environments_with_the_papers_numbers(
    servers, writer, tmp_path, capsys
):
    out = tmp_path / "out"
    code, rows = evaluate_all(writer, out, "--samples", "2")
    output = capsys.readouterr().out
    assert code == 0 and servers.start_log == list(ENVS)
    results = {env: json.loads((out / env / "eval.json").read_text()) for env in ENVS}
    for result in results.values():
        assert result["complete"] and result["samples"] == 2
        assert result["subtasks"]["even"]["avg"]["value"] == 1.0
        assert result["subtasks"]["odd"]["avg"]["value"] == 0.0
    assert (out / "benchmark.md").read_text() in output
    row = "| babyai | all | 4 ! | 50.0 [6.8, 93.2] | 50.0 [6.8, 93.2] | 90 | 52.2 | 66.7 |"
    assert row in " ".join(output.split())
    assert rows["babyai"]["overall"] == results["babyai"]["overall"]


@pytest.mark.parametrize(
    ("fault", "reason"), [("unstartable", "No module"), ("failing", "the simulator died")]
)
def test_if_an_environment_fails_the_others_are_still_evaluated(
    fault, reason, servers, writer, tmp_path, capsys
):
    getattr(servers, fault).add("textcraft")
    code, rows = evaluate_all(writer, tmp_path / "out")
    assert code == 1 and reason in rows["textcraft"]["not_measured"]
    assert rows["babyai"]["overall"]["items"] == 4
    output = capsys.readouterr()
    (line,) = [x for x in output.err.splitlines() if x.startswith("evaluate.py: textcraft: ")]
    assert reason in line and re.search(r"\| textcraft +\| not measured: ", output.out)


@pytest.mark.parametrize("fault", ["unstartable", "failing"])  # the latter has an eval.json
def test_resume_plays_the_missing_environments_and_refuses_other_settings(
    fault, servers, writer, tmp_path, capsys
):
    out = tmp_path / "out"
    getattr(servers, fault).add("babyai")
    assert evaluate_all(writer, out)[0] == 1
    files = {path: path.read_bytes() for path in (out / "textcraft").iterdir()}
    getattr(servers, fault).clear()
    servers.start_log.clear()
    capsys.readouterr()
    for options, message in (
        ([], "exists and is not empty"),
        (["--resume", "--max-rounds", "3", "9"], "measured with max_rounds [30], not [3, 9]"),
        (["--resume", "--api-model", "other"], "measured with model writer, not other"),
        (["--resume", "--agent", "plan"], "measured with agent None, not plan"),
    ):
        assert evaluate_all(writer, out, *options)[0] == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    summary = out / "textcraft/eval.json"
    old = summary.read_bytes()
    summary.write_text(json.dumps(json.loads(old) | {"agent": "plan", "attempts": 1}))
    assert evaluate_all(writer, out, "--resume")[0] == 2
    assert "measured with agent plan, not None" in capsys.readouterr().err
    summary.write_bytes(old)
    for _ in range(2):  # the second time nothing is missing
        code, rows = evaluate_all(writer, out, "--resume")
        assert (code, servers.start_log) == (0, ["babyai"])
    assert files == {path: path.read_bytes() for path in (out / "textcraft").iterdir()}
    assert [row["overall"]["items"] for row in rows.values()] == [4, 4]


# ------------------------------------------------------------------------------ options


BAD_COMMANDS = {
    "--samples 0": "--samples 0",
    "--max-rounds 10 0": "--max-rounds 0 must be above 0",
    "--temperature 3": "--temperature 3.0 must be between 0 and 2",
    f"--seed {2**32}": "--seed 4294967296",
    "--temperature 0 0.0": "--temperature has the same temperature twice",
    "--temperature 0 --samples 4": "use --samples 1",
    "--deterministic --api-base http://h --api-model m": "not possible with --api-base",
    "--tasks x.json --split test": "both name tasks",
    "--model tiny --api-base http://h --api-model m": "cannot be combined",
    "--api-base http://h": "--api-model together",
    "--api-base http://h --api-model m --api-key-env NO_SUCH_KEY": "NO_SUCH_KEY",
    "--api-base h:1 --api-model m": "not an address",
    "--env all --tasks x.json": "--env all",
    "--env textcraft --resume --out x": "--resume needs --env all",
    "--env all --resume --out tests": "tests holds no",
    "--subtasks nix": "nix",
    "--compare one.json": "two files",
    "--compare a.json b.json": "a.json is not",
    "--out tests": "--out tests exists",
    "--run tests": "--run tests holds no run",
}


@pytest.mark.parametrize("command", BAD_COMMANDS)
def test_misuse_exits_with_2_and_one_line(command, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(command.split()) == 2
    out, err = capsys.readouterr()
    assert err.startswith("evaluate.py: ") and BAD_COMMANDS[command] in err
    assert len(err.splitlines()) == 1 and out == ""


def test_on_a_gpu_the_sampler_gets_most_of_the_memory_and_a_supported_number_format(
    tmp_path, monkeypatch
):
    """A T4, for example, does not support bfloat16."""
    engine_options = {}

    def make(kind, path, length, deterministic, **options):
        engine_options.update(options)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(vllm_engine, "make_engine", make)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    evaluate.start_player(EvalConfig(model="tiny"), tmp_path, contextlib.ExitStack())
    assert engine_options == {"seed": 0, "dtype": "float32", "gpu_memory_utilization": 0.9}


def test_an_evaluation_is_played_with_its_options_and_if_play_fails_its_results_are_written(
    tmp_path,
):
    calls = []

    def player(pool, requests, settings, progress):
        calls.append((len(requests), settings, {(r.seed, r.max_rounds) for r in requests}))
        raise OSError(28, "No space left on device")

    options = {"max_tokens_per_turn": 90, "max_trajectory_tokens": 900, "seed": 7, "env_workers": 5}
    options |= {"max_env_failures": 0.3, "record_state": True}
    config = EvalConfig(temperature=(0.5,), agent="plan", limit=2, samples=3, **options)
    pool = SimpleNamespace(env="textcraft")
    summary, code, problem = evaluate.measure(config, player, pool, TASKS, tmp_path)
    settings = RolloutSettings(temperature=0.5, agent=Agent("plan"), **options)
    # Three samples of two tasks of each of four sub-tasks.
    assert calls == [(4 * 2 * 3, settings, {(7, PAPER["textcraft"].max_rounds)})]
    assert code == 1 and "No space left on device" in problem
    assert not summary["complete"] and (tmp_path / "eval.json").exists()


def test_the_clients_of_an_evaluation_have_its_prompt_and_action_format():
    prompt = [{"role": "system", "content": "Craft."}]
    options = {"action_format": "code", "max_actions_per_turn": 2, "prompt": json.dumps(prompt)}
    with contextlib.ExitStack() as stack:
        config = EvalConfig(env_addr=(LOCAL,), **options)
        client = stack.enter_context(evaluate.start_pool(config, "textcraft", stack).client())
        assert (client.prompt, client.action_format) == (prompt, Code(2))


# ------------------------------------------------------------------------------ --run


def make_run(folder, **options):
    """Write the files of a run that an evaluation reads; returns the run's options."""
    config = complete(replace(Config(), env="textcraft", model="tiny", rounds=(3, 5), **options))
    (folder / "checkpoints" / "step_000002").mkdir(parents=True)
    (folder / "checkpoints" / "step_000004").mkdir()
    (folder / "config.json").write_text(json.dumps({"config": asdict(config)}))
    return config


def test_a_run_is_evaluated_with_its_own_evaluation_settings(tmp_path):
    prompt = '[{"role": "system", "content": "Craft."}]'
    temperatures = (1.0, 0.3)
    writing = {"agent": "plan", "attempts": 3, "action_format": "code", "max_actions_per_turn": 2}
    run_config = make_run(
        tmp_path, prompt=prompt, seed=7, eval_samples=4, eval_temperatures=temperatures, **writing
    )
    config = settings_of_run(str(tmp_path), set())
    assert config.model.endswith("checkpoints/step_000004") and config.max_rounds == (5,)
    assert (config.env, config.prompt, config.tasks) == ("textcraft", prompt, "short_test")
    assert (config.subtasks, config.seed, config.samples) == ((), 7, 4)
    assert config.temperature == temperatures
    for name in ("max_tokens_per_turn", "max_trajectory_tokens", "engine", *writing):
        assert getattr(config, name) == getattr(run_config, name)
    (tmp_path / "checkpoints" / "best").symlink_to("step_000002")
    assert settings_of_run(str(tmp_path), set()).model.endswith("checkpoints/best")
    babyai = settings_of_run(str(tmp_path), {"env"}, "babyai")  # uses babyai's prompt and horizon
    assert (babyai.env, babyai.prompt, babyai.max_rounds) == ("babyai", None, ())
    assert babyai.tasks is None and babyai.horizons("babyai") == [PAPER["babyai"].max_rounds]
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        settings_of_run(str(tmp_path), set())


def test_command_line_options_override_those_of_the_run(tmp_path, monkeypatch):
    make_run(tmp_path)
    monkeypatch.setattr(evaluate, "check_model", lambda *_: None)
    monkeypatch.setattr(evaluate, "check_length", lambda *_: None)
    argv = ["--run", str(tmp_path), "--split", "test", "--max-rounds", "7", "9"]
    config = evaluate.parse_options(argv)
    assert (config.tasks, config.split, config.subtasks) == (None, "test", ())
    assert config.max_rounds == (7, 9) and config.max_tokens_per_turn == 80


def test_a_run_without_held_out_tasks_is_evaluated_on_its_training_tasks(tmp_path):
    make_run(tmp_path, eval_every=0, eval_tasks=None, tasks="family_train", subtasks=("depth 2",))
    config = settings_of_run(str(tmp_path), set())
    assert (config.tasks, config.subtasks) == ("family_train", ("depth 2",))
    train_tasks = load_tasks("textcraft", None, config.tasks, config.subtasks)
    assert num_trained_on(config, train_tasks) == len(train_tasks) > 0
    other_tasks = [task for task in TASKS if task not in train_tasks]
    assert num_trained_on(config, [*other_tasks, train_tasks[0]]) == 1
    run_config = json.loads((tmp_path / "config.json").read_text())["config"]
    dpo_config = {"method": "dpo", "config": run_config | {"pairs": ["mine.jsonl"]}}
    (tmp_path / "config.json").write_text(json.dumps(dpo_config))
    assert num_trained_on(config, train_tasks) == 0
