# Two commands: `make demo` and `make test`. Each sets up its own .venv, and is quick the second time.
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
READY  := $(VENV)/.ready
PIP    := $(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint bench fuzz clean
demo: $(READY)
	@$(PY) -m lowtide demo

test: $(READY) lint
	$(PY) -m pytest -n 2 --dist worksteal -q

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

# Under an hour on one thread; `python -m benchmarks run --quick` shows in minutes that everything runs.
bench: $(READY)
	-@$(PIP) --editable ".[peers]"  # without a C++ compiler they are left out
	$(PY) -m benchmarks all

fuzz: $(READY)
	LOWTIDE_FUZZ_EXAMPLES=20000 $(PY) -m pytest -n 2 -q \
	  tests/engine/test_fuzz.py tests/engine/test_planned.py tests/engine/test_torch_ops.py

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable ".[dev]"
	@touch $(READY)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
