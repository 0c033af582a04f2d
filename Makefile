# Every target makes or reuses .venv (tools/venv): with uv if it is installed, else with venv and pip.
#
#   make test PYTHON=3.13 VENV=.venv-3.13           another Python, beside the usual one
#   make test HEADGATE_SCALE=0.5                    longer random schedules
#   make test JOBS=0                                all tests in one process, one after the other
#   make test SEED=7                                in another order

VENV ?= .venv
PYTHON ?=
py := $(VENV)/bin/python
venv := VENV='$(VENV)' PYTHON='$(PYTHON)' sh tools/venv

typed := src $(wildcard tests/typing)

# How much of the long tests to run: a tenth while working, all of it in `soak`.
HEADGATE_SCALE ?= 0.1
# Tests wait for processes, signals and timers more than they compute: four processes keep two cores busy.
JOBS ?= 4
# Bytecode is kept, also where PYTHONDONTWRITEBYTECODE is set: pytest takes 20 s to rewrite the assertions of all tests,
# and the tests start hundreds of interpreters.
SEED ?=
pytest := env PYTHONDONTWRITEBYTECODE= HEADGATE_ORDER=$(SEED) $(py) -m pytest

# Makes up to three targets at once, and prints what each has written when it ends.
at_once := $(MAKE) --no-print-directory -j3 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)

.PHONY: help demo scale test system programs engines browser check soak rewritten bench bench-quick lint types mypy pyright imports mutants spec events pictures wire format clean package-venv dev-venv bench-venv

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

# It prints the address of its page, which is there while it runs; DASHBOARD=0: it has none.
demo: package-venv ## all three pools in one program, without a network
	@$(py) -m headgate demo $(if $(filter 0,$(DASHBOARD)),,--dashboard)

scale: dev-venv ## the demo on three nodes of Ray and on Dask, on this machine; a node is killed, and no call is lost
	@$(py) -m headgate demo --on ray
	@$(py) -m headgate demo --on dask

test: rewritten ## unit and integration tests, at a tenth of their length
	HEADGATE_SCALE=$(HEADGATE_SCALE) $(pytest) -n $(JOBS) tests/unit tests/integration

# Ray, Dask and Chromium start slowly, and their tests mostly wait: one of each for all tests, beside the programs. What
# shows something in real time comes last, when nothing else runs.
system: rewritten ## programs as users run them: examples, docs, commands, a browser, Ray and Dask
	+@$(at_once) programs engines browser
	HEADGATE_SCALE=$(HEADGATE_SCALE) $(pytest) -m alone tests/system

programs: rewritten
	HEADGATE_SCALE=$(HEADGATE_SCALE) $(pytest) -n $(JOBS) -m "not alone and not engines and not browser" tests/system

engines: rewritten
	HEADGATE_SCALE=$(HEADGATE_SCALE) timeout 600 $(pytest) -m engines tests/system/engines

browser: rewritten
	HEADGATE_SCALE=$(HEADGATE_SCALE) timeout 600 $(pytest) -m browser tests/system/observe

check: lint types test system ## all that CI runs

soak: ## the whole suite at full length, and tests/soak
	@$(MAKE) --no-print-directory test system HEADGATE_SCALE=1
	HEADGATE_SCALE=1 $(pytest) -n $(JOBS) tests/soak

# Two processes rewrite the assertions of all tests, so that the four that run them need not do that four times. It is
# done again when a test has changed since.
stamp := .pytest_cache/rewritten-$(notdir $(VENV))
rewritten: dev-venv
	@if [ -e $(stamp) ] && [ -z "$$(find tests -name '*.py' -newer $(stamp) -print -quit)" ]; then exit 0; fi; \
	mkdir -p $(dir $(stamp)) && touch $(stamp); \
	$(pytest) --collect-only -q tests/integration > /dev/null & \
	$(pytest) --collect-only -q tests/unit tests/system > /dev/null; wait

bench: bench-venv ## measure beside other libraries, in one run for each package
	$(py) benchmarks/resources.py
	$(py) benchmarks/tasks.py
	$(py) benchmarks/dispatch.py
	$(py) benchmarks/scripts.py
	$(py) benchmarks/streams.py
	$(py) benchmarks/context.py
	$(py) benchmarks/combined.py
	$(py) benchmarks/shared.py
	$(py) benchmarks/map.py
	$(py) benchmarks/batch.py
	$(py) benchmarks/http_costs.py
	$(py) benchmarks/http_proxy.py
	$(py) benchmarks/quotas.py
	$(py) benchmarks/observe.py
	$(py) benchmarks/summary.py

bench-quick: bench-venv ## the same, shorter and coarser
	$(py) benchmarks/resources.py --quick
	$(py) benchmarks/tasks.py --quick
	$(py) benchmarks/dispatch.py --quick
	$(py) benchmarks/scripts.py --quick
	$(py) benchmarks/streams.py --quick
	$(py) benchmarks/context.py --quick
	$(py) benchmarks/combined.py --quick
	$(py) benchmarks/shared.py --quick
	$(py) benchmarks/map.py --quick
	$(py) benchmarks/batch.py --quick
	$(py) benchmarks/http_costs.py --quick
	$(py) benchmarks/http_proxy.py --quick
	$(py) benchmarks/quotas.py --quick
	$(py) benchmarks/observe.py --quick

lint: dev-venv ## ruff, rules and format
	$(py) -m ruff check .
	$(py) -m ruff format --check .

# Two type checkers, because users have one or the other, and a check that every public name has a type. The last command
# ignores --pythonpath and finds the installed package through the `python` of PATH.
types: dev-venv ## mypy --strict, pyright, and types for 100 % of the public names
	+@$(at_once) mypy pyright

mypy: dev-venv
	$(py) -m mypy $(typed)

pyright: dev-venv
	$(py) -m basedpyright --pythonpath $(py) $(typed)
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" basedpyright --verifytypes headgate --ignoreexternal

imports: dev-venv ## only the import rules, and other rules for files
	$(pytest) -q tests/unit/architecture

mutants: dev-venv ## change the pure engines at random, and list the changes that no test notices (SEED=, N=60)
	$(py) tools/mutants $(if $(SEED),--seed $(SEED)) $(if $(N),--count $(N))

spec: dev-venv ## write docs/spec/tests.md: which tests show which line of the specification
	$(py) tools/spec

events: dev-venv ## write docs/events.md from the classes of events
	$(py) tools/events

pictures: dev-venv ## make the pictures in docs/images, with Chromium
	$(py) -m tests.system.observe.pictures

wire: dev-venv ## generate the code of the wire from wire.proto
	$(py) tools/wire

format: dev-venv ## apply the fixes that ruff can make
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
