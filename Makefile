# Everything a developer runs. `make run` and `make test` need Python 3.11 and nothing else beforehand.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
QUESTION ?= Why is the sky blue? Answer in one sentence.
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: run test test-all check bench clean

run: $(VENV)/installed
	@model=$$($(BIN)/python -m benchmarks.models smollm2) && \
	printf 'FROM %s\n' "$$model" | $(BIN)/localllm create smollm2:135m -f - && \
	$(BIN)/localllm run smollm2:135m "$(QUESTION)"

test: $(VENV)/clients
	$(BIN)/python -m pytest -m "not slow"

test-all: $(VENV)/clients
	$(BIN)/python -m pytest

check: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks.compare --peer "$(PEER)" $(MODELS)

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --config-settings editable_mode=compat -e ".[dev]"
	@touch $@

# What the tests of other projects' clients need beside that.
$(VENV)/clients: $(VENV)/installed
	$(BIN)/python -m pip install -q --config-settings editable_mode=compat -e ".[clients]"
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
