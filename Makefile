# Everything a person or CI needs: `make demo` and `make test` work on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint format bench gpu kernels-report clean

demo: $(VENV)/.installed
	$(BIN)/paceline train $(ARGS)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.installed-lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-lint
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.overhead

# The first contact with a GPU: is it right, then how fast. Goes on where it stopped.
gpu: $(VENV)/.installed-test $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.gpu $(ARGS)

# What each kernel needs of a GPU, without one; fails where a kernel spills registers.
kernels-report: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.kernels.report

# One environment; each stamp adds what its targets need and is renewed when pyproject.toml changes.
$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Paceline needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -e .
	@touch $@

$(VENV)/.installed-%: pyproject.toml $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -e '.[$*]'
	@touch $@

clean:
	rm -rf $(VENV) build dist runs
