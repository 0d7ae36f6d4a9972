# make demo and make test need nothing but Python 3.11 or newer: the first call makes .venv.
#
#   make test      tests that need no processes, then the distributed ones. Of files that take long, and of benchmarks,
#                  a share, another for each commit: all of them take more than an hour on two cores
#   make test-all  every test, and the smallest case of every benchmark
#   make parity    the whole parity matrix (make test runs a covering selection)
#   make lint      ruff (rules and format) and mypy
#   make smoke TORCH='torch==2.11.*'   the smallest tests under another torch, in build/venv-VERSION; SMALL=1 skips a
#                  torch that the index does not have, or has with CUDA only (gigabytes)
#   make checks    lint, package, and smoke under the oldest and the newest torch: with -j 2, two at a time
#   make package   sdist and wheel in build/dist: built, checked, and tried in a new environment
#   make docs      build the documentation site in build/site
#   make demo      train a model on four unequal emulated devices
#   make clean     remove .venv and everything that tools wrote
#
# PYTHON picks the interpreter; TORCH the requirement, e.g. for the CPU build where PyPI gives CUDA:
#   make test TORCH='torch>=2.11,<2.14 --index-url https://download.pytorch.org/whl/cpu'
# Another TORCH sets .venv up again; VENV keeps it apart: make test TORCH=torch==2.14.1 VENV=build/venv-2.14.1

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := test

PYTHON ?= python3
# The package has no upper bound. This one keeps pip from choosing a newer build that brings gigabytes of CUDA.
TORCH ?= torch>=2.11,<2.14
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check --no-input
# What is imported is compiled then, and kept. To compile all that is installed takes two minutes, half of the set-up.
INSTALL := $(PIP) install --no-compile
export PYTHONDONTWRITEBYTECODE :=
SETTINGS = OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(if $(CAPTURES),HETU_FX_TESTS_CAPTURES=$(CAPTURES))
# Of so many shares of the long files, and of the benchmarks, one is run.
SHARES ?= 10
BENCHMARK_SHARES ?= 10
PYTEST = $(SETTINGS) $(BIN)/python -m pytest -q
LINKED := comm_ops transforms switching integrations

.PHONY: setup test test-all parity lint smoke smoke-oldest smoke-newest package checks docs demo clean force

setup: $(VENV)/.installed

# A setup that stopped half-way leaves no stamp, so the next call continues it.
$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "hetu_fx needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1);" \
	    "name another with make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@echo "setting up $(VENV) (once, and again when pyproject.toml or TORCH changes)"
	@[ -x $(BIN)/python ] && $(BIN)/python -m pip --version >/dev/null 2>&1 || \
	  $(PYTHON) -m venv --clear $(VENV) || { \
	  echo "no venv: on Debian and Ubuntu, apt install python3-venv" >&2; exit 2; }
	@$(INSTALL) --upgrade pip "setuptools>=77" wheel
	@read -ra words <<<'$(TORCH)'; $(INSTALL) "$${words[@]}"
	@PYTHONWARNINGS=ignore $(INSTALL) --editable '.[hf,ui,dev,docs]'
	@for d in $(LINKED); do ln -sfn ../$$d hetu_fx/$$d; done   # for mypy, which does not see the mapping
	@echo '$(TORCH)' >$(VENV)/.torch   # a new environment has none yet
	@touch $@

# Which torch was asked for last.
$(VENV)/.torch: force
	@mkdir -p $(VENV); [ "$$(cat $@ 2>/dev/null)" = '$(TORCH)' ] || echo '$(TORCH)' >$@

# Files stay whole, so that what their tests share is made once. Ranks and launchers wait for each other: one file of
# distributed tests keeps one core and a quarter busy, so two run at a time where there are two cores.
# Status 5 of pytest (no test selected) is a failure too: a suite that vanished is not a pass. Only the
# tests that need a CUDA device may be none.
# Models are captured once for all that one call runs.
test: CAPTURES = $(CURDIR)/build/captures
test: setup
	@rm -rf $(CAPTURES) && mkdir -p $(CAPTURES)
	@$(PYTEST) -m "not distributed and not gpu" --timeout 300 -n auto --maxprocesses 4 --dist loadfile \
	  --shares $(SHARES)
	@$(PYTEST) -m "distributed and not gpu" --timeout 600 -n auto --maxprocesses 2 --dist loadfile \
	  --shares $(SHARES)
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	  $(PYTEST) -m gpu --timeout 600 || [ $$? = 5 ]; fi
	@$(SETTINGS) timeout 7200 $(BIN)/python -m benchmarks.smoke --share $(BENCHMARK_SHARES) --seconds 400

test-all:
	@$(MAKE) test SHARES=1 BENCHMARK_SHARES=1

parity: setup
	@HETU_FX_PARITY=full $(PYTEST) tests/end_to_end -m "distributed and not gpu" --timeout 3600
	@HETU_FX_PARITY=full $(PYTEST) tests/kinds/test_parity_kinds.py -k all_ranks_of_one_process --timeout 3600

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy

smoke:
	@$(PYTHON) -m tests.packaging.smoke $(if $(SMALL),--small) '$(TORCH)'

smoke-oldest:
	@$(MAKE) smoke SMALL=1 TORCH='torch==2.11.*'

smoke-newest:
	@$(MAKE) smoke SMALL=1 TORCH='torch>=2.14'

package:
	@$(PYTHON) -m tests.packaging.package '$(TORCH)'

checks: package lint smoke-oldest smoke-newest

docs: setup
	@$(BIN)/zensical build --strict --clean

demo: setup
	@$(BIN)/python -m examples.demo

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f $(addprefix hetu_fx/,$(LINKED))
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
