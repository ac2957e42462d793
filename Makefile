# make install | demo | test | test-vllm | lint | check. Nothing is needed beforehand but Python >= 3.11 with venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Further arguments: overrides for the demo (make demo ARGS="run.seed=1"), options for pytest (make test ARGS="-k loss").
ARGS ?=

# A stamp is written only after pip succeeded, so an interrupted installation is taken up again.
BASE := $(VENV)/.installed-base
DEV := $(VENV)/.installed-dev

# vLLM pins another torch than the project is developed with: an environment of its own.
VLLM_VENV := .venv-vllm
VLLM := $(VLLM_VENV)/.installed
VLLM_ENVIRONMENT := $(wildcard tests/real_vllm/environment/*)

.PHONY: install demo test test-vllm lint format check clean
.DELETE_ON_ERROR:

install: $(DEV)

demo: $(BASE)
	$(BIN)/rollplex demo $(ARGS)

test: $(DEV)
	$(BIN)/python -m pytest $(ARGS)

test-vllm: $(VLLM)
	$(VLLM_VENV)/bin/python -m pytest tests/real_vllm $(ARGS)

lint: $(DEV)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/lint-imports
	$(BIN)/mypy

format: $(DEV)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

check: lint test

clean:
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11; name another: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(BASE): pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install -e .
	touch $@

$(DEV): pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install -e '.[dev]'
	touch $(BASE) $@

$(VLLM): $(VLLM_ENVIRONMENT)
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	tests/real_vllm/environment/install.sh $(VLLM_VENV)
	touch $@
