"""Groups of trajectories to measure an update on: TextCraft goals that an oracle plays, and random
ids that share exactly as much as they are asked to."""

import random
from collections.abc import Sequence
from typing import Any

import torch

from batching import Batch, make_batch
from chat import ChatTemplate
from envs import Task, get_env, load_tasks
from trajectory import RolloutHandler

GROUP = 8  # samples of a task (G)
POLICY_RUN, OBSERVATION_RUN = 24, 16  # tokens of an own part


def play(
    chat: ChatTemplate, task: Task, group_id: int, sample: int, max_rounds: int
) -> RolloutHandler:
    """One episode in this process: the oracle, which asks for the wrong thing now and then."""
    rng = random.Random(f"{task.task_id}/{sample}")
    error_rate = rng.random()
    world = get_env("textcraft")()
    handler = RolloutHandler(
        trajectory_id=f"{task.task_id}-{sample}",
        step=1,
        env="textcraft",
        task_id=task.task_id,
        subtask=task.subtask,
        group_id=group_id,
        seed=0,
        max_rounds=max_rounds,
    )
    handler.start(chat, world.PROMPT, world.reset(task.task_index, 0))
    while not handler.stop_reason:
        thought, action = world.oracle()
        if rng.random() < error_rate:
            thought, action = "I look at what I have.", "inventory"
        ids = chat.action(world.say(thought, action))
        turn = handler.add_action(chat, ids, [-0.5] * len(ids))
        observation, turn.reward, terminated, _, info = world.step(action)
        if terminated:
            handler.stop("success" if info["success"] else "failure", info["success"])
        elif len(handler.turns) == max_rounds:
            handler.stop("max_rounds")
        else:
            handler.add_observation(chat, observation)
    return handler


def played_batch(tokenizer: Any, num_tasks: int, samples: int, max_rounds: int) -> Batch:
    """`samples` episodes of each of TextCraft's first goals of depth 1."""
    chat = ChatTemplate(tokenizer)
    tasks = load_tasks("textcraft", "train", subtasks=("depth 1",))[:num_tasks]
    episodes = [
        play(chat, task, group, sample, max_rounds)
        for group, task in enumerate(tasks)
        for sample in range(samples)
    ]
    return make_batch(episodes, tokenizer.pad_token_id or 0)


def shape(share: float, length: int, spread: float = 0.0) -> tuple[int, list[int]]:
    """Opening p and the 8 own parts of rows of `length` tokens on average, so that s is `share`.

    Args:
        spread: own parts go from (1 - spread) to (1 + spread) times their mean.

    >>> shape(0.5, 256)
    (146, [110, 110, 110, 110, 110, 110, 110, 110])
    >>> shape(0.5, 256, spread=0.5)
    (146, [55, 71, 86, 102, 118, 134, 149, 165])
    """
    p = max(1, round(share * length * GROUP / (GROUP - 1)))  # a row's first token is nobody's
    n = length - p
    if n < 1:
        raise ValueError(f"8 samples can save at most {1 - 1 / GROUP} of their tokens, not {share}")
    factors = [1 + spread * (2 * i / (GROUP - 1) - 1) for i in range(GROUP)]
    return p, [max(1, round(n * factor)) for factor in factors]


def construct(p: int, owns: Sequence[int], groups: int, vocabulary: int, seed: int = 0) -> Batch:
    """`groups` groups of random ids: an opening of p tokens and own parts of the given lengths."""
    generator = torch.Generator().manual_seed(seed)
    width, rows = p + max(owns), groups * len(owns)
    ids = torch.zeros(rows, width, dtype=torch.long)
    mask = torch.zeros(rows, width)
    period = POLICY_RUN + OBSERVATION_RUN
    policy_speaks = (torch.arange(max(owns)) % period < POLICY_RUN).float()
    for group in range(groups):
        opening = torch.randint(3, vocabulary, (p,), generator=generator)
        for i, n in enumerate(owns):
            row = group * len(owns) + i
            ids[row, :p] = opening
            ids[row, p : p + n] = torch.randint(3, vocabulary, (n,), generator=generator)
            mask[row, p : p + n] = policy_speaks[:n]
    return Batch(
        input_ids=ids,
        loss_mask=mask,
        rollout_log_probs=-0.5 * mask,
        token_rewards=torch.zeros_like(mask),
        lengths=torch.tensor([p + n for n in owns] * groups),
        group_ids=torch.arange(groups).repeat_interleave(len(owns)),
    )
