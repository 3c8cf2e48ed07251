# `make demo`, `make check` and `make test` are for a newcomer. Each makes the virtual environment that it needs.
PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
LAB := $(VENV)/.lab
READY := $(VENV)/.ready
TITAN := $(VENV)-titan
VLLM := $(VENV)-vllm
INSTALL := -m pip install --quiet --disable-pip-version-check --no-build-isolation --use-pep517 --constraint
PIP := $(VENV)/bin/python $(INSTALL) requirements.txt
TITAN_PIP := $(TITAN)/bin/python $(INSTALL) requirements-titan.txt
PYTEST := $(VENV)/bin/python -m pytest
LOOSE := arg-type assignment call-overload dict-item index list-item misc operator return-value type-var union-attr unused-ignore var-annotated
PARALLEL := -n $(WORKERS) --dist worksteal
FAST := --hypothesis-profile quick -m "not (interpreter or compiler or processes or browser or variant or slow or nightly)"

# Workers, and the processes that tests start, read what one of them has compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo check test nightly resbench resbench-runs gpu testers lint types docs titan vllm slurm lock newest lowest clean

demo: $(LAB)
	@echo "3/3 Training: three models side by side, about three minutes on two idle cores"
	$(VENV)/bin/residua demo --out runs/demo

# The fast lane: everything but Triton's interpreter, compilers, other processes, the browser, tests that take long, and
# of tests for all schemes those for variants and for most presets. Property tests draw fewer examples.
check: $(READY)
	$(PYTEST) $(PARALLEL) $(FAST)

# What a change needs before it lands.
test: $(READY)
	$(PYTEST) $(PARALLEL) -m "not nightly"

# All that `make test` leaves out: every variant of every scheme, every family of models, compilers for most schemes, the
# browser, the commands of pages, and tests of benchmarks.
nightly: $(READY)
	$(PYTEST) $(PARALLEL) -m nightly
	$(PYTEST) resbench -m nightly

# Whether the pages say what the records of ResBench carry.
resbench: $(READY)
	$(VENV)/bin/python resbench/pages.py
	$(PYTEST) resbench -m "not nightly"

# The missing runs of a study at low priority, one after the other, until no further one ends within MINUTES. Each record is
# committed as it ends. They are made by the commit that resbench/commit names, in a worktree of it with its own environment.
STUDY ?= rivals-1M
MINUTES ?= 60
DATA ?= data/resbench
resbench-runs:
	$(PYTHON) resbench/runs.py $(STUDY) --minutes $(MINUTES) --data $(DATA)

# What a CPU cannot show, in order of worth, within ten minutes, and a summary. It runs with the torch that the machine has: the
# virtual environment if there is one, else PYTHON. DRY=1 tries every step on a CPU; a second call goes on.
gpu:
	$(if $(wildcard $(READY)),$(VENV)/bin/python,$(PYTHON)) tools/gpu.py $(if $(DRY),--dry-run)

# The model testers of transformers. Its source archive, which `make nightly` uses, lacks those of generation.
testers: $(READY)
	version=$$($(VENV)/bin/python -c "import transformers; print(transformers.__version__)"); \
	test -d $(VENV)/transformers-$$version || git clone --quiet --depth 1 --branch v$$version \
	  https://github.com/huggingface/transformers $(VENV)/transformers-$$version; \
	TRANSFORMERS_TESTS=$(VENV)/transformers-$$version/tests \
	  $(VENV)/bin/python -m pytest tests/models/test_transformers_testers.py

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

# Of scripts that nobody calls every day: whether the names and arguments are there that they use.
types: $(READY)
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy $(LOOSE:%=--disable-error-code %) experiments/*.py benchmarks/*.py tools/*.py
	$(VENV)/bin/mypy $(LOOSE:%=--disable-error-code %) resbench/*.py

# The site, after its pages: tables are those of the records, links lead somewhere, what is generated is whole.
docs: $(READY)
	$(PIP) --editable '.[docs]'
	$(VENV)/bin/python experiments/pages.py
	$(PYTEST) docs experiments
	$(VENV)/bin/mkdocs build --strict

# The tests of residua.engines.torchtitan with torchtitan itself, in an environment of its own: it bounds packages that
# the others do not. Adds a record to experiments/torchtitan.jsonl.
titan: $(TITAN)/.ready
	$(TITAN)/bin/python tools/engine_tests.py torchtitan

$(TITAN)/.ready: pyproject.toml requirements-titan.txt
	$(PYTHON) -m venv $(TITAN)
	$(TITAN_PIP) torch
	$(TITAN_PIP) hatchling
	$(TITAN_PIP) --editable '.[titan]' pytest pytest-timeout hypothesis
	touch $@

# The tests of residua.engines.vllm with vLLM itself, on a CPU. Adds a record to experiments/vllm.jsonl.
vllm: $(VLLM)/.ready
	$(VLLM)/bin/python tools/engine_tests.py vllm

$(VLLM)/.ready: pyproject.toml requirements-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	command -v uv >/dev/null && uv pip install --quiet --python $(VLLM) --torch-backend cpu --constraint requirements-vllm.txt torch \
	  || $(VLLM)/bin/python -m pip install --quiet --constraint requirements-vllm.txt torch
	$(VLLM)/bin/python -m pip install --quiet --no-deps --requirement requirements-vllm.txt
	$(VLLM)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# The tests of lab/jobs/slurm.py with a Slurm of this machine, which needs root and Debian's slurm-wlm and munge; then with
# its accounting, if slurmdbd and mariadb-server are there too. Adds records to experiments/slurm.jsonl.
slurm: $(READY)
	$(VENV)/bin/python tools/slurm_cluster.py $(VENV)/bin/python tools/engine_tests.py slurm
	$(VENV)/bin/python tools/slurm_cluster.py --accounting $(VENV)/bin/python tools/engine_tests.py slurm

# requirements.txt and requirements-titan.txt anew, with the newest of everything but torch: TORCH=2.14.1 changes that.
lock:
	$(PYTHON) tools/versions.py lock $(if $(TORCH),--torch $(TORCH))

# The fast lane, or TESTS, with the newest of every package, and with the lower bounds of pyproject.toml. The tables are
# in runs/versions. torch stays as it is locked, or at its lower bound, unless TORCH names another version.
newest lowest:
	$(PYTHON) tools/versions.py $(if $(TORCH),--torch $(TORCH)) $@ -- $(PARALLEL) $(or $(TESTS),$(FAST))

# The environments and what builds make. Runs and data stay.
clean:
	rm -rf $(VENV) $(VENV)-newest $(VENV)-lowest $(TITAN) $(VLLM) site dist

# torch first and alone: resolved together with the rest, pip may look at builds of several gigabytes. The build of PyPI
# for Linux brings the libraries of CUDA. uv knows where the others are, and takes the one for the CPU if there is no GPU.
$(LAB): pyproject.toml requirements.txt
	@echo "1/3 PyTorch in $(VENV): 0.9 GB on the disk for a CPU, about 5 GB with CUDA; minutes without a word"
	$(PYTHON) -m venv $(VENV)
	command -v uv >/dev/null && uv pip install --quiet --python $(VENV) --torch-backend auto --constraint requirements.txt torch \
	  || $(PIP) torch
	@echo "2/3 The laboratory: about 60 packages, 0.9 GB; minutes without a word"
	$(PIP) hatchling
	$(PIP) --editable '.[lab]'
	touch $@

$(READY): $(LAB)
	$(PIP) --editable '.[dev]'
	touch $@
