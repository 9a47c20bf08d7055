"""What miniature.py has to do: arms, which of them make which figure, which runs are missing.

Read next: miniature.py.
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from recipes.common import RESULTS, Result, markdown, read_json, require_alike  # noqa: E402

BASE = ROOT / "recipes" / "miniature.json"
FOLDER = RESULTS / "miniature"
SEEDS = (0, 1, 2)
NOISE_SEEDS = (0, 1, 2, 3, 4)
PILOT_SEED = 9  # of the runs that choose a learning rate, by success on training goals
RATES = (3e-5, 1e-4, 3e-4)
ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus", "ppo")
# The arm that others are compared with: its runs are the shortest, and its held-out gain was the
# largest of the horizons' arms.
SHORT = ("--rounds", "4", "--eval-every", "60")
SHORT_STEPS = 180  # about as many turns as `long` plays in 60, whose episodes take three times more
PILOT_STEPS = SHORT_STEPS  # a rate that is best in a third of the steps may not last
WEAK_STEPS = 360  # 180 before the first run, whose held-out curve seemed not to have levelled off
WEAK = ("--model", "recipes/starts/tiny-babyai-near")  # what its teacher knew: near goals alone


@dataclass(frozen=True)
class Arm:
    """A way to train: options beside those of miniature.json, for how many steps.

    Attributes:
        learner: "train" is train.py, "none" the teacher, who only plays; the others are
            imitation.py's lessons.
        minutes: about how long a run takes on two cores, for the table; measured ones replace it.
    """

    words: tuple[str, ...] = ()
    seeds: tuple[int, ...] = SEEDS
    steps: int = 60
    learner: str = "train"
    minutes: float = 25.0


def rate_words(algorithm: str, rate: float) -> tuple[str, ...]:
    """A rate that takes a policy apart is a result too: nothing stops it."""
    words = ("--algorithm", algorithm, "--learning-rate", f"{rate:g}", "--on-collapse", "warn")
    return words + (("--critic-learning-rate", f"{rate:g}") if algorithm == "ppo" else ())


def pilot(algorithm: str, rate: float) -> str:
    return f"{algorithm}-{rate:g}"


def widened(every: int) -> tuple[str, ...]:
    """Four turns, then eight, then sixteen, so many steps of each before the next."""
    words = ("--rounds-scheduler", "scaling_inter_stepwise", "--rounds", "4", "8", "16")
    return (*words, "--steps-scaling-inter", str(every), "--eval-every", str(every))


ARMS: dict[str, Arm] = {
    "short": Arm(SHORT, steps=SHORT_STEPS),
    "long": Arm(),
    "stepwise": Arm(widened(every=32), steps=96),
    # Widened sooner or later than that, for about as many turns.
    "early": Arm(widened(every=16), steps=75),
    "late": Arm(widened(every=48), steps=110),
    "shuffled": Arm((*SHORT, "--shuffle-rewards", "--on-collapse", "warn"), steps=SHORT_STEPS),
    "still": Arm((*SHORT, "--learning-rate", "1e-12"), steps=60),
    "rl": Arm((*SHORT, *WEAK), steps=WEAK_STEPS),
    # As many seconds: of RL's trajectories those without news are left out of the update.
    "imitation": Arm((*SHORT, *WEAK, "--eval-every", "48"), steps=144, learner="teacher"),
    "filtered": Arm((*SHORT, *WEAK), steps=240, learner="own"),
    "teacher": Arm(seeds=(0,), steps=0, learner="none", minutes=0.5),
} | {
    pilot(algorithm, rate): Arm((*SHORT, *rate_words(algorithm, rate)), (PILOT_SEED,), PILOT_STEPS)
    for algorithm in ESTIMATORS
    for rate in RATES
}
FIGURES: dict[str, tuple[str, ...]] = {
    "horizons": ("short", "long", "stepwise"),
    "widening": ("early", "stepwise", "late"),
    "controls": ("short", "shuffled", "still"),
    "noise": ("short",),
    "teacher": ("teacher", "rl", "imitation", "filtered"),
    "compute": ("imitation", "rl"),
    "estimators": (
        *(pilot(algorithm, rate) for algorithm in ESTIMATORS for rate in RATES),
        *ESTIMATORS,
    ),
}


# -------------------------------------------------------------------------------- which run is next


def read_results(folder: Path) -> dict[tuple[str, int], Result]:
    """(arm, seed) -> its result. GRPO at the laboratory's own rate is `short`, which is not run
    again for it.

    Raises:
        ValueError: runs of an arm differ in more than the seed.
    """
    found = {}
    for path in sorted(folder.glob("*-*.json")):
        name, _, seed = path.stem.rpartition("-")
        found[name, int(seed)] = read_json(path)
    for name in {name for name, _ in found}:
        require_alike([result for (other, _), result in sorted(found.items()) if other == name])
    if chosen_rate("grpo", found) == read_json(BASE)["learning_rate"]:
        found |= {("grpo", s): found["short", s] for s in SEEDS if ("short", s) in found}
    return found


def chosen_rate(algorithm: str, results: dict[tuple[str, int], Result]) -> float | None:
    """The learning rate under which training goals were solved most often in a pilot's last third;
    None until all pilots are done."""
    scores = {}
    for rate in RATES:
        result = results.get((pilot(algorithm, rate), PILOT_SEED))
        if result is None:
            return None
        scores[rate] = pilot_score(result)
    return max(scores, key=lambda rate: scores[rate])


def pilot_score(result: Result) -> float:
    """Share of training episodes solved in the last third of its steps."""
    success = [row["train/success_rate"] for row in result["curve"]]
    return statistics.fmean(success[-len(success) // 3 :])


def arm_of(name: str, results: dict[tuple[str, int], Result]) -> Arm | None:
    """An estimator's arm has the rate that its pilots have chosen; None before that."""
    if name in ARMS:
        return ARMS[name]
    rate = chosen_rate(name, results)
    words = () if rate is None else (*SHORT, *rate_words(name, rate))
    return None if rate is None else Arm(words, steps=SHORT_STEPS)


def seeds_of(figure: str, name: str) -> tuple[int, ...]:
    if figure == "noise":
        return NOISE_SEEDS
    return ARMS[name].seeds if name in ARMS else SEEDS


def runs_behind(figure: str, results: dict[tuple[str, int], Result]) -> dict[str, list[Result]]:
    """Arm -> those of its results that the figure is made of, by seed."""
    return {
        name: [results[name, seed] for seed in seeds_of(figure, name) if (name, seed) in results]
        for name in FIGURES[figure]
    }


def wanted(figures: Sequence[str]) -> list[tuple[str, int]]:
    """The runs behind figures, each once: all arms' first seeds, then their second ones."""
    runs = dict.fromkeys(
        (place, seed, name)
        for figure in figures
        for name in FIGURES[figure]
        for place, seed in enumerate(seeds_of(figure, name))
    )
    return [(name, seed) for _, seed, name in sorted(runs, key=lambda run: run[0])]


def status(figures: Sequence[str], folder: Path) -> str:
    """A table: arms, seeds there and missing, minutes that a run takes, minutes left."""
    results = read_results(folder)
    runs, rows, left = wanted(figures), [], 0.0
    for name in dict.fromkeys(name for name, _ in runs):
        seeds = [seed for n, seed in runs if n == name]
        missing = [seed for seed in seeds if (name, seed) not in results]
        took = [60 * results[name, s]["hours"] for s in seeds if s not in missing]
        arm = ARMS.get(name, Arm())
        minutes = statistics.fmean(took) if took else arm.minutes
        left += minutes * len(missing)
        there = " ".join(str(s) for s in seeds if s not in missing) or "-"
        rows.append((name, there, " ".join(map(str, missing)) or "-", f"{minutes:.0f}"))
    lines = markdown("arm | seeds there | missing | minutes a run", rows)
    return "\n".join([*lines, "", f"{left / 60:.1f} hours of runs are missing"])
