# Every target makes or reuses .venv by itself (tools/venv): with uv when it is installed, else with venv and pip.
#
#   make test PYTHON=python3.13 VENV=.venv-3.13     another Python, beside the usual one
#   make test HEADGATE_SCALE=0.5                    longer random schedules
#   make test JOBS=0                                one test after the other, in one process

VENV ?= .venv
PYTHON ?=
py := $(VENV)/bin/python
venv := VENV='$(VENV)' PYTHON='$(PYTHON)' sh tools/venv

typed := src $(wildcard tests/typing)

# How much of the long tests to run: a tenth while working, all of it in `soak`.
HEADGATE_SCALE ?= 0.1
# Tests wait for processes, signals and timers more than they compute: four processes keep two cores busy.
JOBS ?= 4

.PHONY: help demo test check soak bench bench-quick lint types arrows wire format clean package-venv dev-venv bench-venv

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

demo: package-venv ## see it work, without a network
	@$(py) examples/demo.py

test: dev-venv ## the whole suite, at a tenth of its length
	HEADGATE_SCALE=$(HEADGATE_SCALE) $(py) -m pytest -n $(JOBS) -m "not alone"
	$(py) -m pytest -m alone

check: lint types arrows test ## all that CI asks: lint, types, arrows, tests

soak: dev-venv ## the whole suite at full length
	HEADGATE_SCALE=1 $(py) -m pytest -n $(JOBS) -m "not alone"
	$(py) -m pytest -m alone

bench: bench-venv ## measure beside the peers, in one run for each room
	$(py) benchmarks/resources.py
	$(py) benchmarks/tasks.py
	$(py) benchmarks/dispatch.py
	$(py) benchmarks/streams.py
	$(py) benchmarks/context.py
	$(py) benchmarks/line.py
	$(py) benchmarks/summary.py

bench-quick: bench-venv ## the same, shorter and coarser
	$(py) benchmarks/resources.py --quick
	$(py) benchmarks/tasks.py --quick
	$(py) benchmarks/dispatch.py --quick
	$(py) benchmarks/streams.py --quick
	$(py) benchmarks/context.py --quick
	$(py) benchmarks/line.py --quick

lint: dev-venv ## ruff, rules and format
	$(py) -m ruff check .
	$(py) -m ruff format --check .

# Is the code sound (asked twice, because users have either checker), and does a user see every public type. The last
# command ignores --pythonpath and finds the installed package through the `python` of PATH.
types: dev-venv ## mypy --strict, pyright, and a public face typed to 100 %
	$(py) -m mypy $(typed)
	$(py) -m basedpyright --pythonpath $(py) $(typed)
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" basedpyright --verifytypes headgate --ignoreexternal

arrows: dev-venv ## imports point one way, and the other rules of the house
	$(py) -m pytest -q tests/architecture

wire: dev-venv ## make the wire's code anew from wire.proto
	$(py) tools/wire

format: dev-venv ## let ruff write what it can
	$(py) -m ruff check --fix-only .
	$(py) -m ruff format .

clean: ## remove caches and builds; .venv stays
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests $(wildcard examples benchmarks) -name __pycache__ -type d -prune -exec rm -rf {} +

package-venv:
	@$(venv) package

dev-venv:
	@$(venv) dev

bench-venv:
	@$(venv) bench
