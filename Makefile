# Every target sets itself up: its own .venv, idempotent, seconds when nothing changed.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SHELL := /bin/bash
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM := false

.PHONY: setup demo demo-qwen up test test-slow test-faults check format bench bench-c2c bench-pool bench-store \
	bench-transfer bench-disk bench-speculate bench-conductor conformance simulate-tables bundles fit-qwen clean

setup: $(STAMP)

# torch first and pinned: this version has a CPU build; plain `torch` would pull GPU libraries.
$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install -q torch==2.13.0
	@$(BIN)/python -m pip install -q -e '.[dev]'
	@touch $(STAMP)

demo: setup
	@$(BIN)/moonpool demo

demo-qwen: setup
	@$(BIN)/moonpool demo --source qwen2.5-coder-1.5b-instruct --target qwen2.5-coder-0.5b-instruct

up: setup
	@$(BIN)/moonpool up

# Two processes of one torch thread each, whole files to each: leak checks look at their own process, ports are given by the system.
test: export OMP_NUM_THREADS ?= 1
test: export OMP_WAIT_POLICY ?= PASSIVE
test: setup
	@$(BIN)/python -m pytest -m 'not slow' --numprocesses 2 --dist loadfile

test-slow: setup
	@$(BIN)/python -m pytest -m slow -rs --timeout 1800

# Kills, freezes and restarts real processes under load, and checks every byte that is read.
test-faults: setup
	@$(BIN)/python -m benchmarks.faults

check: setup
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: setup
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: bench-pool bench-c2c bench-store bench-transfer bench-disk

bundles: setup
	@$(BIN)/python models/fit_bundles.py
	@$(BIN)/python models/fit_bundles.py --back

bench-pool: setup
	@$(BIN)/python -m benchmarks.pool

bench-c2c: setup
	@$(BIN)/python -m benchmarks.c2c

bench-speculate: setup
	@$(BIN)/python -m benchmarks.speculate

# Against the real Mooncake Store, which is installed into a venv of its own; in a network namespace of its own.
bench-store: setup
	@$(BIN)/python -m benchmarks.store

bench-transfer: setup
	@$(BIN)/python -m benchmarks.transfer

# TRACES: a folder with the published traces (Mooncake's repository, FAST25-release/traces). Minutes.
simulate-tables: setup
	@test -n "$(TRACES)" || { echo "make simulate-tables TRACES=<folder with conversation_trace.jsonl, synthetic_trace.jsonl>"; exit 2; }
	@$(BIN)/moonpool simulate tables --traces "$(TRACES)" --figures build/figures/simulate.json

# Needs 2 GB of memory and four minutes; the routers that it compares with go into a venv of their own under build/.
bench-conductor: setup
	@$(BIN)/python -m benchmarks.conductor

bench-disk: setup
	@$(BIN)/python -m benchmarks.disk

# PEER_TESTS: a checkout of kvcache-ai/Mooncake, whose own tests run unmodified against the drop-in.
conformance: setup
	@test -n "$(PEER_TESTS)" || { echo "make conformance PEER_TESTS=<checkout of kvcache-ai/Mooncake>"; exit 2; }
	@$(BIN)/python -m benchmarks.conformance "$(PEER_TESTS)"

# Needs the models in MOONPOOL_MODELS; an hour and more on two cores.
fit-qwen: setup
	@$(BIN)/python -m recipes.qwen --direction l2s
	@$(BIN)/python -m recipes.qwen --direction s2l

clean:
	@rm -rf build .pytest_cache .mypy_cache .ruff_cache
