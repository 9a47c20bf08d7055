"""Write the id lists: python -m envs.webarena.write_ids. See tasks.py for what they hold."""

import json
import random
from collections import defaultdict
from pathlib import Path

import envs.webarena.tasks as tasks

EASY = ("map_phone", "map_hours", "map_street")
TEST = {"Shopping": 15, "CMS": 15, "Maps": 10, "GitLab": 5, "Reddit": 5}
TRAIN = {"Shopping": 112, "CMS": 112, "Maps": 74, "GitLab": 37, "Reddit": 37}
KEPT_BACK = 4  # tasks of each template in training that are for testing; of easy ones a third


def deal(pools: list[list[int]], number: int) -> list[int]:
    """`number` tasks from the pools in turn."""
    pools, dealt = [list(pool) for pool in pools], []
    while len(dealt) < number:
        for pool in pools:
            if pool and len(dealt) < number:
                dealt.append(pool.pop(0))
    return dealt


def main() -> None:
    by_template: dict[str, list[int]] = defaultdict(list)
    for index, instance in enumerate(tasks.ours(), tasks.NUM_OFFICIAL):
        by_template[instance.template].append(index)
    generator = random.Random("webarena ids")
    lists: dict[str, list[int]] = defaultdict(list)
    for subtask in TEST:
        names = [n for n, ids in by_template.items() if tasks.subtask(ids[0]) == subtask]
        held_out = generator.sample([n for n in names if n not in EASY], round(len(names) / 5))
        others = [name for name in names if name not in held_out]
        generator.shuffle(others)
        pools = {name: by_template[name][:] for name in names}
        for pool in pools.values():
            generator.shuffle(pool)
        back = {n: max(KEPT_BACK, len(pools[n]) // 3) if n in EASY else KEPT_BACK for n in others}
        half = TEST[subtask] // 2
        lists["train"] += deal([pools[n][back[n] :] for n in others], TRAIN[subtask])
        lists["template_test"] += [index for name in held_out for index in pools[name]]
        lists["instance_test"] += [index for name in others for index in pools[name][:KEPT_BACK]]
        lists["test"] += deal([pools[name] for name in held_out], half)
        lists["test"] += deal([pools[n][:KEPT_BACK] for n in others], TEST[subtask] - half)
        for name in set(EASY).intersection(others):
            lists["short_train"] += pools[name][back[name] :]
            lists["short_test"] += pools[name][: back[name]]
    for name, indices in lists.items():
        lines = (json.dumps({"item_id": f"webarena_{index}"}) for index in sorted(indices))
        path = Path(__file__).with_name("ids") / f"webarena_{name}.json"
        path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
