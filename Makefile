.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help install fix check test test-all golden bench demo clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(STAMP)  ## make .venv with everything (CPU torch; README.md says how on CUDA)

# torch is the only pinned step: this spec is the CPU build, a range would fetch gigabytes of CUDA.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "torch==2.13.0"
	$(BIN)/python -m pip install --quiet -e ".[hf,demo,dev]"
	touch $(STAMP)

fix: install  ## format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: install  ## lint, types, import contracts; changes nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

test: install  ## the test suite, under ten minutes on 2 cores
	$(BIN)/python -m pytest -q -m "not slow and not gpu" -n 2 --dist loadfile

test-all: install  ## everything, many processes and minutes
	$(BIN)/python -m pytest -q -m "not gpu"
