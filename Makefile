# Both commands do all their own set-up:  make demo   make test
PYTHON ?= python3.11
# Options for the first install alone, for example a CPU-only build where the default one brings CUDA packages:
#   make venv TORCH_PIP="--index-url https://download.pytorch.org/whl/cpu"
TORCH_PIP ?=
# Processes that share the tests; each of them uses two threads:  make test JOBS=4
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
SOURCES := $(wildcard planner profiler solvers benchmarks tests)

# Threads that wait in a spin loop take the cores from each other where several processes run (GNU OpenMP's default).
export GOMP_SPINCOUNT ?= 1000

.PHONY: venv demo test lint clean

venv: $(STAMP)

# torch goes first and alone, at its exact version: a looser requirement can pull in several GB of CUDA packages.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(TORCH_PIP) "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	$(BIN)/python -m pip install -c constraints.txt -e '.[zoo,dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/planner demo

lint: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/pyright --pythonpath $(BIN)/python

test: lint
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
