# Everything starts here. `make quickstart` and `make test` do all the set-up on a machine with Python 3.11+ and a C++
# compiler; the others assume one of them ran. VENV and PYTHON may be overridden.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
NAME ?=

.PHONY: quickstart test venv peers lint types bench clean help

help:
	@echo "make quickstart   venv, install, train DLRM on MovieLens-100K with 2 workers"
	@echo "make test         venv, install, lint, types, all tests"
	@echo "make bench NAME=x run one benchmark (all without NAME); needs 'make peers' first"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# The stamp makes a second call cheap; pyproject or C++ changes reinstall.
NATIVE := $(shell find kernels/csrc -type f 2>/dev/null) CMakeLists.txt pyproject.toml

$(VENV)/.installed: $(BIN)/python $(NATIVE)
	$(BIN)/python -m pip install --quiet -e '.[cpu]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -e '.[cpu,dev,gpu-dev]'
	@touch $@

venv: $(VENV)/.installed-dev

quickstart: $(VENV)/.installed
	$(BIN)/shoal quickstart

test: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/python -m pytest tests

# TorchRec's wheel names the CUDA build of fbgemm as a dependency, hence --no-deps (torchrec 1.8 pairs with torch 2.13).
peers: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --no-deps torchrec==1.8.0
	$(BIN)/python -m pip install --quiet -e '.[peers]'

lint: venv
	$(BIN)/ruff check .

types: venv
	$(BIN)/mypy shoal kernels actors platform jobs

bench:
	$(BIN)/python tests/bench/run.py $(NAME)

clean:
	rm -rf build .venv
