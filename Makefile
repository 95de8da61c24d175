# Each target works on a fresh clone and is quick the second time.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test check clean

setup: .venv/.ready
.venv/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch numpy
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/outrider demo

check: setup
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy
	$(BIN)/pytest tests/unit

test: check
	$(BIN)/pytest tests/property tests/parity tests/e2e

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache
