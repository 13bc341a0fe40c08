# Every target sets up what it needs. `make help` lists them.
#
# On a machine with an environment of its own (a GPU machine, say),
# `make test PYTHON=python3` uses that interpreter and leaves .venv alone.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# The notebooks' kernels, the book and the tests import the checkout.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

ifeq ($(origin PYTHON),command line)
READY :=
else
PYTHON := $(CURDIR)/.venv/bin/python
READY := .venv/ready
endif

# The interpreter that makes .venv.
PYTHON_BOOTSTRAP ?= $(shell python3.11 -c pass 2>/dev/null && echo python3.11 || echo python3)
JOBS ?= 2
NB ?=

JUPYTER_BOOK := $(PYTHON) -c 'from jupyter_book.cli.main import main; main()'

.PHONY: help setup book test lint export check-export notebooks bench clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /\1\t/' \
	  | awk -F'\t' '{ printf "make %-14s %s\n", $$1, $$2 }'

setup: $(READY) ## make .venv from requirements.txt
	@true

.venv/ready: requirements.txt
	@$(PYTHON_BOOTSTRAP) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
	  f"requirements.txt needs Python 3.11 or newer, and {sys.executable} is older: PYTHON_BOOTSTRAP=... names another")'
	$(PYTHON_BOOTSTRAP) -m venv --clear .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

book: $(READY) ## build the book into _build/html
	$(JUPYTER_BOOK) build . --all -W -n --keep-going
	@echo "The book: $(CURDIR)/_build/html/index.html"

test: check-export lint book ## everything CI asks: export, lint, book, notebooks, tests
	$(PYTHON) -m pytest -n $(JOBS) --dist loadfile

lint: $(READY) ## ruff, in the notebooks' cells too
	$(PYTHON) -m ruff check conftest.py book nbxtensor notebooks tests tools

export: $(READY) ## write nbxtensor/ from the notebooks
	$(PYTHON) tools/export.py

check-export: $(READY) ## compare nbxtensor/ with a fresh export
	$(PYTHON) tools/export.py --check

notebooks: $(READY) ## run the notebooks in place; NB=notebooks/... for one
	$(PYTHON) tools/notebooks.py $(NB)

bench: export NBX_COMMIT ?= $(shell git rev-parse HEAD 2>/dev/null)
bench: $(READY) ## measure on this GPU and write benchmarks/
	$(PYTHON) -m nbxtensor.bench

clean: ## remove what was built, .venv excepted
	rm -rf _build build dist *.egg-info .pytest_cache .ruff_cache
	find . -name .venv -prune -o -name .git -prune -o -name __pycache__ -type d -exec rm -rf {} +
