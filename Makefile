# `make demo` and `make test` build .venv by themselves. The stamp makes pip run again only when the pins, or what is
# compiled, have changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
DEMO := build/demo
FAULT := weight:rank=2,step=20,kind=bitflip,bit=27

# Several ranks share this machine: one thread each, as torchrun itself sets it for several ranks of one node.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-all lint readme bench bench-full matrix soak campaign clean

demo: $(STAMP)
	$(BIN)/sdcrun --sdc-dir $(DEMO) --sdc-job demo --nnodes 4 --inject-fault $(FAULT) examples/train_gpt.py --steps 40
	$(BIN)/sdcrun report --sdc-dir $(DEMO) demo

$(STAMP): pyproject.toml configs/constraints.txt sdcrun/shim/fingerprint/native.c
	@echo "building $(VENV), with torch for the CPU (about 750 MB); this takes a minute or more"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c configs/constraints.txt -e ".[test]"
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check sdcrun tests examples

test: lint
	$(BIN)/python -m pytest -m "not slow"

test-all: lint
	$(BIN)/python -m pytest --hypothesis-profile explore

# Runs the commands of README.md and puts what they print into it.
readme: $(STAMP)
	$(BIN)/python tests/readme.py

bench: $(STAMP)
	$(BIN)/python tests/bench/run.py

bench-full: $(STAMP)
	$(BIN)/python tests/bench/run.py --full

# Each training loop alone, on three and four ranks, clean and with each fault; every idiom and fault of the audit too.
matrix: $(STAMP)
	$(BIN)/python -m pytest tests/integration/matrix.py
	SDCRUN_MATRIX=1 $(BIN)/python -m pytest tests/integration/test_replay_idioms.py tests/integration/test_replay_faults.py

# ROUNDS audits and weight votes of healthy programs, as many launches as it takes; goes on where it was stopped.
ROUNDS ?= 1000
soak: $(STAMP)
	$(BIN)/python tests/soak/soak.py $(ROUNDS)

# Every fault of the matrix on the GPT example, and the table of what was caught.
campaign: $(STAMP)
	$(BIN)/sdcrun campaign --sdc-dir build/campaign configs/campaign.yaml -- --nnodes 3 examples/train_gpt.py

clean:
	rm -rf $(VENV) build dist *.egg-info sdcrun_jobs bench.json
