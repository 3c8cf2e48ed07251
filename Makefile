# Two commands for a newcomer: `make demo` and `make test`. Each makes the virtual environment it needs.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready

.PHONY: demo test lint docs clean

demo: $(READY)
	$(VENV)/bin/residua demo --out runs/demo

test: $(READY)
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

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
