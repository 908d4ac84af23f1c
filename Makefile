# Everything a person or CI needs: `make demo` and `make test` work on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# What a release of torch can break: everything that touches it, without the benchmarks and pages.
CORE := tests/test_private_torch.py tests/comm tests/kernels tests/models tests/parallel tests/train

.PHONY: demo test test-core lint format docs pages wheel bench gpu kernels-report clean

demo: $(VENV)/.installed
	$(BIN)/paceline train $(ARGS)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

test-core: $(VENV)/.installed-test
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(CORE)

lint: $(VENV)/.installed-lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-lint
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The site, for reading without a network: site/index.html.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The pages and tables that are made from the code and from what was measured.
pages: $(VENV)/.installed-docs
	for page in docs/make_*.py; do $(BIN)/python $$page || exit 1; done

wheel: $(VENV)/bin/python
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

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
	rm -rf $(VENV) build dist site runs
