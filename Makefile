# `make help` lists the targets.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
ARGS   ?=
# Tests at a time: twice as many as two cores, since they wait for processes and for each other.
JOBS   ?= 4
# The build that is mixed with this one: a git revision or a folder.
OTHER  ?= 888ce51d
# Where torch's CPU build is found. It is used where no NVIDIA GPU is seen; empty: never.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# What `make up` installs: without an NVIDIA GPU, the native engine on a CPU without what moves KV between workers.
GPU    := $(shell ls /dev/nvidiactl 2>/dev/null || command -v nvidia-smi)
EXTRA  ?= $(if $(GPU),native,demo)

PIP   := $(BIN)/python -m pip --disable-pip-version-check --quiet
SHOWN_PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := $(shell sed -n 's/^ *"\(torch[^"]*\)",.*/\1/p' pyproject.toml)

.PHONY: help up test test-long test-slow types pytest test-install test-hosts test-trtllm test-llguidance test-vllm test-sglang test-clients conformance docs bench chaos growth chaos-mixed sbom wheel lint clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo '  ARGS="..." goes to the command, as in: make up ARGS="--engine mock --workers 2"'

up: $(VENV)/.installed  ## run a deployment here, the demo model on the native engine
	@$(BIN)/penstock up $(ARGS)

# Types beside the tests: both take one core.
test: $(VENV)/.installed-dev  ## everything that CI checks: lint, types, tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory -j2 types pytest

# 50 times as many examples as in `make test`, and new ones every time.
test-long: $(VENV)/.installed-dev  ## the property tests alone, with many more examples
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest -m hypothesis --timeout 7200 \
	  --numprocesses $(JOBS) --dist load $(ARGS)

# What takes long to start, in variations of which `make test` runs one.
test-slow: $(VENV)/.installed-dev  ## the tests that `make test` leaves out
	$(BIN)/python -m pytest -m slow --numprocesses 2 --dist loadfile $(ARGS)

types:  ## mypy alone
	$(BIN)/mypy

# What fails beside other tests is run once more alone, so that a neighbour's load is no failure. Both are reported. If
# pytest itself broke (status 3; CPython 3.11 may while a failure is printed), tests are left over: all are run again.
PYTEST = $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder -m 'not slow' $(ARGS)
# Containers often set the variable: then each of some hundred processes compiles all modules again.
pytest test-slow chaos chaos-mixed: export PYTHONDONTWRITEBYTECODE :=
pytest:  ## the tests alone
	@status=0; $(PYTEST) || status=$$?; \
	if [ $$status -eq 3 ]; then status=0; $(PYTEST) || status=$$?; fi; \
	if [ $$status -eq 1 ]; then status=0; \
	  $(BIN)/python -m pytest --last-failed --last-failed-no-failures none $(ARGS) || status=$$?; fi; \
	exit $$status

# TensorRT-LLM 1.2 pins llguidance 0.7.29, other engines bring a current one. Each goes in front of the installed one.
LLGUIDANCE ?= 0.7.29 1.9.1
test-llguidance: $(VENV)/.installed-dev  ## constraints and the engines' contract with each release of llguidance that workers meet
	@for release in $(LLGUIDANCE); do \
	  folder=$(VENV)/llguidance-$$release; \
	  [ -d $$folder ] || $(PIP) install --no-deps --target $$folder llguidance==$$release || exit 1; \
	  echo "llguidance $$release"; \
	  PYTHONPATH=$$folder $(BIN)/python -m pytest tests/infra/constraints/test_llguidance_releases.py tests/infra/constraints/test_constraint_grammar.py \
	    tests/workers/engines/constraints tests/workers/engines/external/test_constrained.py \
	    tests/workers/engines/test_contract.py tests/gateway/grammars \
	    -k 'not (vllm or sglang)' $(ARGS) || exit 1; \
	done

# Not on the stamp: tensorrt_llm comes from NVIDIA's index or container, so BIN may be any environment that has it.
test-trtllm:  ## what differs in the real TensorRT-LLM, then the engines' contract on it, with a GPU (VENV=where it is installed)
	$(BIN)/python -m penstock doctor --engine trtllm || echo "the doctor found problems; the contract is run all the same"
	PENSTOCK_CONTRACT_REAL=tensorrt_llm PENSTOCK_CONTRACT_BOUND_S=300 \
	  $(BIN)/python -m pytest tests/workers/engines/test_contract.py -k trtllm --timeout 1800 $(ARGS)

# Its imports warn; on a CPU, each engine takes about 15 s to start.
test-vllm:  ## the same on the real vLLM, and workers on it in the real pipeline, with or without a GPU
	PENSTOCK_CONTRACT_REAL=vllm PENSTOCK_CONTRACT_BOUND_S=120 \
	  $(BIN)/python -m pytest tests/workers/engines/test_contract.py tests/workers/engines/vllm/test_real.py \
	  tests/workers/engines/vllm/test_images.py tests/workers/engines/vllm/test_logits.py \
	  tests/pipeline/test_vllm.py tests/standins/test_vllm.py -k vllm \
	  -W default --timeout 900 $(ARGS)

# A process has one SGLang engine at a time: tests with engines of their own are left to the stand-in.
test-sglang:  ## the same on the real SGLang, with a GPU (VENV=where it is installed)
	PENSTOCK_CONTRACT_REAL=sglang PENSTOCK_CONTRACT_BOUND_S=120 \
	  $(BIN)/python -m pytest tests/workers/engines/test_contract.py tests/standins/test_sglang.py -k sglang \
	  -W default --timeout 900 $(ARGS)

test-install: $(VENV)/.installed-dev  ## wheel, source distribution, editable and bare checkout, each in an environment of its own
	$(BIN)/python -m pytest tests/test_install.py $(ARGS)

test-hosts: $(VENV)/.installed-dev  ## the page on several machines, as printed, on three hosts in network namespaces (needs root)
	PENSTOCK_TEST_HOSTS=1 $(BIN)/python -m pytest tests/infra/nats_server/test_several_machines.py $(ARGS)

test-clients: $(VENV)/.installed-dev  ## real clients on the demo model, and the table in docs/clients.md (ARGS="openai codex": these alone)
	$(BIN)/python -m tests.clients run $(ARGS)

# In a folder of its own, and nothing else: our environment has what the suite needs.
SUITE ?= canitoolcall
conformance: $(VENV)/.installed-dev  ## a neutral suite of tool calls on our parsers (ARGS="kimi/": these alone)
	@folder=$(VENV)/$(SUITE); [ -d $$folder ] || $(PIP) install --no-deps --target $$folder $(SUITE)
	PYTHONPATH=.:$(VENV)/$(SUITE) $(BIN)/python -m tests.conformance.run $(ARGS)

lint: $(VENV)/.installed-dev  ## fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed-docs  ## build the documentation's site into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Its own environment, so that the list has what is installed and not what lists it. The images: `docker sbom`, syft or trivy.
SBOM ?= sbom.json
sbom: $(VENV)/.installed  ## a software bill of materials of what is installed here, as CycloneDX (SBOM=FILE; VENV=another environment)
	@[ -d .venv-sbom ] || $(PYTHON) -m venv .venv-sbom
	@.venv-sbom/bin/python -m pip --disable-pip-version-check --quiet install 'cyclonedx-bom>=7,<8'
	.venv-sbom/bin/cyclonedx-py environment --pyproject pyproject.toml --of JSON --output-reproducible --output-file $(SBOM) $(BIN)/python

bench: $(VENV)/.installed  ## load the deployment that runs here and measure (ARGS="--concurrency 64")
	@$(BIN)/penstock bench http --state .penstock/state.json $(ARGS)

chaos: $(VENV)/.installed-dev  ## kill processes of a deployment under load, then audit its log (ARGS="--minutes 10")
	@$(BIN)/python -m tests.chaos $(ARGS)

growth: $(VENV)/.installed-dev  ## what a deployment keeps of 30,000 requests that have ended (ARGS="--requests 9000")
	@$(BIN)/python -m tests.chaos.growth $(ARGS)

chaos-mixed: $(VENV)/.installed-dev  ## the same with every other process of an earlier build (OTHER=REVISION)
	@$(BIN)/python -m tests.chaos --other-build $(OTHER) $(ARGS)

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .venv-clients .venv-sbom sbom.json .mypy_cache .ruff_cache .pytest_cache build dist site *.egg-info

# The version first: pip would search minutes for a torch that fits an older Python. Where Debian's python3-venv is
# missing, venv says so, and leaves a Python without pip.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Penstock needs Python 3.11 or newer, which \"$(PYTHON)\" is not: name another, as in make $(MAKECMDGOALS) PYTHON=python3.13"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -f $@; exit 1; }

# torch by itself first, so that nothing else is looked for in its index. A torch that is there already stays. If the
# index does not answer, torch comes from pip's own: larger, but it computes all the same.
define install_torch
@if [ "$$(uname)" = Linux ] && [ -n "$(TORCH_INDEX)" ] && [ -z "$(GPU)" ] && ! $(BIN)/python -c 'import torch' 2>/dev/null; then \
  echo "No NVIDIA GPU here: installing torch's CPU build, from $(TORCH_INDEX) (make TORCH_INDEX= takes pip's own index)"; \
  $(1) install --no-compile --retries 0 --timeout 10 --extra-index-url $(TORCH_INDEX) '$(TORCH)'; \
fi
endef

# uv resolves and downloads at once what pip does one after the other. It reads none of pip's configuration: where that
# names an index of its own, or uv cannot install everything, pip does.
define install_dev
@if ! $(BIN)/python -m pip config list | grep -q '[.]index.url=' && $(PIP) install uv && \
  UV_HTTP_TIMEOUT=10 $(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[dev]'; then :; \
else $(PIP) install --no-compile -e '.[dev]'; fi
endef

# What was installed, on all cores: pip compiles on one. Packages have some files that are not Python of this release.
define compile
@$(BIN)/python -m compileall -qq -j 0 \
  "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" || true
endef

wheel:  ## a wheel in dist/, to install elsewhere
	$(PYTHON) -m pip --disable-pip-version-check --quiet wheel --no-deps --wheel-dir dist .

# Stamps, so that a second call goes straight to work.
$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	@echo "Installing Penstock with the extra \"$(EXTRA)\" into $(VENV), once. pip shows what it downloads:"
	$(call install_torch,$(SHOWN_PIP))
	$(SHOWN_PIP) install --no-compile -e '.[$(EXTRA)]'
	$(call compile)
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	$(call install_torch,$(PIP))
	$(call install_dev)
	$(call compile)
	@$(BIN)/python -m tests.binaries $(BIN) || true
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: pyproject.toml | $(VENV)/bin/python
	$(PIP) install -e '.[docs]'
	@touch $@
