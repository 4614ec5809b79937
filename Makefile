# Every target does its own set-up; run again, it starts at once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test test-all test-matrix lint tiny bench clean

demo: $(VENV)/.demo
	$(BIN)/python -m modeling_mrp.demo $(DEMO)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" $(TESTS)

test-all: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadfile $(TESTS)

test-matrix: $(VENV)/.dev
	.ci/test-matrix

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Rebuilds hub_configs/sdar-tiny-mrp from nothing: task, tokenizer, backbone, heads (resumable).
tiny: $(VENV)/.dev
	$(BIN)/python -m modeling_mrp.tiny build --out build/sdar-tiny-mrp

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.decoding
	$(BIN)/python -m benchmarks.wall_time
	$(BIN)/python -m benchmarks.long_context
	$(BIN)/python -m benchmarks.launches
	$(BIN)/python -m benchmarks.tiny

clean:
	rm -rf $(VENV) build *.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and pinned: a looser request would pull the CUDA build. Only then the package.
$(VENV)/.demo: pyproject.toml requirements-demo.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-demo.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

$(VENV)/.dev: pyproject.toml requirements-dev.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@
