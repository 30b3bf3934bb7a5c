# `make demo` and `make test` do all the set-up on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
JOBS ?= 2
export OMP_NUM_THREADS ?= 1

.PHONY: venv demo test test-slow reliability test-compat check format bench clean

venv: .venv/.installed

.venv/.installed: requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@

demo: venv
	$(BIN)/python scripts/demo.py

check: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: venv
	$(BIN)/pytest -n $(JOBS) -m "not slow and not compat"

test-slow: venv
	$(BIN)/pytest -n $(JOBS) -m slow

# half an hour on two quiet cores; SCALE=0.1 for a few minutes
SCALE ?= 1
reliability: venv
	$(BIN)/python scripts/reliability.py --scale $(SCALE) --jobs $(JOBS)

.venv-bench/.installed: requirements-bench.lock requirements.lock pyproject.toml
	test -x .venv-bench/bin/python || $(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --requirement requirements-bench.lock
	.venv-bench/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

# one more environment, for the peers that nothing else needs; without it: .venv/bin/python scripts/bench_save.py
bench: .venv-bench/.installed
	.venv-bench/bin/python scripts/bench_sim.py
	.venv-bench/bin/python scripts/bench_save.py

.venv-compat/.installed: requirements-compat.lock pyproject.toml
	test -x .venv-compat/bin/python || $(PYTHON) -m venv .venv-compat
	.venv-compat/bin/python -m pip install --quiet --requirement requirements-compat.lock
	.venv-compat/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

# mujoco 3.8.1 with gymnasium-robotics and dm_control, and no torch at all
test-compat: .venv-compat/.installed
	.venv-compat/bin/pytest -m compat tests/exactness

clean:
	rm -rf .venv .venv-compat .venv-bench build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
