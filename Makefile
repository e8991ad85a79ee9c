# The two commands: make demo, make test. Each makes the environment it needs in .venv.
SHELL := /bin/sh
VENV := .venv
PY := $(VENV)/bin/python
# The first Python from 3.11 to 3.14 on this machine; override with make PYTHON=...
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' \
	>/dev/null 2>&1 && { command -v $$p; break; }; done)
# Most of the modules are never imported: those that are compile then.
PIP := $(PY) -m pip --disable-pip-version-check install --quiet --no-compile

# The pip that comes with Python 3.11 takes twice as long for what follows, but works, too.
NEWER_PIP := pip==26.3

.DEFAULT_GOAL := help
.PHONY: help demo test test-quick soak kills check bench peers env docs lowest newest clean

help:  ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(PY):
	@test -n "$(PYTHON)" || { echo "Stoker needs Python 3.11 to 3.14 with venv. On Debian or Ubuntu: apt install python3 python3-venv"; exit 1; }
	@echo "Creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) $(NEWER_PIP) 2>/dev/null || true

$(VENV)/.runtime: $(PY) requirements/runtime.txt pyproject.toml
	@echo "Installing Stoker and its pinned dependencies (about a minute)"
	@$(PIP) -r requirements/runtime.txt
	@$(PIP) --no-deps --no-build-isolation -e .
	@# What a command imports compiles now, also where the environment forbids Python to write: else each would take 8 s more.
	@PYTHONDONTWRITEBYTECODE= $(PY) -c 'import torch._dynamo, polars, pyarrow.dataset, numba, scipy.sparse, rich.progress, typer'
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime requirements/dev.txt
	@echo "Installing what tests and checks need"
	@$(PIP) -r requirements/dev.txt
	@# torch's CUDA builds bring their own Triton; its CPU build brings none, and the interpreter tests need one.
	@$(PY) -c 'import triton' 2>/dev/null || test "$$(uname -s)" != Linux || $(PIP) triton==3.9.0
	@touch $@

env: $(VENV)/.runtime  ## The environment alone, in .venv

demo: $(VENV)/.runtime  ## Prepare, train and evaluate a recommender on real purchases, in minutes
	@$(PY) examples/demo.py

# Tests marked slow take turns: each commit runs a sixteenth of them.
TURN ?= $(shell printf %d 0x$$(git rev-parse --short=7 HEAD 2>/dev/null || echo 0))/16

test: $(VENV)/.dev  ## Run the tests, and a sixteenth of those that take long (TURN=0/1: all of them)
	@STOKER_TURN=$(TURN) $(PYTEST) --dist worksteal

test-quick: $(VENV)/.dev  ## Run the fast tests of every package, in less than a minute
	@$(PYTEST) -m "not slow" @tests/quick.txt

# Processes share cores: a thread that waits must not spin on another's. Tests start hundreds of processes, which find
# the package compiled. One process more than two cores, since tests wait for those that they start.
PYTEST = OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -n 3

# Numbers of programs and of kills: FIRST:LAST, the last excluded. `make test` runs 125 programs and 2 kills in turn.
# STOKER_EFFORT is the share of a whole campaign (tests/campaigns.py).
SEEDS ?= 20000:40000
KILLS ?= 50
# Those that are no properties.
CAMPAIGNS := tests/features/test_learning_in_memory.py \
	$(patsubst %,tests/tables/test_%.py,compiled_programs cuda_link growing_ids growing epoch_lookahead log_home malformed ram_tier)

soak: $(VENV)/.dev  ## Run random programs placed and resident, SEEDS=20000:40000, malformed lookups, and properties (half an hour)
	@$(PY) tests/soak.py $(SEEDS)
	@$(PY) tests/live/torn_reads.py 10_000_000
	@STOKER_EFFORT=5 $(PYTEST) $(CAMPAIGNS)
	@STOKER_EFFORT=5 $(PYTEST) --dist worksteal --timeout=0 -m hypothesis
	@STOKER_EFFORT=8.5 $(PYTEST) tests/training/test_rank_runs.py -k random --timeout=0  # 2,040 runs on ranks, and 34 of 300 steps

kills: $(VENV)/.dev  ## Kill KILLS=50 (or 100:500) placed runs, 200 updates, and preparations at every step; each must end as if undisturbed (minutes)
	@$(PY) tests/soak.py --kills $(if $(findstring :,$(KILLS)),$(KILLS),0:$(KILLS))
	@STOKER_KILLS=0:200 $(PY) -m pytest tests/live/test_update_kills.py --timeout=0
	@STOKER_KILLS=all $(PY) -m pytest tests/data/test_deaths.py --timeout=0
	@STOKER_EFFORT=5 $(PY) -m pytest tests/data tests/training/test_scheduled_runs.py -k kill --timeout=0
	@STOKER_KILLS=0:200 $(PY) -m pytest tests/training/test_rank_kills.py --timeout=0

check: $(VENV)/.dev  ## Format, lint, types, and the site without a warning
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy
	@$(SITE)

bench: $(VENV)/.dev  ## Run every benchmark bar and add to benchmarks/results/; fails on regressions only (hours)
	@# Exit code 2: a peer or a data set is missing, and no bar regressed.
	@$(PY) -m benchmarks --all --out benchmarks/results || test $$? -eq 2
	@$(PY) -m benchmarks.index

peers: $(VENV)/.dev  ## Build the environments of the systems that benchmarks compare with, in .peers
	@$(PY) -m benchmarks.peers build

# The reference comes from docstrings, which Sphinx leaves out without a warning if it does not find them. Without -E it
# reads only pages that changed, so a second build has no warning of the others.
SITE = $(PY) -m sphinx -q -E -W --keep-going -b html docs build/site && grep -q EmbeddingTables build/site/reference/tables.html

docs: $(VENV)/.dev  ## Write docs/cli.md from the command line's own help, and build the site in build/site
	@$(PY) tests/command_reference.py > docs/cli.md
	@$(SITE)
	@echo "build/site/index.html"

# First torch, NumPy and safetensors alone; then all packages, commands, and the tests of rooms that touch libraries.
LOWEST := .venv-lowest
LOWEST_PY := PYTHONDONTWRITEBYTECODE= STOKER_TURN=$(TURN) OMP_WAIT_POLICY=passive PYTHONPATH=$(CURDIR)/src NUMBA_CACHE_DIR=$(CURDIR)/$(LOWEST)/kernels $(LOWEST)/bin/python
LOWEST_PIP := $(LOWEST)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile --only-binary :all:

lowest:  ## Train and test with the lowest versions that pyproject.toml allows
	@rm -rf $(LOWEST)
	@$(PYTHON) -m venv $(LOWEST)
	@$(LOWEST_PIP) $(NEWER_PIP) 2>/dev/null || true
	@$(PYTHON) tests/lowest.py > $(LOWEST)/lowest.txt
	@grep -E '^(torch|numpy|safetensors)==' $(LOWEST)/lowest.txt > $(LOWEST)/bare.txt
	@$(LOWEST_PIP) -r $(LOWEST)/bare.txt
	@$(LOWEST_PY) tests/bare_environment.py $(LOWEST)/bare
	@$(LOWEST_PIP) -r $(LOWEST)/lowest.txt
	@$(LOWEST_PY) -m stoker synthetic criteo --rows 3000 --out $(LOWEST)/log.tsv > /dev/null
	@$(LOWEST_PY) -m stoker prepare criteo $(LOWEST)/log.tsv --out $(LOWEST)/data > /dev/null
	@$(LOWEST_PY) -m stoker train $(LOWEST)/data --out $(LOWEST)/run --steps 20 > /dev/null
	@$(LOWEST_PY) -m stoker predict $(LOWEST)/run --data $(LOWEST)/log.tsv --out $(LOWEST)/scores.parquet
	@# An old package may use what a newer one, of which it allows any version, has deprecated.
	@$(LOWEST_PY) -m pytest -p no:cacheprovider -W ignore::DeprecationWarning @tests/lowest.txt
	@rm -rf $(LOWEST)

# Releases of tomorrow break what pinned tests do not see: this needs about 8 GB, as pip finds a PyTorch for GPUs.
NEWEST := .venv-newest

newest:  ## Run the tests with the newest release of every package, PyTorch too
	@rm -rf $(NEWEST)
	@$(PYTHON) -m venv $(NEWEST)
	@$(NEWEST)/bin/python -m pip install --quiet --upgrade pip
	@$(NEWEST)/bin/python -m pip install --quiet -e '.[dev,onnx]'
	@touch $(NEWEST)/.runtime $(NEWEST)/.dev
	@$(MAKE) test VENV=$(NEWEST)
	@rm -rf $(NEWEST)

clean:  ## Remove environments, caches and demo output
	@rm -rf $(VENV) .venv-lowest .venv-newest .peers runs/demo data/demo build
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
