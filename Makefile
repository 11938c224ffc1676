# make train: environment, data, and the CPU lane.   make test: environment and tests.
# The environment is .venv, made once and reused while the pins it was made from stay the same.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help env env-cuda wheels-cuda data train test gpu-test check lint docs clean

VENV := .venv
BIN := $(VENV)/bin
PINS := $(shell { cat constraints.txt .python-version; sed -n '/^dependencies/,/^]/p; /^dev =/p; /^packages/,/^]/p' pyproject.toml; } | sha256sum | cut -c1-16)
STAMP := $(VENV)/.pins-$(PINS)
CORPUS := runs/data/torch-include
RECIPE ?= nam56r-tiny
OUT ?= runs/$(RECIPE)

help:
	@grep -E '^# make|^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^# //; s/:.*## /: /'

env: $(STAMP) ## create .venv, or reuse it when its pins match

$(STAMP):
	@python=; for p in "$${PYTHON:-}" python3.12 python3 python; do \
	  [ -n "$$p" ] && "$$p" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null \
	    && { python=$$p; break; }; done; \
	[ -n "$$python" ] || { echo "Python 3.12 is needed (megatron-core 0.19.2 has no other); install it, or set PYTHON" >&2; exit 1; }; \
	rm -rf $(VENV); "$$python" -m venv $(VENV)
	@echo 'installing the packages of constraints.txt: 5 GB in $(VENV), some minutes'
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE $(BIN)/python -m pip install -q --disable-pip-version-check \
	  --no-deps --no-build-isolation --target $(VENV)/patch-targets mamba-ssm==2.3.2.post1  # tests patch a copy of it
	@touch $@

# WHEELS=FOLDER: every package from there, without network; the folder is what wheels-cuda makes.
env-cuda: export PIP_NO_INDEX := $(if $(WHEELS),1,$(PIP_NO_INDEX))
env-cuda: export PIP_FIND_LINKS := $(or $(abspath $(WHEELS)),$(PIP_FIND_LINKS))
env-cuda: $(STAMP) ## env with the packages for GPUs: builds (once) what has no wheel, ends with doctor
	$(BIN)/megacpp cuda install $(if $(WHEELS),--wheels $(abspath $(WHEELS)))

wheels-cuda: FOLDER := $(or $(WHEELS),wheels)
wheels-cuda: $(STAMP) ## every package as a wheel in WHEELS=wheels, for GPUs of CUDA_ARCHS (90)
	$(BIN)/megacpp cuda wheels --out $(FOLDER)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip wheel -q --disable-pip-version-check -w $(FOLDER) '.[dev]' setuptools
	rm -f $(FOLDER)/megacpp_mcore-*.whl

$(CORPUS).idx: | $(STAMP)
	$(BIN)/megacpp data build --torch-headers --out $(CORPUS) --overwrite

data: $(CORPUS).idx ## build the corpus: the C++ headers that the installed torch ships

train: data ## train nam56r-tiny on the CPU; RECIPE= and OUT= choose another
	$(BIN)/megacpp train $(RECIPE) --out $(OUT) --overwrite

lint: $(STAMP) ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Five workers for two cores, as tests of ranks and launchers wait, and three for the fast tests, of
# which few do; tests/conftest.py says which files stay on one of them. Bytecode is kept: else each
# worker, and each Python that a test starts, compiles what it imports of this checkout. A worker
# that dies ends the suite: xdist's next one may get no test, and the suite would wait for those.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --max-worker-restart 0

test: lint ## lint and the test suite, 5 to 19 minutes on two cores
	$(PYTEST) -n 5

gpu-test: ## the tests of tests/gpu that need a GPU: a log per file in examples/receipts/gpu-tests
	PYTHON="$${PYTHON:-python}" tests/gpu/run.sh examples/receipts/gpu-tests

check: lint ## lint and the tests not marked slow, about a minute: before every commit
	$(PYTEST) -n 3 -m 'not gpu and not slow'

docs: $(STAMP) ## render README, docs/ and the table of receipts from receipts, schema and catalog
	$(BIN)/python -m megacpp_mcore.pages

clean: ## remove the environment, the runs and the caches
	rm -rf $(VENV) runs build dist .pytest_cache .hypothesis .ruff_cache
