# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Versions that the extra `hf` allows; `make matrix` runs the tests of wrapped models under each.
TRANSFORMERS := 5.24.0

.PHONY: demo test nightly matrix bench lab lint docs clean

# The audit's exit code is 1 when it finds a model that depends on phase, as it does here.
demo: $(READY)
	$(BIN)/dynchunk segment "$$($(BIN)/python -c 'import argparse; print(argparse.__file__)')"
	$(BIN)/dynchunk audit || test $$? -eq 1

test: lint
	$(BIN)/python -m pytest

nightly: $(READY)
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest

matrix: $(READY)
	for version in $(TRANSFORMERS); do \
		$(BIN)/pip install --quiet --no-deps --target $(VENV)/transformers-$$version transformers==$$version && \
		PYTHONPATH=$(VENV)/transformers-$$version $(BIN)/python -m pytest tests/test_hf_*.py \
			tests/test_v4_parity.py tests/test_lm_eval.py tests/test_doctor.py || exit; \
	done

bench: $(READY)
	$(BIN)/python benchmarks/boundaries.py
	$(BIN)/python benchmarks/packing.py
	for name in decode prefill memory train streaming wrap wrap-v4; do $(BIN)/dynchunk bench $$name || exit; done

# Hours on two cores; a finished run is not run again.
lab: $(READY)
	$(BIN)/dynchunk lab table --folder benchmarks/recall --jobs 2
	$(BIN)/dynchunk lab ship --folder benchmarks/recall --jobs 2

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
	$(BIN)/pip install --quiet --no-deps -r requirements.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf $(VENV)
