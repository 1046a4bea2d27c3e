# Everything people do every day. `make` alone lists it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The package is the repository's root: type checkers see it under its name through this link.
TYPING := $(VENV)/typing
EXAMPLES := birthmark/examples

.PHONY: help setup pretrain test kernels torture quick check format types docs real-models gpu gpu-wheels clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

setup: $(VENV)/.installed  ## make .venv with the tested versions

# Bytecode is written when a module is first imported: of most installed ones never. Without it every process would
# compile again what it imports, which takes twice as long as to load it.
unexport PYTHONDONTWRITEBYTECODE
# That an editable install is one is no news to warn of.
INSTALL := $(BIN)/python -W ignore::UserWarning -m pip install --quiet --no-compile --constraint constraints.txt

# The pip that comes with Python may be years old: a new one decides what to install in a third of the time.
$(VENV)/.installed: pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip setuptools
	$(INSTALL) torch
	DS_BUILD_OPS=0 $(INSTALL) --no-build-isolation --editable '.[dev]'
	mkdir -p $(TYPING) && ln -sfn ../.. $(TYPING)/birthmark
	touch $@

# A run's directory is never reused: the first name that is free is taken.
pretrain: setup  ## train the demo model, a few minutes on two cores, into runs/demo
	@run=runs/demo; n=2; while [ -e "$$run" ]; do run=runs/demo-$$n; n=$$((n + 1)); done; \
	exec $(BIN)/birthmark pretrain --config configs/demo.yaml --run_dir "$$run"

# Files of tests run side by side, each on one core: within a file, tests share what they train. One more than there are
# cores (up to four) uses the time in which others wait for processes that they have started. A process that a test ends
# ends the run: xdist, in place of it, starts another and may then wait for ever.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --max-worker-restart 0
test: setup  ## run the whole test suite
	$(PYTEST) -n $$(($$(nproc) < 4 ? $$(nproc) + 1 : 4)) --dist loadfile --no-loadscope-reorder

# Triton, 1 GB, lies by itself: in .venv every process that compiles would load it. It decides as it is imported whether it
# interprets, so these tests run apart from the others.
TRITON := $(VENV)/triton
$(TRITON)/.installed: constraints.txt | $(VENV)/.installed
	rm -rf $(TRITON)
	$(INSTALL) --no-deps --target $(TRITON) triton
	touch $@

kernels: setup $(TRITON)/.installed  ## run the kernels of GPUs on a CPU, in Triton's interpreter
	TRITON_INTERPRET=1 PYTHONPATH=$(CURDIR)/$(TRITON) $(PYTEST) -n 2 --dist worksteal -m interpreter \
		tests/metrics tests/models tests/trainer/test_optimizers.py tests/benchmarks/test_eigenvalues_kernel.py

# Types of the whole package: mypy's cache keeps what did not change. Tests that train, start processes or are marked heavy are left out.
quick: setup  ## lint, types and the tests that train nothing, under 2 minutes on two cores
	@start=$$(date +%s); trap 'echo "make quick took $$(($$(date +%s) - start)) s"' EXIT; set -e; \
	$(BIN)/ruff check .; $(BIN)/ruff format --check .; $(MAKE) --no-print-directory types; \
	$(PYTEST) -q -n 2 --dist worksteal -m 'not slow and not training and not heavy'

# Damaged inputs and killed runs: make torture CASES=5000 KILLS=200 SEED=7, or MINUTES=30 in equal shares. The same seed
# shows a failure again. PART=1/2 and PART=2/2 run side by side; OUT=FILE keeps notes, from which it goes on.
MINUTES := 10
torture: setup  ## damage CASES inputs and kill KILLS runs, or for MINUTES, from SEED
	$(BIN)/python tests/torture/run.py --minutes $(MINUTES) $(if $(CASES),--cases $(CASES)) $(if $(KILLS),--kills $(KILLS)) \
		$(if $(SEED),--seed $(SEED)) $(if $(PART),--part $(PART)) $(if $(OUT),--out $(OUT))

check: setup types  ## lint, format check and types, as CI does
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	cd $(TYPING) && MYPYPATH=.:$(EXAMPLES):$(EXAMPLES)/arm_and_metric ../bin/mypy --config-file birthmark/pyproject.toml \
		-p birthmark -m lightning_module -m transformers_trainer -m plain_loop -m my_arm -m my_metric

format: setup  ## put the code into its one format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup  ## build these pages as a site, site/index.html; any warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open site/index.html; with its search: $(BIN)/python -m http.server --directory site"

real-models: setup  ## get two real models and measure all that docs/real-models.md says of them, an hour on two cores
	$(BIN)/python research/real_models/study.py $(if $(ONLY),--only $(ONLY))

# No setup: this runs where there is a GPU, torch and no network. Give PYTHON=… for another one than .venv's.
GPU_PYTHON = $(if $(filter file default undefined,$(origin PYTHON)),$(firstword $(wildcard $(BIN)/python) $(PYTHON)),$(PYTHON))
gpu:  ## ask a GPU everything: PART=profile|tests|arms|train|snapshots|big|study, or all; DEVICE=cpu SCALE=tiny rehearses
	$(GPU_PYTHON) benchmarks/on_gpu.py $(if $(PART),--part $(PART)) $(if $(DEVICE),--device $(DEVICE)) \
		$(if $(SCALE),--scale $(SCALE)) $(if $(OUT),--out $(OUT)) $(if $(ARMS),--arms $(ARMS))

VERSION := 3.12
gpu-wheels:  ## collect what such a machine lacks into gpu-wheels/, for its Python VERSION
	$(GPU_PYTHON) benchmarks/gpu_run/environment.py $(VERSION)

clean:  ## remove what tools leave behind; .venv, runs and caches of data stay
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
