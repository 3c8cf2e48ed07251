# `make demo`, `make check` and `make test` are for a newcomer. Each makes the virtual environment that it needs.
PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
READY := $(VENV)/.ready
PYTEST := $(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal

# Workers, and the processes that tests start, read what one of them has compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo check test gpu testers lint types docs clean

demo: $(READY)
	$(VENV)/bin/residua demo --out runs/demo

# The fast lane: everything but Triton's interpreter, compilers, other processes, the browser, tests that take long, and
# of tests for all schemes those for variants and, on whole models, for most presets. Property tests draw fewer examples.
check: $(READY)
	$(PYTEST) --hypothesis-profile quick -m "not (interpreter or compiler or processes or browser or variant or slow)"

test: $(READY)
	$(PYTEST)

# All that a CPU cannot show, within 25 minutes, and a summary. It runs with the torch that the machine has: the
# virtual environment if there is one, else PYTHON. DRY=1 tries every step on a CPU; a second call goes on.
gpu:
	$(if $(wildcard $(READY)),$(VENV)/bin/python,$(PYTHON)) experiments/gpu.py $(if $(DRY),--dry-run)

# The model testers of transformers. Its source archive, which `make test` uses, lacks those of generation.
testers: $(READY)
	version=$$($(VENV)/bin/python -c "import transformers; print(transformers.__version__)"); \
	test -d $(VENV)/transformers-$$version || git clone --quiet --depth 1 --branch v$$version \
	  https://github.com/huggingface/transformers $(VENV)/transformers-$$version; \
	TRANSFORMERS_TESTS=$(VENV)/transformers-$$version/tests \
	  $(VENV)/bin/python -m pytest tests/models/test_transformers_testers.py

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(READY)
	$(VENV)/bin/mypy

docs: $(READY)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	$(VENV)/bin/mkdocs build --strict

clean:
	rm -rf $(VENV) runs

# torch first and alone: resolved together with the rest, pip may look at builds of several gigabytes.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@
