#!/usr/bin/env bash
# Train Qwen2.5-3B-Instruct on TextCraft with the published settings, and test it before and after:
#
#   set-up -> machine check -> test before -> train -> test after -> table
#
#   bash recipes/textcraft_3b.sh              8 GPUs (or 4, 2), or a single large one
#   SMOKE=1 bash recipes/textcraft_3b.sh      the same steps without a GPU, in minutes: the model
#                                             `tiny` in two CPU processes, few steps, few tasks
#   DRY_RUN=1 bash recipes/textcraft_3b.sh    only print the commands
#
#   Variable  Meaning                         Default
#   RUN_DIR   folder for all files            runs/textcraft_3b
#   RESULT    result file without extension   recipes/results/textcraft_3b
#   MODEL     hub id or checkpoint folder     Qwen/Qwen2.5-3B-Instruct
#
# You can interrupt it at any time and repeat the same command to continue where it stopped. If
# train.py stops because the policy has collapsed, this script stops too, and train.py prints what
# to do.
#
# The checkpoint to test is the best on 70 of TextCraft's 544 goals that are in neither published list,
# so the test split is used only twice: before and after training.
#
# Nobody has run this with the weights of the 3B model. Steps with random weights have run on one GPU
# of 141 GB (benchmarks/gpu.py), and SMOKE=1 has run to the end. recipes/memory.py estimates memory.
set -euo pipefail
cd "$(dirname "$0")/.."

SMOKE=${SMOKE:-} DRY_RUN=${DRY_RUN:-}
PYTHON=.venv/bin/python
MODEL=${MODEL:-Qwen/Qwen2.5-3B-Instruct}
RUN_DIR=${RUN_DIR:-runs/textcraft_3b${SMOKE:+-smoke}}
RESULT=${RESULT:-$([ "$SMOKE" ] && echo "$RUN_DIR/textcraft_3b" || echo recipes/results/textcraft_3b)}
# The launcher kills its processes 30 s after Ctrl-C. A large model needs longer to end its step and
# to save.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}

step() { printf '\n== %s\n' "$*"; }
run() { # print a command, then run it
    printf '$ %s\n' "${*@Q}"
    [ "$DRY_RUN" ] || "$@"
}
stop() { printf 'textcraft_3b.sh: %s\n' "$*" >&2; exit 1; }

# The published settings. A test compares the numbers with config.PAPER.
STEPS=300
TRAIN=(
    --env textcraft --split train --model "$MODEL" --warm-start never
    --algorithm grpo --rounds-scheduler scaling_inter_stepwise --rounds 10 20 30
    --steps-scaling-inter 100 --steps "$STEPS"
    --tasks-per-step 32 --group-size 8 --mini-batch-size 64
    --max-tokens-per-turn 512 --max-trajectory-tokens 10752 --temperature 1.0
    --learning-rate 1e-6 --learning-rate-decay-steps 0 --clip-ratio 0.2
    --kl-loss-coef 1e-3 --kl-clamp 10 --dual-clip 0 --entropy-coef 1e-3 --loss-agg seq-mean
    --eval-every 25 --save-every 25 --eval-tasks "$RUN_DIR/held_out.json"
)
TEST=(
    --env textcraft --split test --samples 1 --max-rounds 30
    --max-tokens-per-turn 512 --max-trajectory-tokens 10752 --temperature 1.0
)
NUM_HELD_OUT=70
SETTINGS= # for the result file; empty: derived from the run's config.json
if [ "$SMOKE" ]; then # the same commands with smaller numbers; a later option overrides an earlier one
    MODEL=tiny STEPS=2 NUM_HELD_OUT=2 SETTINGS="smoke test; the numbers mean nothing"
    export CUDA_VISIBLE_DEVICES=""
    TRAIN+=(
        --model tiny --steps 2 --rounds 2 3 4 --steps-scaling-inter 1 --tasks-per-step 2
        --group-size 2 --mini-batch-size 2 --max-tokens-per-turn 16 --max-trajectory-tokens 3072
        --eval-every 2 --save-every 1 --eval-samples 1
        --no-skip-zero-variance # random weights solve nothing, but the update must run
    )
    TEST+=(--subtasks "depth 4" --max-rounds 3 --max-tokens-per-turn 16 --max-trajectory-tokens 3072)
fi

# --------------------------------------------------------------------------------------- set-up
step "set-up"
run make --no-print-directory setup

# -------------------------------------------------------------------------------- machine check
# Minimum memory of each card in MiB, for 8, 4, 2 or 1 cards, or 1 with LoRA. A process needs the
# larger of two amounts: the sampler (half of the card) with the weights and moments, or the update
# while the sampler sleeps. The values follow the 3B rows with 10752 tokens of recipes/memory.py, and
# a test compares them. Only CARD_1 and CARD_LORA have been tried, on 141 GB.
CARD_8=24000 CARD_4=40000 CARD_2=65000 CARD_1=130000 CARD_LORA=40000
step "machine"
LAUNCH=("$PYTHON")
if [ "$SMOKE" ]; then
    echo "smoke test: two processes on the CPU"
    LAUNCH=(.venv/bin/accelerate launch --config_file recipes/fsdp2_cpu.yaml
        --num_cpu_threads_per_process 1)
    if nvidia-smi -L 2> /dev/null | grep GPU > /dev/null; then # vLLM's GPU build does not run on a CPU
        TRAIN+=(--engine transformers) TEST+=(--engine transformers)
    fi
else
    CARDS=$(nvidia-smi ${CUDA_VISIBLE_DEVICES:+-i "$CUDA_VISIBLE_DEVICES"} --query-gpu=memory.total --format=csv,noheader,nounits 2> /dev/null) || CARDS=
    [ "$CARDS" ] ||
        stop "nvidia-smi reports no GPU; this recipe needs one GPU of 40 GB or several smaller ones. Without" \
            "a GPU, SMOKE=1 runs all steps with a small model, and make train trains on two CPU cores"
    COUNT=$(wc -l <<< "$CARDS") CARD=$(sort -rn <<< "$CARDS" | tail -n 1)
    echo "$COUNT GPUs, the smallest has $CARD MiB"
    USED=0
    for n in 8 4 2 1; do
        needed=CARD_$n
        if [ "$USED" = 0 ] && [ "$COUNT" -ge $n ] && [ "$CARD" -ge "${!needed}" ]; then USED=$n; fi
    done
    TRAIN+=(--gradient-checkpointing)
    if [ "$USED" -gt 1 ]; then
        echo "training on $USED of them, with the weights sharded over them"
        LAUNCH=(.venv/bin/accelerate launch --config_file recipes/fsdp2.yaml --num_processes "$USED")
        TRAIN+=(--max-tokens-per-micro-batch 16384)
    elif [ "$USED" = 1 ]; then
        echo "training on one of them"
        TRAIN+=(--max-tokens-per-micro-batch 10752)
    elif [ "$CARD" -ge $CARD_LORA ]; then
        echo "training on one of them with LoRA, rank 64 and learning rate 1e-5: training all weights" \
            "next to the sampler needs $CARD_1 MiB"
        TRAIN+=(--max-tokens-per-micro-batch 10752 --lora-rank 64 --learning-rate 1e-5)
    else
        stop "$COUNT x $CARD MiB is too little memory for a 3B model and 10752 tokens; expected 8 GPUs of" \
            "$CARD_8 MiB, 4 of $CARD_4, 2 of $CARD_2, 1 of $CARD_1, or 1 of $CARD_LORA with LoRA." \
            "For the needs of smaller models and contexts run: python recipes/memory.py"
    fi
    # Four checkpoints of 14 bytes a parameter (LoRA: 2): the last two, the best, and the next one.
    DISK=$([ "$USED" = 0 ] && echo 35 || echo 180)
    if [ ! "$DRY_RUN" ] && [ ! -e "$RUN_DIR/config.json" ]; then
        mkdir -p "$RUN_DIR"
        FREE=$(df -PB 1000000000 "$RUN_DIR" | awk 'NR == 2 { print $4 }')
        [ "$FREE" -ge "$DISK" ] ||
            stop "$RUN_DIR has $FREE GB free, but its checkpoints need $DISK GB; set RUN_DIR to use another disk"
    fi
fi

# --------------------------------------------------------------------------------- held-out goals
step "held-out goals, which are in neither published list"
HELD_OUT='
import json, sys
from envs import load_tasks
published = {t.task_id for split in ("train", "test") for t in load_tasks("textcraft", split)}
unpublished = [t.task_id for t in load_tasks("textcraft") if t.task_id not in published]
held_out = unpublished[: int(sys.argv[2])]
with open(sys.argv[1], "w") as file:
    json.dump([{"item_id": task_id} for task_id in held_out], file)
print(len(held_out), "goals in", sys.argv[1])
'
[ "$DRY_RUN" ] || mkdir -p "$RUN_DIR"
[ "$DRY_RUN" ] || $PYTHON -c "$HELD_OUT" "$RUN_DIR/held_out.json" $NUM_HELD_OUT

# ------------------------------------------------------------------------------------------- test
evaluate() { # MODEL FOLDER: test on the published split, unless FOLDER has a complete result
    if grep -qs '"complete": true' "$2/eval.json"; then
        echo "done before: $2"
        return
    fi
    [ "$DRY_RUN" ] || rm -rf "$2"
    run $PYTHON evaluate.py "${TEST[@]}" --model "$1" --out "$2"
}
step "test before"
evaluate "$MODEL" "$RUN_DIR/test_before"

# ------------------------------------------------------------------------------------------ train
step "train"
LAST=$(printf '%s/checkpoints/step_%06d' "$RUN_DIR" "$STEPS")
if [ -e "$LAST/trainer_state/state.json" ]; then
    echo "done before: $LAST"
elif [ -e "$RUN_DIR/config.json" ]; then # the options come from config.json
    run "${LAUNCH[@]}" train.py --resume --run-dir "$RUN_DIR"
else
    run "${LAUNCH[@]}" train.py "${TRAIN[@]}" --run-dir "$RUN_DIR"
fi

# ------------------------------------------------------------------------------------- test, table
step "test after"
BEST=$RUN_DIR/checkpoints/best
CHOICE="the best one on the held-out goals"
if [ ! "$DRY_RUN" ] && [ ! -e "$BEST" ]; then
    CHOICE="the last one, because none beats the model before training on the held-out goals"
    echo "testing $CHOICE"
    BEST=$LAST
fi
evaluate "$BEST" "$RUN_DIR/test_after"

step "table"
TABLE='
import datetime, json, sys
from pathlib import Path
from recipes.common import write_json
from reporting.compare import compare, format_table
run_dir, result, checkpoint, choice, settings = Path(sys.argv[1]), *sys.argv[2:]
record = json.loads((run_dir / "config.json").read_text())
paths = [run_dir / name / "eval.json" for name in ("test_before", "test_after")]
before, after = (json.loads(path.read_text()) for path in paths)
config = record["config"]
if not settings:
    settings = "the published ones"
    if config["lora_rank"]:
        settings += ", but LoRA of rank {lora_rank} with learning rate {learning_rate:g}".format(**config)
about = {"settings": settings, "checkpoint": Path(checkpoint).resolve().name, "model": config["model"]}
about |= {"date": datetime.date.today().isoformat(), **record}
write_json(Path(result + ".json"), about | {"before": before, "after": after})
cards = record["hardware"]["gpus"]
text = f"""# TextCraft, {about["model"]}

Settings: {settings}. Checkpoint: {about["checkpoint"]}, {choice}.
Commit {record["git_commit"]}, {about["date"]}, on {f"{len(cards)} x {cards[0]}" if cards else "CPU"}.

The published test split before training:

```
{format_table(before)}
```

and after it:

```
{format_table(after)}
```

{compare(*paths)}
"""
Path(result + ".md").write_text(text)
print(text)
'
if [ "$DRY_RUN" ]; then
    echo "dry run: nothing was run; the table would be written to $RESULT.md"
else
    $PYTHON -c "$TABLE" "$RUN_DIR" "$RESULT" "$BEST" "$CHOICE" "$SETTINGS"
    echo "done: $RESULT.md"
fi
