# kimi-serve. `make help` explains the targets.
SHELL := /bin/bash
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
QUIET_PIP := --quiet --disable-pip-version-check --no-input

.DEFAULT_GOAL := help
.PHONY: help install demo serve test test-fast lint train-tiny bench clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 20

$(STAMP): requirements/cpu.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "kimi-serve needs Python 3.11: '$(PYTHON)' was not found. Install it or run: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "kimi-serve needs Python 3.11; $(PYTHON) is $$($(PYTHON) -V 2>&1). Run: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@free=$$(df -Pm . | awk 'NR==2 {print $$4}'); [ "$$free" -ge 9000 ] || [ -x $(BIN)/python ] || { echo "The installation needs 9 GB of disk here; only $$free MB are free." >&2; exit 1; }
	@echo "Installing into $(VENV) (about 7 GB, a few minutes) ..."
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install $(QUIET_PIP) --no-deps -r requirements/cpu.lock 2>&1 | grep -v '^WARNING' || test $${PIPESTATUS[0]} -eq 0
	@$(BIN)/python -m pip install $(QUIET_PIP) --no-deps --no-build-isolation -e . 2>&1 | grep -v '^WARNING' || test $${PIPESTATUS[0]} -eq 0
	@touch $(STAMP)

install: $(STAMP)  ## create .venv with everything pinned (requirements/cpu.lock)

demo: $(STAMP)  ## start Ray and two engines here, send a mixed burst, show and check the answers, write out/demo/
	@$(BIN)/kimi-serve demo --out out/demo

serve: $(STAMP)  ## serve cluster/local-cpu.yaml on http://127.0.0.1:8000 until Ctrl-C
	@$(BIN)/kimi-serve serve cluster/local-cpu.yaml

test: $(STAMP)  ## all tests: pure cores, real SGLang on the CPU, real Ray Serve
	@$(BIN)/python -m pytest tests

test-fast: $(STAMP)  ## only the tests that take milliseconds
	@$(BIN)/python -m pytest tests/unit

lint: $(STAMP)  ## ruff and mypy
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

train-tiny: $(STAMP)  ## train the tiny Kimi-K2.5 and its drafts again (under 60 minutes on two cores)
	@$(BIN)/python -m kimi_draft.tiny.train --out kimi_draft/tiny/weights

bench: $(STAMP)  ## run every benchmark, results and pictures under out/bench/
	@set -e; for b in $$(ls benchmarks/*.py | grep -v common); do name=$$(basename $$b .py); $(BIN)/python $$b --out out/bench/$$name; done

clean:  ## remove out/ and caches (not .venv)
	@rm -rf out .pytest_cache .mypy_cache .ruff_cache .hypothesis
