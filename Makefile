# Everything a developer runs. Needs make and Python 3.11 or newer, nothing else; `make` alone lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# The interpreter that makes the environment: the first on the PATH that is new enough. `make PYTHON=… dev` overrides.
ifndef PYTHON
PYTHON := $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)
endif
VENV := .venv
BIN := $(VENV)/bin
# Warnings of pip are about the machine's configuration, not about this project; errors still show.
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
LINKS := build/typing/keepstep
PYTEST_ARGS ?=
# A file's tests stay together, the longest files first (tests/order.py); each process has servers of its own.
# PYTEST_ARGS="-n 0" runs all of them in one.
SPREAD := --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
BENCH_ARGS ?=
CHAOS_ARGS ?=
WASTED_ARGS ?=
SEEDS ?= 2000
SEED ?=

say = printf '%-9s%s\n' "$(1)" "$(2)"

.PHONY: help run demo-payments dev test bench wasted simulate chaos mutants lint lint-ruff lint-types lint-imports lint-files lock clean

help: ## this list
	@printf 'Targets:\n'
	@sed -n 's/^\([a-z][a-z-]*\):[^#]*## /\1\t/p' Makefile | while IFS=$$'\t' read -r name text; do \
		printf '  %-15s%s\n' "$$name" "$$text"; done
	@printf 'Variables: PYTHON (makes the environment), PYTEST_ARGS (make test PYTEST_ARGS="-k lease -x"),\n  SEEDS (make simulate), SEED (make simulate, make demo-payments)\n'

run: $(VENV)/.runnable ## an agent audits the licences of this environment, on two workers of which one is killed
	@$(BIN)/python -m examples.licence_audit

demo-payments: $(VENV)/.examples ## refunds are paid by workers that are killed, at a bank that shows its own ledger; SEED=7 repeats one
	@$(BIN)/python -m examples.payments $(if $(SEED),--seed $(SEED))

dev: $(VENV)/.installed $(LINKS) ## the environment in .venv: locked dependencies, Keepstep editable

test: dev ## all tests, with PostgreSQL, Redis and RabbitMQ servers of their own
	@$(call say,test,pytest $(PYTEST_ARGS))
	@$(BIN)/python -m pytest $(SPREAD) $(PYTEST_ARGS)

bench: dev ## the speed of steps against Celery's, as ratios of one run; BENCH_ARGS="--check --quick"; last line JSON
	@$(BIN)/python -m benchmarks $(BENCH_ARGS)

wasted: dev ## model calls paid for in vain, and effects doubled, in 100 runs hit by SIGKILLs; last line JSON
	@$(call say,wasted,$(WASTED_ARGS))
	@$(BIN)/python -m benchmarks.wasted $(WASTED_ARGS)

simulate: dev ## seeded faults on the real runtime: SEEDS=2000 of them, or SEED=1234 with its schedule; last line JSON
	@$(call say,simulate,$(if $(SEED),seed $(SEED),$(SEEDS) seeds))
	@$(BIN)/python -m tests.simulation $(if $(SEED),--seed $(SEED),--seeds $(SEEDS))

chaos: dev ## workers, PostgreSQL, Redis and RabbitMQ under a monkey; CHAOS_ARGS="--broker both --runs 500 --seed 7"; last line JSON
	@$(call say,chaos,$(CHAOS_ARGS))
	@$(BIN)/python -m tests.chaos $(CHAOS_ARGS)

mutants: dev ## break one line of the protocol at a time: a test fails for each; last line JSON
	@$(call say,mutants,each in a copy of the tree)
	@$(BIN)/python -m tests.mutants

lint: lint-ruff lint-types lint-imports lint-files ## ruff, mypy --strict, the import contract, shell and container files

lint-ruff: dev
	@$(call say,lint,ruff)
	@$(BIN)/ruff check --quiet --output-format concise .
	@$(BIN)/ruff format --quiet --check . || { echo 'run: $(BIN)/ruff format .' >&2; exit 1; }

# Links that lead nowhere check nothing and find nothing wrong, so the count must be that of the tree.
lint-types: dev
	@$(call say,lint,mypy --strict)
	@cd build/typing && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p keepstep \
		2>&1 | sed -E 's,^keepstep/(store|runtime|tasks)/,\1/,' | tee mypy.txt
	@files=$$(find keepstep store runtime tasks -name '*.py' | wc -l); \
		grep -q "no issues found in $$files source files" build/typing/mypy.txt || { \
		echo "mypy did not check the $$files files of the package: make clean dev, then again" >&2; exit 1; }

lint-imports: dev
	@$(call say,lint,import contract)
	@cd build/typing && { out=$$(../../$(BIN)/lint-imports ../../pyproject.toml --no-cache 2>&1) || { echo "$$out"; exit 1; }; }; \
		! grep -q 'Analyzed 0 files' <<<"$$out"

lint-files: dev
	@$(call say,lint,shell and container files)
	@$(BIN)/shellcheck .ci/run
	@$(BIN)/hadolint --no-color docker/Dockerfile
	@$(BIN)/check-jsonschema --quiet --builtin-schema vendor.compose-spec docker/compose.yaml

lock: dev ## resolve pyproject.toml afresh into requirements/*.lock (the only target that moves a version)
	@$(call say,lock,requirements/)
	@$(PIP) install 'uv>=0.5'
	@compile="$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate"; \
		$$compile --upgrade pyproject.toml -o requirements/run.lock; \
		$$compile --upgrade pyproject.toml -c requirements/run.lock --group dev -o requirements/dev.lock; \
		$$compile --upgrade -c requirements/dev.lock --group build -o requirements/build.lock; \
		$$compile --upgrade -c requirements/dev.lock --group examples -o requirements/examples.lock

clean: ## remove what these targets made
	@rm -rf $(VENV) build dist ./*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# A changed lock makes a new environment, so that nothing stays behind from the one before.
# $(call environment,LOCKS,HOW LONG): the lock names every package, so nothing is left to resolve; pip check then says
# whether that is true.
define environment
	@test -n '$(PYTHON)' || { echo 'Keepstep needs Python 3.11 or newer and finds none on the PATH:' \
		'install one, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)' >&2; exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Keepstep needs Python 3.11 or newer; $(PYTHON) is $$('$(PYTHON)' -V 2>&1 || true)" >&2; exit 1; }
	@$(call say,venv,$$('$(PYTHON)' -V) in $(VENV))
	@rm -f $(VENV)/.locked $(VENV)/.installed $(VENV)/.runnable $(VENV)/.examples
	@'$(PYTHON)' -m venv --clear $(VENV)
	@$(call say,venv,installing the locked packages ($(shell cat $(1) | grep -c '^[a-z]'); $(2) the first time))
	@$(PIP) install --require-hashes --no-deps $(addprefix -r ,$(1))
endef

define editable
	@$(call say,venv,installing Keepstep (editable))
	@$(PIP) install --no-deps --no-build-isolation -e .
	@$(BIN)/python -m pip --disable-pip-version-check check >/dev/null || $(BIN)/python -m pip check
endef

$(VENV)/.locked: requirements/dev.lock
	$(call environment,requirements/dev.lock,about a minute)
	@touch $@

$(VENV)/.installed: $(VENV)/.locked pyproject.toml
	$(editable)
	@touch $@ $(VENV)/.runnable

# What running needs, without the tools; an environment with the tools in it will do.
$(VENV)/.runnable: requirements/run.lock requirements/build.lock pyproject.toml
	$(if $(wildcard $(VENV)/.installed),@$(MAKE) dev,$(call environment,requirements/run.lock requirements/build.lock,half a minute))
	$(if $(wildcard $(VENV)/.installed),,$(editable))
	@touch $@

# What the examples need beside that: the tools' environment has it.
$(VENV)/.examples: $(VENV)/.runnable requirements/examples.lock
	$(if $(wildcard $(VENV)/.installed),@$(MAKE) dev,@$(PIP) install --require-hashes --no-deps -r requirements/examples.lock)
	@touch $@

# Type checkers do not see through the import hook of an editable install; through links they see one package.
$(LINKS): keepstep Makefile
	@rm -rf $(LINKS) && mkdir -p $(LINKS)
	@for file in keepstep/*; do [[ $$file == */__pycache__ ]] || ln -s "../../../$$file" $(LINKS)/; done
	@for folder in store runtime tasks; do ln -s "../../../$$folder" $(LINKS)/; done
