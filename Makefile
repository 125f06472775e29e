# Two commands on a fresh machine: `make demo` and `make test`. Both set up .venv first; only the second installs developers' tools.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= 2
# One version of each package. `make constraints` resolves them afresh; CONSTRAINTS=/dev/null takes the newest that pyproject.toml admits.
CONSTRAINTS ?= constraints.txt

.PHONY: help setup constraints vendor demo test slow test-extra test-gpu test-cluster drill-cluster check format drill mutants docs docs-serve reference pictures wheel release-check bench clean

help:
	@echo "make demo      set up .venv (without developers' tools) and run the whole pipeline in small (CPU, offline, minutes)"
	@echo "make test      set up .venv and run the tests"
	@echo "make slow      the tests of whole runs that make test leaves out (five minutes)"
	@echo "make test-extra  both, with what some of them ask for: peft, TRL, lm-evaluation-harness, notebooks in a kernel (420 MB)"
	@echo "make check     formatting, lint, types, import layers"
	@echo "make drill     the long tests: full matrices, kill drills"
	@echo "make test-gpu  the tests that need a CUDA device"
	@echo "make test-cluster   a real SLURM and real ssh servers on loopback: jobs on two nodes (needs root; installs Debian packages)"
	@echo "make drill-cluster  the same with the long cases: killed nodes, preemption, arrays, chains"
	@echo "make mutants   small mistakes put into the source one at a time: does a test notice each?"
	@echo "make docs      the documentation site in site/; make docs-serve serves it on 127.0.0.1:8000"
	@echo "make reference write docs/api-reference.md from the docstrings; make pictures takes the pictures of docs/images (needs Chromium)"
	@echo "make constraints    resolve the packages afresh and write their versions to constraints.txt"
	@echo "make vendor    fetch the JavaScript libraries of the web pages from npm (versions: src/headway/vendor/libraries.json)"
	@echo "make wheel     build sdist and wheel in dist/, check them, and install the wheel in a new environment"
	@echo "make release-check   version, changelog, packages, and the wheel with its demo on every Python at hand (PYTHONS, DEMO: .ci/release-check)"
	@echo "make bench     CPU step benchmark against transformers"

PIP := $(BIN)/python -m pip install --quiet --upgrade-strategy only-if-needed --constraint $(CONSTRAINTS)

# What a user needs; the demo runs with it.
$(VENV)/.ready: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit("headway needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try make PYTHON=python3.12") if sys.version_info < (3, 11) else None'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e ".[demo]"
	@touch $@

# And the developers' tools.
$(VENV)/.ready-dev: $(VENV)/.ready
	$(PIP) -e ".[dev]"
	@touch $@

# And what tests of agreement with other libraries ask for.
$(VENV)/.ready-extra: $(VENV)/.ready-dev
	$(PIP) -e ".[test-extra]"
	@touch $@

setup: $(VENV)/.ready-dev

constraints:
	$(PYTHON) .ci/constraints

vendor:
	$(PYTHON) .ci/vendor

demo: $(VENV)/.ready
	$(BIN)/headway demo

# Files in their order: whole runs first, so that short ones fill the end. What Python compiled is kept: this run and those after it start
# many interpreters, and compiling a test file takes longer than most of its tests.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder

# TESTS: more of pytest's options.
test: setup
	$(PYTEST) -n $(JOBS) $(TESTS)

slow: setup
	$(PYTEST) -n $(JOBS) -m "slow and not drill and not cluster"

test-extra: $(VENV)/.ready-extra
	$(PYTEST) -n $(JOBS) -m "not drill and not gpu and not cluster"

# Eight processes share one GPU: most of the time is the compiler's, on the CPU. Carried packages go on PYTHONPATH behind src.
GPU_JOBS ?= 8

test-gpu:
	PYTHONPATH=src:$(PYTHONPATH) $(PYTHON) -m pytest -m gpu -n $(GPU_JOBS) --dist worksteal -p no:benchmark -p no:cacheprovider tests/gpu
	# Ten ratios against torch's own functions; one that fell ends this with an error.
	PYTHONPATH=src:$(PYTHONPATH) $(PYTHON) benchmarks/guard.py --device cuda

# HEADWAY_CLUSTER_OPTIONAL=1 (set by .ci/run) skips where root or a package is missing; else that is an error.
CLUSTER ?= cluster and not drill

test-cluster: setup
	$(BIN)/python -m pytest -m "$(CLUSTER)" -rs tests/cluster

drill-cluster: setup
	$(BIN)/python -m pytest -m cluster -rs tests/cluster

drill: setup
	$(BIN)/python -m pytest -m "drill and not cluster"
	HEADWAY_FAULTS=60 $(BIN)/python -m pytest tests/e2e/test_random_faults.py
	HEADWAY_FUZZ_SECONDS=120 $(BIN)/python -m pytest -s tests/e2e/test_fuzz.py
	HEADWAY_KILLS=200 HEADWAY_TERMS=20 $(BIN)/python -m pytest -s tests/e2e/test_kill_drill.py

mutants: setup
	nice $(BIN)/python tests/mutation --jobs $(JOBS) $(MUTANTS)

check: setup
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/basedpyright
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/wish.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/python -m pytest tests/unit/test_layers.py

format: setup
	$(BIN)/ruff format src tests benchmarks examples
	$(BIN)/ruff check --fix src tests benchmarks examples

# The site, from docs/ and the code, into site/. --strict: a broken link or anchor ends the build.
$(VENV)/.ready-docs: $(VENV)/.ready
	$(PIP) -e ".[docs]"
	@touch $@

docs: $(VENV)/.ready-docs
	$(BIN)/headway config reference > docs/settings.md
	$(BIN)/python docs/_site_pages.py > docs/api-reference.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "site/index.html"

# The page of Python names, from their docstrings.
reference: $(VENV)/.ready
	$(BIN)/python docs/_site_pages.py > docs/api-reference.md

# RUNS: a folder with finished runs; CHAT: the address of a server with two models.
pictures: setup
	RUNS=$(RUNS) CHAT=$(CHAT) $(BIN)/python .ci/pictures

docs-serve: $(VENV)/.ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8000

# What people install: built afresh, and tried in an environment that has nothing else.
wheel: $(VENV)/.ready
	rm -rf dist build/wheel
	$(PIP) build twine
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv --clear build/wheel
	$(subst $(BIN),build/wheel/bin,$(PIP)) dist/*.whl
	build/wheel/bin/headway --version
	build/wheel/bin/headway doctor

# Before a release: version and changelog agree, the packages build, and the wheel runs the demo on every Python at hand.
release-check: $(VENV)/.ready
	$(PIP) build twine
	$(BIN)/python .ci/release-check

bench: setup
	$(BIN)/python benchmarks/cpu_step.py

clean:
	rm -rf $(VENV) site .pytest_cache .ruff_cache build dist src/*.egg-info
