# Everything is installed into .venv by the first target that needs it. Python 3.11 and make are all that has to be there.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help train test check env clean

help:
	@echo "make train   train DLRM on two hosts of this machine"
	@echo "make test    checks and tests"
	@echo "make check   ruff and pyright only"
	@echo "make clean   remove the environment, generated data and runs"

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "Found no $(PYTHON). Expected Python 3.11 or newer. Install it, or run: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

train: $(STAMP)
	$(BIN)/podembed train --job synthetic --hosts 2 --threads-per-host 1

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

test: check
	$(BIN)/python -m pytest $(TESTS)

clean:
	rm -rf $(VENV) .data .runs .pytest_cache .ruff_cache .hypothesis *.egg-info
