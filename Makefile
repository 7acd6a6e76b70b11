# `make demo` and `make test` build .venv by themselves. The stamp makes pip run again only when the pins change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp

.PHONY: demo test bench bench-full matrix soak lint clean

$(STAMP): pyproject.toml configs/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c configs/constraints.txt -e ".[test]"
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check sdcrun tests examples

test: lint
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) build dist *.egg-info sdcrun_jobs
