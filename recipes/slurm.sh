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
# N nodes x 8 GPUs under SLURM, the weights cut over all of them. Options go to train.py:
#
#   sbatch --nodes 4 recipes/slurm.sh --gradient-checkpointing
#   RUN_DIR=runs/long sbatch recipes/slurm.sh                  the same again goes on with the run
#   ENV_ADDR="http://host1:36005 http://host2:36005" sbatch recipes/slurm.sh
#
#   ENVIRONMENT      what to act in                                  textcraft
#   RUN_DIR          on a disk that all nodes see                    runs/slurm-<job id>
#   ENV_ADDR         environment servers; none: one is started on every node, for its own processes
#   GPUS_PER_NODE    processes on a node                             8
#   CONFIG           of accelerate                                   recipes/fsdp2.yaml
#   PORT             where the processes find each other             29500
#   DRY_RUN=1        print the commands of each node, run none
#
# The checkout and .venv must be on a disk that all nodes see, too: run `make setup` once, on a node
# with a GPU. --tasks-per-step must be a multiple of the number of processes.
#
# Before the time is up SLURM sends SIGTERM: train.py then ends the step, saves and leaves, and a
# later job with the same RUN_DIR goes on, on as many nodes as it has. The launcher kills its
# processes some time after that signal: 30 seconds, unless TORCH_ELASTIC_SHUTDOWN_TIMEOUT says
# otherwise. Here it waits 9 of the 10 minutes; a step that takes longer is lost, back to the last
# checkpoint (--save-every).
#
# Not run on a cluster yet. What was run is this script with two nodes of one CPU process each and a
# stand-in for srun, on one machine (tests/test_recipes_large.py).
set -euo pipefail

DRY_RUN=${DRY_RUN:-}
run() { # show a command, and run it
    printf '$ %s\n' "${*@Q}"
    [ "$DRY_RUN" ] || "$@"
}

if [ "${1:-}" != --node ]; then
    # ------------------------------------------------------------------- once, on the first node
    cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}" # sbatch runs a copy of this file from elsewhere
    if [ -z "${SLURM_JOB_ID:-}" ] || [ ! -e recipes/slurm.sh ]; then
        echo "slurm.sh: submit it from the checkout: sbatch recipes/slurm.sh" >&2
        exit 2
    fi
    export ENVIRONMENT=${ENVIRONMENT:-textcraft} RUN_DIR=${RUN_DIR:-runs/slurm-$SLURM_JOB_ID}
    export GPUS_PER_NODE=${GPUS_PER_NODE:-8} CONFIG=${CONFIG:-recipes/fsdp2.yaml}
    export PORT=${PORT:-29500} ENV_ADDR=${ENV_ADDR:-} DRY_RUN RESUME=
    [ ! -e "$RUN_DIR/config.json" ] || RESUME=1 # decided once, not by each node for itself
    read -r HEAD < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    export HEAD
    trap 'echo "slurm.sh: told to stop; waiting for the run to save"' TERM
    srun --ntasks-per-node=1 --kill-on-bad-exit=1 bash recipes/slurm.sh --node "$@"
    exit
fi

# ------------------------------------------------------------------------------- on every node
shift
trap 'echo "node $SLURM_NODEID: told to stop"' TERM # and wait for the launcher, which is told too

if [ -z "$ENV_ADDR" ]; then
    ENV_PORT=$((36005 + SLURM_NODEID)) # one each, should two nodes be one machine
    ENV_ADDR=http://127.0.0.1:$ENV_PORT
    SERVE=(.venv/bin/python -m envs.server --env "$ENVIRONMENT" --port "$ENV_PORT")
    printf '$ %s &\n' "${SERVE[*]@Q}"
    if [ ! "$DRY_RUN" ]; then
        "${SERVE[@]}" &
        SERVER=$!
        trap 'kill "$SERVER" 2> /dev/null || true' EXIT
        for _ in $(seq 120); do
            curl -sf --max-time 2 "$ENV_ADDR/health" > /dev/null && break
            kill -0 "$SERVER" # or leave: it has ended, and said why
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
