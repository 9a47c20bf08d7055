"""One step of DPO, here and in TRL: seconds and peak memory on the same pairs.

The pairs are episodes of TextCraft's goals by an oracle that errs (groups.py), token for token the
same on both sides, with the same numbers for what the reference thinks of them, so that neither
side runs a reference. Equal too: the model, AdamW in float32, the number format that this machine
is faster in, one optimizer step for all pairs, no gradient checkpointing. Different:

                    ours                                     TRL 1.16
    micro-batches   by token budget                          as many pairs as --micro-pairs, padded
    an opening      computed once for both of a pair         twice
    a sum is over   the policy's own tokens                  all behind the prompt, observations too

Each side is a process of its own that takes a step when told to, the two in turn; the first step of
each is a warm-up and not counted. Peak memory is that of the process over all its steps.

    goals: a step 1.5 times as fast, peak memory below TRL's

TRL is not part of the requirements:   pip install 'trl==1.16.*' datasets
Run it:   python benchmarks/trl_dpo.py --repeats 5         an estimated ten minutes on two cores
It prints a table and writes benchmarks/results/trl_dpo.json. Read next: trl_step.py.
"""

# mypy: disable-error-code="import-not-found, import-untyped"

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import Results, arguments, median  # noqa: E402
from benchmarks.trl_step import Side, report, trl_version, wait_for_turn  # noqa: E402

GOAL = 1.5
BETA = 0.1
REFERENCE = -1.0  # nats a policy token, of every trajectory: what is measured does not depend on it


def pairs_of(model: str, count: int) -> Any:
    """A batch of pairs, two rows each, with the reference's sums."""
    from benchmarks.groups import played_batch
    from models import load_tokenizer

    batch = played_batch(load_tokenizer(model), count, 2, max_rounds=7)
    batch.ref_sums = REFERENCE * batch.loss_mask.sum(1)
    return batch


def peak_bytes() -> int:
    """The largest that this process has been."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def figures_of(batch: Any, seconds: float) -> dict[str, float]:
    tokens = int(batch.lengths.sum())
    return {"step_s": seconds, "tokens_per_s": tokens / seconds, "peak_bytes": peak_bytes()}


def run_ours(options: argparse.Namespace) -> None:
    """dpo.py's banner 3, step by step."""
    import dpo
    from benchmarks.common import make_learner, one_step
    from config import Config
    from dpo import DpoConfig
    from update import suited

    batch, learner = pairs_of(options.start, options.pairs), make_learner(options.start)
    budget = Config().max_tokens_per_micro_batch
    objective = suited(one_step(len(batch), budget), batch)
    for _ in range(options.repeats + 1):
        wait_for_turn()
        began = time.perf_counter()
        dpo.prefer(learner, batch, objective, DpoConfig(beta=BETA, sft_coef=0.0))
        report(figures_of(batch, time.perf_counter() - began))


def run_trl(options: argparse.Namespace) -> None:
    """TRL's own loop; each of its optimizer steps waits for its turn."""
    import torch
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer

    from models import load_tokenizer
    from scale.precision import choose

    batch = pairs_of(options.start, options.pairs)
    steps = options.repeats + 1
    # A name of its own spares `datasets` the hashing of its content, which pyarrow 26 breaks.
    rows = {name: values * steps for name, values in columns_of(batch).items()}
    dataset = Dataset(InMemoryTable.from_pydict(rows), fingerprint="trl_dpo")

    class Tokenized(DPOTrainer):
        """Its rows are ids already, and come with what the reference thinks of them."""

        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

        def _precompute_ref_logps(self, dataset: Any, *_: Any) -> Any:
            return dataset

    class InTurn(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            wait_for_turn()
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            report(figures_of(batch, time.perf_counter() - self.began))

    with tempfile.TemporaryDirectory() as folder:
        config = DPOConfig(
            output_dir=folder,
            model_init_kwargs={"dtype": "float32"},
            use_cpu=not torch.cuda.is_available(),
            bf16=choose("auto").format == "bf16",
            gradient_checkpointing=False,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            weight_decay=0.0,
            beta=BETA,
            loss_type=["sigmoid"],
            max_length=None,
            precompute_ref_log_probs=True,
            per_device_train_batch_size=options.micro_pairs,
            gradient_accumulation_steps=options.pairs // options.micro_pairs,
            max_steps=steps,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        Tokenized(
            model=options.start,
            args=config,
            train_dataset=dataset,
            processing_class=load_tokenizer(options.start),
            callbacks=[InTurn()],
        ).train()


def columns_of(batch: Any) -> dict[str, list[Any]]:
    """The pairs as TRL's collator takes them: the prompt ends where the policy first speaks."""
    columns: dict[str, list[Any]] = {
        name: []
        for name in ("prompt_ids", "chosen_ids", "rejected_ids")
        + ("ref_chosen_logps", "ref_rejected_logps")
    }
    for row in range(0, len(batch), 2):
        begins = int(batch.loss_mask[row].argmax())
        columns["prompt_ids"].append(batch.input_ids[row, :begins].tolist())
        for side, at in (("chosen", row), ("rejected", row + 1)):
            ids = batch.input_ids[at, begins : int(batch.lengths[at])].tolist()
            columns[f"{side}_ids"].append(ids)
            columns[f"ref_{side}_logps"].append(float(batch.ref_sums[at]))
    return columns


def compare(options: argparse.Namespace) -> list[dict[str, dict[str, float]]]:
    """A warm-up step of each side, then the repeats, the sides in turn."""
    sides: list[Side] = []
    repeats = []
    try:
        for name in ("ours", "trl"):
            print(f"starting {name} ...", flush=True)
            sides.append(Side(name, sys.argv[1:], options.start, Path(__file__)))
        for n in range(options.repeats + 1):
            row = {side.name: side.step(is_last=n == options.repeats) for side in sides}
            said = ", ".join(f"{name} {each['step_s']:.1f} s" for name, each in row.items())
            print(f"{f'repeat {n}' if n else 'warm-up'}: {said}", flush=True)
            repeats += [row] if n else []
    finally:
        for side in sides:
            side.close()
    return repeats


def summarize(repeats: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians; how many times faster ours is, the median of the repeats' ratios; peak over peak.

    >>> ours = {"step_s": 2.0, "peak_bytes": 3}
    >>> summary = summarize([{"ours": ours, "trl": {"step_s": 5.0, "peak_bytes": 4}}])
    >>> summary["faster"], summary["memory"], summary["met"]
    (2.5, 0.75, True)
    """
    sides: dict[str, Any] = {
        side: {name: median((r[side][name] for r in repeats), 3) for name in repeats[0][side]}
        for side in ("ours", "trl")
    }
    faster = median((r["trl"]["step_s"] / r["ours"]["step_s"] for r in repeats), 2)
    memory = round(repeats[-1]["ours"]["peak_bytes"] / repeats[-1]["trl"]["peak_bytes"], 2)
    met = faster >= GOAL and memory < 1
    return sides | {"faster": faster, "goal": GOAL, "memory": memory, "met": met}


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, 5, "trl_dpo.json")
    parser.add_argument("--model", choices=("smollm2-135m", "tiny"), default="smollm2-135m")
    parser.add_argument("--pairs", type=int, default=16, help="of a step")
    parser.add_argument("--micro-pairs", type=int, default=4, help="TRL's, at a time")
    parser.add_argument("--side", choices=("ours", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--start", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.pairs % options.micro_pairs:
        parser.error(f"--pairs {options.pairs} is no multiple of --micro-pairs")
    return options


def main() -> int:
    options = parse()
    if options.side:
        (run_ours if options.side == "ours" else run_trl)(options)
        return 0
    version = trl_version("trl_dpo.py")
    from scale.default_models import resolve_model

    options.start = resolve_model(options.model)
    results = Results(options.out, "trl_dpo.json")
    results.about["versions"]["trl"] = version
    repeats = compare(options)
    summary = summarize(repeats)
    settings = {name: getattr(options, name) for name in ("model", "pairs", "micro_pairs")}
    results.write({"settings": settings, "summary": summary, "repeats": repeats})
    print(f"a step {summary['faster']} times as fast (goal {GOAL})")
    print(f"peak memory {summary['memory']} of TRL's (goal: below 1)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
