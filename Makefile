# Needs make and Python 3.11 or later. `make help` lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell grep '^torch==' constraints.txt)
PIP := $(BIN)/python -m pip --disable-pip-version-check

export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# Idle OpenMP threads spin, by default for so long that a busy machine slows down tenfold.
export GOMP_SPINCOUNT := 20000

.DEFAULT_GOAL := help
.PHONY: help venv test lint types unit format test-real test-processes demo demo-small bench package clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-15s %s\n", $$1, $$2 }'

venv: $(STAMP) ## create .venv, or bring it up to date

# torch comes first and alone: a looser requirement of another package could pick a different build of it.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "selfspec needs Python 3.11 or later, this is " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q $(TORCH)
	$(PIP) install -q -e ".[demo,dev]" -c constraints.txt --config-settings editable_mode=compat
	touch $@

test: lint types unit ## everything that needs no model and no GPU

lint: $(STAMP) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## mypy
	$(BIN)/mypy -p selfspec

unit: $(STAMP) ## pytest on tiny random models; ARGS="-k cache" narrows it
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto $(ARGS)

format: $(STAMP) ## let ruff rewrite the files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test-real: $(STAMP) ## tests on the real small model
	$(BIN)/pytest -m "real and not gpu and not nightly" $(ARGS)

test-processes: $(STAMP) ## two processes train like one
	$(BIN)/pytest -m nightly tests/test_train_processes.py -k two_processes $(ARGS)

demo: $(STAMP) ## train heads on the real small model and compare; ARGS="--help" lists its options
	$(BIN)/selfspec demo $(ARGS)

demo-small: $(STAMP) ## the same in a few minutes
	$(BIN)/selfspec demo --small $(ARGS)

bench: $(STAMP) ## plain and speculative decoding side by side; ARGS="--help" lists its options
	$(BIN)/selfspec bench $(ARGS)

package: $(STAMP) ## build sdist and wheel, install the wheel alone, use it from another folder
	$(BIN)/python .ci/package_check.py

clean: ## remove what builds, tests and the demo left, but not .venv
	rm -rf build dist *.egg-info demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $$(git ls-files '*.py' | cut -s -d/ -f1 | sort -u) -name __pycache__ -type d -prune -exec rm -rf {} +
