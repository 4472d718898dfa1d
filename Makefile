# Two commands for a newcomer: make run, make test. See README.md and CONTRIBUTING.md.
.PHONY: help run test setup check protos tables bench-cpu bench-gpu bench-kv bench-kv-kill bench-scheduler bench-policy bench-forecast bench-simulation bench-prewarm test-gpu clean

help:
	@echo "make run        set up, start the three services, ask one question, stop them"
	@echo "make test       set up, check, run all tests that need no GPU"
	@echo "make setup      the virtual environment .venv (V=1: pip's output)"
	@echo "make check      linters, types, import rules, protos, stubs, containers"
	@echo "make protos     generate the stubs in octavo/ from protos/"
	@echo "make tables     generate the tables of docs/operations.md from the code"
	@echo "make bench-cpu  the CPU workloads against transformers"
	@echo "make bench-gpu  the GPU workloads beside vLLM's figures, with PYTHON=python3 of a machine that has a GPU"
	@echo "make bench-kv   each tier of the block store beside the limits of this machine"
	@echo "make bench-kv-kill  kill -9 of the block store, 200 times; KILLS=1000 for the long form"
	@echo "make bench-scheduler  CPU of the scheduler a step, by policy and length of the queue"
	@echo "make bench-policy  policies side by side in virtual time; BENCH='--trace azure_llm_2023_conv.csv'"
	@echo "make bench-forecast DATA=FOLDER  the load forecast on public traces, rolling, beside simpler ones"
	@echo "make bench-simulation  how far simulated runs are from real ones on this CPU, some minutes"
	@echo "make bench-prewarm  chats whose blocks come up before their next turn, and without that"
	@echo "make test-gpu   the GPU tests, with PYTHON=python3 of a machine that has a GPU"
	@echo "make clean      remove .venv and caches"

setup:
	@scripts/setup

run: setup
	@.venv/bin/octavo demo

check: setup
	@scripts/check

# pytest comes last, so that its summary closes the output. What measures or loads all cores runs alone, the rest on two processes.
test: check
	@scripts/setup kernels
ifdef PYTEST
	@.venv/bin/python -m pytest $(PYTEST)
else
	@.venv/bin/python -m pytest tests/e2e
	@.venv/bin/python -m pytest -n 2 --dist worksteal tests/unit tests/integration tests/contract
endif

tables: setup
	@.venv/bin/python -m scripts.reference_tables

protos: setup
	@scripts/protos.sh

bench-cpu: setup
	@.venv/bin/python -m bench.cpu $(BENCH)

bench-kv: setup
	@.venv/bin/python -m bench.kv $(BENCH)

bench-kv-kill: KILLS ?= 200
bench-kv-kill: setup
	@.venv/bin/python -m bench.kv_kill --kills $(KILLS) $(BENCH)

bench-scheduler: setup
	@.venv/bin/python -m bench.scheduler $(BENCH)

bench-policy: setup
	@.venv/bin/python -m bench.policy $(BENCH)

bench-forecast: setup
	@.venv/bin/python -m bench.forecast $(DATA)

bench-simulation: setup
	@.venv/bin/python -m bench.simulation $(BENCH)

bench-prewarm: setup
	@.venv/bin/python -m bench.prewarm $(BENCH)

# GPU machines bring their own PyTorch: no set-up.
bench-gpu: PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)
bench-gpu:
	@$(PYTHON) -m bench.gpu $(BENCH)

# No set-up and no settings of pyproject.toml: GPU machines bring their own PyTorch, and pytest without our plugins.
test-gpu: PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)
test-gpu:
	@$(PYTHON) -m pytest -c /dev/null --rootdir=. tests/gpu $(PYTEST)

clean:
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
