# `make demo` and `make test` do everything, set-up included.
SHELL := bash
PYTEST := -q --durations=15
# The hosts start many threads each, which on few cores costs more than it brings.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE := 1

.PHONY: demo test test-fast test-main test-verl08 setup lint clean

demo: setup
	.venv/bin/verl-r3 demo --out runs/demo

test: lint test-verl08 test-main

test-main: setup
	.venv/bin/python -m pytest $(PYTEST) tests

# verl 0.8.0 and Agent Lightning on it live in an environment of their own.
test-verl08: setup
	.venv-verl08/bin/python -m pytest $(PYTEST) -m "verl or agl" --ignore=tests/cli tests

test-fast: setup
	.venv/bin/python -m pytest $(PYTEST) -m "not slow" tests

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

setup:
	@scripts/setup.sh

clean:
	rm -rf .venv .venv-verl08 .tools .cache runs build dist
