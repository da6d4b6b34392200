# make up     run a deployment here          (make up ARGS="--engine mock --workers 2")
# make test   everything that CI checks
# make test-trtllm  the engines' contract on the real TensorRT-LLM, with a GPU (VENV=where it is installed)
# make test-vllm    the same on the real vLLM, with or without a GPU, and workers on it in the real pipeline
# make docs   build the documentation's site into site/
# make bench  load a running deployment      (make bench ARGS="--concurrency 64")
# make chaos  kill and stop processes of a deployment under load, then audit its log
#             (make chaos ARGS="--minutes 10 --seed 1 --topology aggregated|cluster|pd|vision")

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
ARGS   ?=
JOBS   ?= 2

.PHONY: up test types pytest test-trtllm test-vllm docs bench chaos lint clean

up: $(VENV)/.installed
	@$(BIN)/penstock up $(ARGS)

# Types beside the tests: both take one core.
test: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory -j2 types pytest

types:
	$(BIN)/mypy

pytest:
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile $(ARGS)

# Not on the stamp: tensorrt_llm comes from NVIDIA's index or container, so BIN may be any environment that has it.
test-trtllm:
	PENSTOCK_CONTRACT_REAL=tensorrt_llm PENSTOCK_CONTRACT_BOUND_S=300 \
	  $(BIN)/python -m pytest tests/workers/engines/test_contract.py -k trtllm --timeout 1800 $(ARGS)

# Its imports warn; on a CPU, each engine takes about 15 s to start.
test-vllm:
	PENSTOCK_CONTRACT_REAL=vllm PENSTOCK_CONTRACT_BOUND_S=120 \
	  $(BIN)/python -m pytest tests/workers/engines/test_contract.py tests/workers/engines/vllm/test_real.py \
	  tests/pipeline/test_vllm.py tests/standins/test_vllm.py -k vllm \
	  -W default --timeout 900 $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(VENV)/.installed
	@$(BIN)/penstock bench http --state .penstock/state.json $(ARGS)

chaos: $(VENV)/.installed-dev
	@$(BIN)/python -m tests.chaos $(ARGS)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Stamps, so that a second call goes straight to work.
$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist site *.egg-info
