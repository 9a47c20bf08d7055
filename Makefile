# The commands of this project; `make` lists them. Each first makes sure that .venv holds the pinned packages
# (tools/setup_env.py), which takes a tenth of a second and no network when it does.
#
#   ENV      the environment to train on or to serve                     make train ENV=textcraft
#   ARGS     more options for the command                                make train ARGS="--steps 4 --seed 1"
#   PYTHON   the Python (3.11 to 3.13) to create .venv with              make setup PYTHON=/usr/bin/python3.11
#   SET      cpu, cuda or portable (without vLLM); auto chooses          make setup SET=cpu

# NOTE: `=`, not `?=`: POSIX shells may export ENV with another meaning.
ENV = textcraft
ARGS =
SET = auto
PYTHON =

RUN := .venv/bin/python
# tcmalloc (libtcmalloc-minimal4), if installed, makes updates on a CPU faster and smaller in memory.
TCMALLOC := $(firstword $(wildcard /usr/lib/*-linux-gnu/libtcmalloc_minimal.so.4 /usr/lib64/libtcmalloc_minimal.so.4))
TRAIN := $(if $(TCMALLOC),LD_PRELOAD=$(TCMALLOC) )$(RUN) train.py
# Each test file stays in one process. One thread per process: more would compete for the cores.
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n auto --maxprocesses 8 --dist loadfile
PYTHONS := $(or $(PYTHON),$(RUN) python3.11 python3.12 python3.13 python3)
FIND_PYTHON := for p in $(PYTHONS); do \
	"$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo "$$p" && break; done

.DEFAULT_GOAL := help
.PHONY: help setup train demo test test-long test-slow lint format serve bench

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile
	@sed -n 's/^#   \([A-Z][A-Z]*  .*\)/  \1/p' Makefile

setup:  ## create .venv with the pinned packages, and those of ENV
	@python="$$($(FIND_PYTHON))"; if [ -z "$$python" ]; then \
		echo "error: need Python 3.11 to 3.13, looked for: $(PYTHONS); on Debian and Ubuntu: apt-get install python3.11 python3.11-venv" >&2; exit 1; fi; \
	"$$python" tools/setup_env.py --set $(SET) --env "$(ENV)"

train: setup  ## train on ENV; an hour on two cores
	$(TRAIN) --env $(ENV) $(ARGS)

demo: setup  ## watch a small model learn, in three minutes on two cores
	$(TRAIN) --config recipes/demo.json $(ARGS)

test: lint  ## lint, types and all fast tests, in five to eight minutes
	$(PYTEST) -m "not slow and not long" $(ARGS)

test-long: setup  ## real samplers, learning curves, killed runs, in a quarter of an hour; CI runs this after `make test`
	$(RUN) -m pytest -q -m "long and not slow" $(ARGS)

test-slow: setup  ## what takes longer still: real training runs, servers under load
	$(RUN) -m pytest -q -m slow $(ARGS)

lint: setup  ## ruff, mypy, and which module may import which
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m tach check

format: setup  ## format the code with ruff
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

serve: setup  ## serve ENV over HTTP
	$(RUN) -m envs.server --env $(ENV) $(ARGS)

bench: setup  ## measure what the rollout loop costs, in a few minutes
	$(RUN) benchmarks/rollout.py $(ARGS)
