# The commands of this project. `make` alone lists them. Every one of them first makes .venv hold the pinned packages
# (tools/setup_env.py); when it already does, that takes a tenth of a second and no network.
#
#   ENV      the environment to train in or to serve                     make train ENV=textcraft
#   ARGS     anything more for the command that runs                     make train ARGS="--steps 4 --seed 1"
#   PYTHON   the Python 3.11 to 3.13 that .venv is made with             make setup PYTHON=/usr/bin/python3.11
#   SET      cpu or cuda; auto takes cuda where nvidia-smi lists a GPU   make setup SET=cpu

# NOTE: `=`, not `?=`: a shell may export ENV (POSIX: the file it starts with), which must not become the environment's name.
ENV = textcraft
ARGS =
SET = auto
PYTHON =

RUN := .venv/bin/python
# tcmalloc, where it is installed (libtcmalloc-minimal4): updates on a CPU are faster and take less memory.
TCMALLOC := $(firstword $(wildcard /usr/lib/*-linux-gnu/libtcmalloc_minimal.so.4 /usr/lib64/libtcmalloc_minimal.so.4))
TRAIN := $(if $(TCMALLOC),LD_PRELOAD=$(TCMALLOC) )$(RUN) train.py
# A file of tests stays in one process; one thread each, or the processes wait for one another.
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n auto --maxprocesses 8 --dist loadfile
PYTHONS := $(or $(PYTHON),$(RUN) python3.11 python3.12 python3.13 python3)
FIND_PYTHON := for p in $(PYTHONS); do \
	"$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo "$$p" && break; done

.DEFAULT_GOAL := help
.PHONY: help setup train demo test test-long test-slow lint format serve bench

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile
	@sed -n 's/^#   \([A-Z][A-Z]*  .*\)/  \1/p' Makefile

setup:  ## create .venv with the pinned packages (and what ENV needs beyond them)
	@python="$$($(FIND_PYTHON))"; if [ -z "$$python" ]; then \
		echo "error: need Python 3.11 to 3.13, looked for: $(PYTHONS); on Debian and Ubuntu: apt-get install python3.11 python3.11-venv" >&2; exit 1; fi; \
	"$$python" tools/setup_env.py --set $(SET) --env "$(ENV)"

train: setup  ## train on ENV with defaults that fit this machine
	$(TRAIN) --env $(ENV) $(ARGS)

demo: setup  ## see it learn, in some three minutes: a tiny model that comes with the project
	$(TRAIN) --config recipes/demo.json $(ARGS)

test: lint  ## lint, types and the tests of every part, in eight minutes
	$(PYTEST) -m "not slow and not long" $(ARGS)

test-long: setup  ## what CI runs beside them: real samplers, learning curves, runs that are killed
	$(RUN) -m pytest -q -m "long and not slow" $(ARGS)

test-slow: setup  ## the tests that take long: real training runs, real servers under load
	$(RUN) -m pytest -q -m slow $(ARGS)

lint: setup  ## ruff, mypy, and the arrows between modules
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m tach check

format: setup  ## let ruff rewrite the files to the project's format
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

serve: setup  ## serve ENV over HTTP
	$(RUN) -m envs.server --env $(ENV) $(ARGS)

bench: setup  ## run every benchmark in benchmarks/
	@failed=""; for file in $$(grep -l __main__ benchmarks/*.py); do echo "== $$file"; \
		PYTHONPATH=. $(RUN) "$$file" $(ARGS) || failed="$$failed $$file"; done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi
