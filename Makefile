# Every target does its own set-up.  make demo   make test   make test-fast   make test-nightly   make docs   make lint
# make release-check
# The newest of these Pythons that runs here, unless one is named:  make test PYTHON=/path/to/python3.12
ifeq ($(origin PYTHON), undefined)
PYTHON := $(shell for v in 3.13 3.12 3.11; do python$$v -c 'import ensurepip, venv' 2>/dev/null && echo python$$v && break; done)
endif
# Options for the first install alone, for example a CPU-only build where the default one brings CUDA packages:
#   make venv TORCH_PIP="--index-url https://download.pytorch.org/whl/cpu"
TORCH_PIP ?=
# Processes that share the tests, each with one thread:  make test JOBS=4
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
DOCS_STAMP := $(VENV)/.docs-ready
SOURCES := $(wildcard planner profiler solvers benchmarks tests docs/hooks)

# Threads that wait in a spin loop take the cores from each other where several processes run (GNU OpenMP's default).
export GOMP_SPINCOUNT ?= 1000

.PHONY: venv demo test test-nightly test-fast release-check lint docs clean

venv: $(STAMP)

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: expected Python 3.13, 3.12 or 3.11 with its venv module on the PATH, got none;" \
		"install one of them, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# torch goes first and alone, at its exact version: a looser requirement can pull in several GB of CUDA packages.
# Compiling all modules takes longer than the rest of the installation; Python compiles those that are imported.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --no-compile $(TORCH_PIP) "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	$(BIN)/python -m pip install --no-compile -c constraints.txt -e '.[zoo,dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/planner demo

lint: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/pyright --pythonpath $(BIN)/python

test: lint
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal -m "not nightly"

# Long tests, and further cases of kinds that make test has one of.
test-nightly: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal -m nightly

# Tests that take no more than a second with all their cases: the inner loop, a minute and a half on two cores.
test-fast: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal -m "not slow and not nightly"

# The wheel and the sdist, installed into an environment of what they require and nothing else, and tried there; no
# network but for the tools that build them.
release-check: $(STAMP)
	$(BIN)/python -m pip install -c constraints.txt "setuptools>=77"
	RELEASE_CHECK=1 $(BIN)/python -m pytest -m release tests/system/test_release.py

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --no-compile -c constraints.txt -e '.[docs]'
	touch $@

# Into site/; a broken link, a page that is not in the navigation or a name that the API reference lacks is an error.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
