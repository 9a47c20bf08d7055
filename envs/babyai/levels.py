"""The 40 levels of BabyAI, in AgentGym's order, and the sub-task of each level.

    level number = task_index % 40 + 1        level seed = task_index // 40

    >>> level_and_seed(0), level_and_seed(83)
    ((1, 0), (4, 2))
    >>> LEVELS[3], SUBTASKS[3]
    ('BabyAI-GoToObjS6-v1', 'GoTo')

Only level 4 differs from AgentGym's list, which has GoToObjS6-v0. minigrid before 2.5 built a room
of 4 x 4 under that name, and later versions reject the name.

The sub-tasks are those of AgentGym-RL's tables, which count 90 test items: 55 GoTo, 15 Pickup, and
5 each of ActionObjDoor, FindObjS7, OneRoomS20 and SynthLoc. The levels behind these names are not
published. The counts fit five items per level, with levels 1 to 11 as GoTo, three levels as Pickup
and one level for each other name. Every remaining level is a separate sub-task. This module does
not need minigrid.
"""

NUM_SEEDS = 1000  # per level; minigrid has no limit, but a list of tasks needs one

LEVELS = tuple(
    f"BabyAI-{name}-{'v1' if name == 'GoToObjS6' else 'v0'}"
    for name in (
        # 1 to 11
        "GoToRedBallGrey GoToRedBall GoToRedBallNoDists GoToObjS6 GoToLocalS8N7 GoToObjMazeS7 "
        "GoToImpUnlock GoToSeqS5R2 GoToRedBlueBall GoToDoor GoToObjDoor "
        # 12 to 21
        "Open OpenRedDoor OpenDoorLoc OpenRedBlueDoorsDebug OpenDoorsOrderN4Debug "
        "Pickup UnblockPickup PickupLoc PickupDistDebug PickupAbove "
        # 22 to 29
        "PutNextLocalS6N4 PutNextS7N4Carrying "
        "Unlock UnlockLocalDist KeyInBox UnlockPickupDist BlockedUnlockPickup UnlockToUnlock "
        # 30 to 40
        "ActionObjDoor FindObjS7 KeyCorridorS6R3 OneRoomS20 MoveTwoAcrossS8N9 "
        "SynthS5R2 SynthLoc SynthSeq MiniBossLevel BossLevel BossLevelNoUnlock"
    ).split()
)


def _subtask(level: str) -> str:
    name = level[len("BabyAI-") : -len("-v0")]
    if name.startswith("GoTo"):
        return "GoTo"
    return "Pickup" if name in ("Pickup", "PickupLoc", "PickupAbove") else name


SUBTASKS = tuple(_subtask(level) for level in LEVELS)


def level_and_seed(task_index: int) -> tuple[int, int]:
    """(level number 1..40, level seed) of a task."""
    return task_index % len(LEVELS) + 1, task_index // len(LEVELS)


def task_index_of(number: int, seed: int) -> int:
    """The inverse of `level_and_seed`."""
    return number - 1 + len(LEVELS) * seed
