# Everything a newcomer needs: `make demo` trains a model whose state does not fit, `make test` runs the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The version the tests run with; any from 2.11 on works.
TORCH ?= torch==2.13.0
DEMO := demo
# Without AVX-512 a CPU computes bfloat16 some sixty times slower than float32.
DTYPE := $(shell grep -qw avx512f /proc/cpuinfo && echo bfloat16 || echo float32)
# Many tests wait for the drive or for a child process: two workers a core, of half a gigabyte each.
PARALLEL := -n $(shell expr 2 \* $$(nproc)) --maxprocesses 8 --dist worksteal
# See tests/emulated_gpu; PyTorch that is built with CUDA takes the GPU there is. Streams are threads: a worker a core.
ON_A_GPU := SPILLWAY_EMULATED_GPU=1 $(BIN)/python -m pytest -n $(shell nproc) --maxprocesses 4 --dist worksteal

.PHONY: help demo test test-full test-gpu lint native clean

help:
	@echo "make demo   set up and fine-tune a 128M model with its state on disk (2 to 8 minutes)"
	@echo "make test   set up, lint, check types and imports, run the tests"
	@echo "make test-gpu   those for a GPU, all of them; on an emulated one where PyTorch is built without CUDA"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# PyTorch first and by itself: nothing below may replace it.
$(VENV)/.torch: | $(BIN)/python
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	@touch $@

# An ordinary install, which builds the native part; the tests run against what was installed.
NATIVE := CMakeLists.txt $(wildcard native/src/*) $(wildcard native/include/*)
$(VENV)/.installed: pyproject.toml $(NATIVE) $(shell find src -name '*.py') | $(VENV)/.torch
	$(BIN)/python -m pip install --quiet .
	@touch $@

$(VENV)/.test-tools: pyproject.toml $(NATIVE) | $(VENV)/.torch
	$(BIN)/python -m pip install --quiet ".[test,lint]"
	@touch $@ $(VENV)/.installed

demo: $(VENV)/.installed
	@echo "The demo makes its own model (random weights) and trains it on the help topics every Python carries."
	@test -f $(DEMO)/llama-128m/model.safetensors || $(BIN)/python examples/demo.py $(DEMO)
	@test ! -e $(DEMO)/run/model || rm -rf $(DEMO)/run  # one that was interrupted goes on
	$(BIN)/spillway train $(DEMO)/llama-128m $(DEMO)/text -o $(DEMO)/run --host-memory 800MB --max-length 256 \
	  --per-device-train-batch-size 2 --max-steps 50 --learning-rate 5e-4 --dtype $(DTYPE)
	@echo "look at $(DEMO)/run: plan.json, metrics.jsonl, trace.json (open it in ui.perfetto.dev), model/"

lint: $(VENV)/.test-tools
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy
	$(BIN)/lint-imports

test: $(VENV)/.test-tools $(VENV)/.installed lint
	$(BIN)/python -m pytest $(PARALLEL)
	$(ON_A_GPU) tests/runtime -m "gpu and not full"

test-full: $(VENV)/.test-tools $(VENV)/.installed
	$(BIN)/python -m pytest $(PARALLEL) -m "full or not full"

test-gpu: $(VENV)/.test-tools $(VENV)/.installed
	$(ON_A_GPU) -m gpu

clean:
	rm -rf $(VENV) $(DEMO) build
