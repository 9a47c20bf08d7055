#!/usr/bin/env bash
#SBATCH --job-name=multiturn-rl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@600
#SBATCH --output=slurm-%j.out
#
# Train on N nodes x 8 GPUs under SLURM, with the weights sharded over all GPUs. Options are passed
# on to train.py:
#
#   sbatch --nodes 4 recipes/slurm.sh --gradient-checkpointing
#   RUN_DIR=runs/long sbatch recipes/slurm.sh                  to resume, repeat the command
#   ENV_ADDR="http://host1:36005 http://host2:36005" sbatch recipes/slurm.sh
#
#   Variable         Meaning                                         Default
#   ENVIRONMENT      environment to train in                         textcraft
#   RUN_DIR          run folder, on a disk that all nodes share      runs/slurm-<job id>
#   ENV_ADDR         environment servers                             one is started on every node
#   GPUS_PER_NODE    processes on a node                             8
#   CONFIG           configuration file of accelerate                recipes/fsdp2.yaml
#   PORT             port through which the processes connect        29500
#   DRY_RUN=1        only print the commands of each node
#
# The checkout and .venv must also be on a shared disk. Run `make setup` once, on a node with a GPU.
# --tasks-per-step must be a multiple of the number of processes.
#
# SLURM sends SIGTERM ten minutes before the time limit. train.py then finishes the step, saves and
# exits, and a later job with the same RUN_DIR resumes the run on any number of nodes. The launcher
# kills its processes 30 seconds after the signal by default; TORCH_ELASTIC_SHUTDOWN_TIMEOUT below
# extends this to 9 minutes. If a step takes longer, the run falls back to the last checkpoint
# (--save-every).
#
# This script has never run on a cluster. A test runs it on one machine as two nodes with one CPU
# process each, with a substitute for srun (tests/long/test_recipes.py).
set -euo pipefail

DRY_RUN=${DRY_RUN:-}
run() { # print a command, then run it
    printf '$ %s\n' "${*@Q}"
    [ "$DRY_RUN" ] || "$@"
}

if [ "${1:-}" != --node ]; then
    # ------------------------------------------------------------------ only on the first node
    cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}" # sbatch runs a copy of this file in another folder
    if [ -z "${SLURM_JOB_ID:-}" ] || [ ! -e recipes/slurm.sh ]; then
        echo "slurm.sh: run it in the checkout with: sbatch recipes/slurm.sh" >&2
        exit 2
    fi
    export ENVIRONMENT=${ENVIRONMENT:-textcraft} RUN_DIR=${RUN_DIR:-runs/slurm-$SLURM_JOB_ID}
    export GPUS_PER_NODE=${GPUS_PER_NODE:-8} CONFIG=${CONFIG:-recipes/fsdp2.yaml}
    export PORT=${PORT:-29500} ENV_ADDR=${ENV_ADDR:-} DRY_RUN RESUME=
    [ ! -e "$RUN_DIR/config.json" ] || RESUME=1 # decided here, so that all nodes agree
    read -r HEAD < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    export HEAD
    trap 'echo "slurm.sh: received SIGTERM; waiting for the run to save"' TERM
    srun --ntasks-per-node=1 --kill-on-bad-exit=1 bash recipes/slurm.sh --node "$@"
    exit
fi

# ------------------------------------------------------------------------------- on every node
shift
trap 'echo "node $SLURM_NODEID: received SIGTERM"' TERM # wait for the launcher, which gets it too

if [ -z "$ENV_ADDR" ]; then
    ENV_PORT=$((36005 + SLURM_NODEID)) # differs per node, in case two nodes share a machine
    ENV_ADDR=http://127.0.0.1:$ENV_PORT
    SERVE=(.venv/bin/python -m envs.server --env "$ENVIRONMENT" --port "$ENV_PORT")
    printf '$ %s &\n' "${SERVE[*]@Q}"
    if [ ! "$DRY_RUN" ]; then
        "${SERVE[@]}" &
        SERVER=$!
        trap 'kill "$SERVER" 2> /dev/null || true' EXIT
        for _ in $(seq 120); do
            curl -sf --max-time 2 "$ENV_ADDR/health" > /dev/null && break
            kill -0 "$SERVER" # exit if the server has ended; it has printed the reason
            sleep 1
        done
    fi
fi

export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-540}
LAUNCH=(
    .venv/bin/accelerate launch --config_file "$CONFIG"
    --num_machines "$SLURM_NNODES" --machine_rank "$SLURM_NODEID"
    --num_processes $((SLURM_NNODES * GPUS_PER_NODE))
    --main_process_ip "$HEAD" --main_process_port "$PORT"
)
read -ra ADDRESSES <<< "$ENV_ADDR"
if [ "$RESUME" ]; then # options come from the run's config.json
    TRAIN=(--resume --run-dir "$RUN_DIR" --env-addr "${ADDRESSES[@]}")
else
    TRAIN=(--run-dir "$RUN_DIR" --env "$ENVIRONMENT" --env-addr "${ADDRESSES[@]}" "$@")
fi
run "${LAUNCH[@]}" train.py "${TRAIN[@]}"
