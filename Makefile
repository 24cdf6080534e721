# Every target sets up what it needs: a virtual environment, the pinned packages, the build.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PYTHONPATH := .

.PHONY: all build test lint demo bench memcheck racecheck clean

all: build

$(VENV)/installed: requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

build: $(VENV)/installed
	$(BIN)/python setup.py --quiet build_ext --inplace

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

test: build lint
	$(BIN)/python -m pytest

demo: build
	$(BIN)/python -m kdtree demo

bench: build
	$(BIN)/python benchmarks/bench_ops.py
	$(BIN)/python benchmarks/bench_engine.py
	-$(BIN)/python benchmarks/bench_round.py  # CUDA alone
	$(BIN)/python benchmarks/tables.py

# On a GPU machine: the op tests under NVIDIA's memory checker.
memcheck:
	compute-sanitizer --tool memcheck --error-exitcode 1 $(or $(wildcard $(BIN)/python),$(PYTHON)) \
		-m pytest tests/ops -k cuda -m "not large"

# Under its checker of shared memory, which slows the most: our kernels alone, and the tests that run
# each of them at small sizes.
racecheck:
	compute-sanitizer --tool racecheck --kernel-name kernel_substring=kdtree --error-exitcode 1 \
		$(or $(wildcard $(BIN)/python),$(PYTHON)) \
		-m pytest tests/ops -k "cuda and (match or groups or odd_sizes)" -m "not large"

clean:
	rm -rf build kdtree/_C.so kdtree/_graph.*.so
