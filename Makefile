# Everything starts here. `make quickstart` and `make test` do all the set-up on a machine with Python 3.11+ and a C++
# compiler; the others assume one of them ran. VENV and PYTHON may be overridden.
PYTHON ?= python3
VENV ?= .venv
# How many processes run the tests that start none of their own.
JOBS ?= 2
BIN := $(VENV)/bin
NAME ?=

.PHONY: quickstart test venv peers lint types bench clean help

help:
	@echo "make quickstart   venv, install, train DLRM on MovieLens-100K with 2 workers"
	@echo "make test         venv, install, ruff, all tests"
	@echo "make lint         ruff alone"
	@echo "make types        mypy; not part of make test, for it still has findings"
	@echo "make peers        install what the benchmarks compare with"
	@echo "make bench NAME=x run one benchmark (all without NAME); needs 'make peers' first"
	@echo "make clean        remove venv and builds"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# The stamps make a second call cheap; pyproject or C++ changes reinstall. Neither target needs the other, so that each
# builds the native code once.
NATIVE := $(shell find kernels/csrc -type f 2>/dev/null) CMakeLists.txt pyproject.toml

$(VENV)/.installed: $(BIN)/python $(NATIVE)
	$(BIN)/python -m pip install --quiet -e '.[cpu,quickstart]'
	@touch $@

$(VENV)/.installed-dev: $(BIN)/python $(NATIVE)
	$(BIN)/python -m pip install --quiet -e '.[cpu,quickstart,dev,gpu-dev]'
	@touch $@ $(VENV)/.installed

venv: $(VENV)/.installed-dev

quickstart: $(VENV)/.installed
	$(BIN)/shoal quickstart

test: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile tests/unit tests/sim
	$(BIN)/python -m pytest tests/multiproc tests/cluster tests/gpu

# TorchRec's wheel names the CUDA build of fbgemm as a dependency, hence --no-deps (torchrec 1.8 pairs with torch 2.13).
peers: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --no-deps torchrec==1.8.0
	$(BIN)/python -m pip install --quiet -e '.[peers]'

lint: venv
	$(BIN)/ruff check .

# mypy takes a module's name from its path, so it is shown the folders where the installed package has them.
types: venv
	@mkdir -p build/types/shoal
	@ln -sfn $(CURDIR)/shoal/__init__.py build/types/shoal/__init__.py
	@for d in kernels actors platform jobs; do ln -sfn $(CURDIR)/$$d build/types/shoal/$$d; done
	cd build/types && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml shoal

bench:
	$(BIN)/python tests/bench/run.py $(NAME)

clean:
	rm -rf build .venv
