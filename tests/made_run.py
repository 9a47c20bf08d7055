"""A small artificial run directory for tests of the viewer, with all files in their real formats.

Its trajectories are TextCraft tasks played by the oracle after some useless turns, so they can be
re-enacted. `hostile_line` puts a HOSTILE string wherever a model, an environment or a task could
have written one.
"""

import json
import random
import shutil
from pathlib import Path
from typing import Any

from chat import ChatTemplate
from envs import load_tasks
from envs.textcraft.env import TextCraft
from models import load_tokenizer
from reporting.scoring import summarize
from run.files import write_json, write_text
from trajectory import RolloutHandler

START = Path(__file__).resolve().parent.parent / "recipes" / "starts" / "tiny-careless"
# Fifty episodes each of three environments; tests/played.py at commit fbf0efd has recorded them.
PLAYED = Path(__file__).parent / "data" / "played"
HOSTILE = (
    "<script>window.pwned=1</script>",
    "</script><img src=x onerror='window.pwned=1'>",
    "[link](javascript:window.pwned=1)",
    "\x1b[31mred\x1b]0;title\x07",
    "\u202eright to left\u2066",
    "half \ud83d surrogate",
    "line\u2028separator\x00null",
)


def play(
    chat: ChatTemplate, task: Any, step: int, group: int, sample: int, turns: int
) -> RolloutHandler:
    """A trajectory of the oracle; its first turns are wasted on the inventory."""
    rng = random.Random(f"{step} {group} {sample}")
    env = TextCraft()
    name = f"s{step:06d}-t{group:04d}-k{sample:02d}"
    t = RolloutHandler(name, step, "textcraft", task.task_id, task.subtask, group, 0, turns)
    t.start(chat, TextCraft.PROMPT, env.reset(task.task_index))
    t.first_state = env.state_for_people()
    num_wasted = sample % 3
    for number in range(turns):
        thought, action = env.oracle()
        advice = f"Thought: {thought}\nAction: {action}"
        action = "inventory" if number < num_wasted else action
        text = f"Thought: {thought}\nAction: {action}"
        t.next_prompt()
        ids = chat.action(text)
        turn = t.add_action(chat, ids, [-rng.random() for _ in ids])
        observation, turn.reward, is_over, _, info = env.step(action)
        turn.observation_text, turn.state = observation, env.state_for_people()
        turn.generate_s, turn.env_s = 0.5, 0.001
        turn.advice = advice if number < num_wasted else None
        if is_over:
            t.stop("success", info["success"])
            break
        if number + 1 < turns:
            t.add_observation(chat, observation)
    else:
        t.stop("max_rounds")
    advantage = 1.0 if t.success else -1.0
    t.advantages = [advantage * m for m in t.loss_mask]
    t.used_in_loss = True
    return t


def lost_trajectory(step: int, group: int, task: Any) -> RolloutHandler:
    name = f"s{step:06d}-t{group:04d}-k99"
    t = RolloutHandler(name, step, "textcraft", task.task_id, task.subtask, group, 0, 4)
    t.error = "connection refused"
    t.stop("env_error")
    return t


def make_run(path: Path, steps: int = 3, turns: int | None = None) -> Path:
    """Two groups of three episodes per step, and one lost trajectory in the last step.

    Args:
        turns: maximum number of turns; None: one more at each step.
    """
    chat = ChatTemplate(load_tokenizer(str(START)))
    tasks = load_tasks("textcraft", "test")[:3]
    config = {"env": "textcraft", "model": "tiny", "algorithm": "grpo", "steps": steps, "seed": 0}
    write_json(path / "config.json", {"config": config | {"learning_rate": 1e-4}})
    for step in range(1, steps + 1):
        trajectories = [
            play(chat, tasks[group], step, group, sample, turns or 2 + step)
            for group in range(2)
            for sample in range(3)
        ]
        if step == steps:
            trajectories.append(lost_trajectory(step, 2, tasks[2]))
        add_step(path, step, trajectories)
    for step in (0, steps):
        trajectories = [
            play(chat, task, step, group, sample, 6)
            for group, task in enumerate(tasks)
            for sample in (0, 2)
        ]
        write_lines(path, f"eval_{step:06d}", trajectories)
        summary = summarize(trajectories, 2, [6]) | {"step": step}
        write_json(path / f"eval/step_{step:06d}.json", summary)
    shutil.copytree(START, path / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors"))
    return path


def add_step(path: Path, step: int, trajectories: list[RolloutHandler]) -> None:
    """Add one step to the logs and trajectories of a run."""
    valid = [t for t in trajectories if t.is_valid]
    success = sum(t.success for t in valid) / len(valid)
    row: dict[str, Any] = {"step": step, "train/return_mean": success, "policy/loss": None}
    row |= {"train/success_rate": success, "horizon/max_rounds": 2 + step, "policy/entropy": 0.4}
    row |= {"train/env_failures": len(trajectories) - len(valid), "train/stop/success": success}
    append(path / "metrics.jsonl", row)
    append(path / "timings.jsonl", {"step": step, "time/rollout_s": 2.0, "time/update_s": 3.0})
    write_lines(path, f"step_{step:06d}", trajectories)


def write_lines(path: Path, name: str, trajectories: list[RolloutHandler]) -> None:
    write_text(path / f"trajectories/{name}.jsonl", "".join(t.to_json() for t in trajectories))


def append(path: Path, row: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def hostile_line(number: int, text: str) -> str:
    """A trajectory line in which every text is `text`; JSON escapes half surrogates."""
    state = {"goal": text, "inventory": {text: 1}, "commands": [text], "plan": [text], text: text}
    turn = {
        **{"action_span": None, "action_text": text, "observation_text": text, "state": state},
        **{"reward": 0.0, "parse_error": text, "advice": text, "generate_s": 0.1, "env_s": 0.1},
    }
    line = {
        **{"trajectory_id": f"h{number}", "step": 1, "env": "textcraft", "task_id": text},
        **{"subtask": text, "group_id": number, "seed": 0, "max_rounds": 2, "success": False},
        **{"terminated": False, "truncated": True, "stop_reason": "max_rounds"},
        **{"used_in_loss": True, "error": text, "weight_version": 0, "return": 0.0},
        **{"num_turns": 1, "num_tokens": None, "parse_errors": 1, "advantage": None},
        "messages": [{"role": role, "content": text} for role in ("system", "user", "assistant")],
        **{"turns": [turn], "first_state": state},
        **dict.fromkeys(("input_ids", "loss_mask", "rollout_log_probs", "advantages")),
    }
    return json.dumps(line) + "\n"
