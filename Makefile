# Every target sets up what it needs; `make help` lists them.
#   make demo N=4      four processes instead of two
#   make test T=ring   only the tests whose name contains "ring"

PYTHON ?= python3
N      ?= 2
BIN    := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo test gpu-check lint format sizes bench clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' Makefile

demo: .venv/viz  ## train the digits on N local processes and prove that the replicas agree
	@$(BIN)/minddp run --nproc-per-node $(N) examples/demo.py

# In two processes, a file at a time: many tests mostly wait.
test: .venv/dev  ## run all tests (under five minutes)
	$(BIN)/python -m pytest $(if $(T),-k '$(T)',-n 2 --dist loadfile)

gpu-check: .venv/dev  ## the tests that need a GPU; install CuPy for your driver first
	$(BIN)/python -m pytest -m gpu -rs tests/test_gpu.py

lint: .venv/dev  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/dev  ## let ruff lay out the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

sizes: .venv/dev  ## code and prose lines of every module
	@$(BIN)/python tools/sizes.py

bench: .venv/viz  ## time all-reduce, a training step and a start of N local processes
	@$(BIN)/minddp bench all-reduce --nproc-per-node $(N)
	@$(BIN)/minddp bench step --nproc-per-node $(N)
	@$(BIN)/minddp bench rendezvous --ranks $(N)

clean:  ## remove the virtual environment and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info

# ---- Set-up: one virtual environment, one stamp per set of extras ----

.venv/viz: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[viz]'
	@touch $@

.venv/dev: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "minddp needs Python 3.11 or newer, but $(PYTHON) is" $$($(PYTHON) --version) \
	    "- name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
