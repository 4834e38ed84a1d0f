# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test nightly bench lint docs clean

demo: $(READY)
	$(BIN)/dynchunk segment "$$($(BIN)/python -c 'import argparse; print(argparse.__file__)')"

test: lint
	$(BIN)/python -m pytest

nightly: $(READY)
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest

bench: $(READY)
	$(BIN)/python benchmarks/boundaries.py
	$(BIN)/python benchmarks/packing.py

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(READY)
	$(BIN)/pip install -e '.[docs]'
	$(BIN)/mkdocs build --strict -f docs/mkdocs.yml

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -r requirements.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf $(VENV)
