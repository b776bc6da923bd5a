# `make help` says what each target is for. Each sets up .venv first if it is missing.
SHELL := /bin/bash
VENV  := .venv
PY    := $(VENV)/bin/python
EXTRA ?= dev
ARGS  ?=

comma := ,
EXTRAS := $(subst $(comma), ,$(EXTRA))
# A stamp for each choice of extras, so that another choice installs what is missing. One with dev sets that of dev too.
INSTALLED := $(VENV)/.installed-$(subst $(comma),-,$(EXTRA))
# Compilers for TPUs and GPUs are installed outside the environment's packages: JAX would load them if it could import them.
COMPILERS := $(VENV)/targets/.installed
# So is torch: transformers would load it into every program, which takes 3 s each time. `make -j2 setup torch` fetches it
# meanwhile.
TORCH := $(VENV)/torch

# Two workers: most of a test's time is compilation, which uses one core.
PYTEST := $(PY) -m pytest tests -n 2 --dist loadfile

.PHONY: setup train sample test test-slow torch test-hub lint check bench targets docs dist help
.DEFAULT_GOAL := help

help:
	@echo "make setup   create .venv and install qkvflow with exactly pinned dependencies (EXTRA=dev,cuda12 for a GPU; dev,eval for the tests of lm-eval; dev,targets for make targets)"
	@echo "make train   train the quickstart: a small continuous-depth language model, on this machine, in minutes"
	@echo "make sample  generate text with the quickstart (ARGS='--prompt \"Once\" --temperature 0.5' for another prompt)"
	@echo "make test    all tests except the slow ones (make test-slow runs those)"
	@echo "make test-hub  tests/hub with torch, installed outside the environment: import and export against transformers"
	@echo "make check   what to run before a commit: ruff, codespell, pyright, fast tests"
	@echo "make bench   benchmarks, JSON and a table"
	@echo "make targets compile every configuration for its TPUs and GPUs, without having them (hours)"
	@echo "make docs    the documentation, into site/ (installs the extra docs on first use)"
	@echo "make dist    sdist and wheel, into dist/"

setup: $(INSTALLED) $(if $(filter targets,$(EXTRAS)),$(COMPILERS))

$(PY):
	@python=""; for p in python3.12 python3.11 python3; do \
	  if command -v $$p >/dev/null && $$p -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; \
	  then python=$$p; break; fi; done; \
	if [ -z "$$python" ]; then echo "qkvflow needs Python 3.11 or 3.12 with the venv module: install one and run make again." >&2; exit 1; fi; \
	$$python -m venv $(VENV)

# Only constraints.txt has exact versions.
$(INSTALLED): pyproject.toml constraints.txt | $(PY)
	@echo "Setting up $(VENV) with $$($(PY) --version) (a few minutes, once)"
	@$(PY) -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".$(addprefix [,$(addsuffix ],$(subst $() ,$(comma),$(strip $(filter-out targets,$(EXTRAS))))))"
	@$(PY) -m compileall -qq -j 0 $(VENV)/lib || true  # on all cores; pip would use one. Some packages have files that are no Python
	@touch $@ $(if $(filter dev,$(EXTRAS)),$(VENV)/.installed-dev)

$(COMPILERS): constraints.txt | $(INSTALLED)
	@echo "Setting up the compilers for TPUs and GPUs in $(@D) (1.2 GB)"
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade -c constraints.txt \
	  --target $(@D) libtpu jax-cuda12-plugin jax-cuda12-pjrt
	@touch $@

$(TORCH)/.fetched: constraints.txt | $(PY)
	@echo "Setting up torch in $(@D) (PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu chooses the small build for CPUs)"
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade -c constraints.txt \
	  --target $(@D) torch mpmath networkx sympy
	@touch $@

$(TORCH)/.installed: $(TORCH)/.fetched | $(INSTALLED)
	@PYTHONPATH=$(@D) $(PY) -c "import torch"
	@touch $@

train: setup
	@$(PY) -m qkvflow.train_lm --config_path configs/quickstart.yaml $(ARGS)

sample: setup
	@$(PY) -m qkvflow.sample_lm --run runs/quickstart --prompt "The" $(ARGS)

test: setup
	@$(PYTEST) -m "not slow" $(ARGS)

test-slow: setup
	@$(PYTEST) -m slow $(ARGS)

torch: $(TORCH)/.installed

test-hub: torch
	@PYTHONPATH=$(TORCH) $(PY) -m pytest tests/hub -n 2 -m "not slow" $(ARGS)

lint: setup
	@$(VENV)/bin/ruff format --check . && $(VENV)/bin/ruff check . && $(VENV)/bin/codespell && $(VENV)/bin/pyright

check: lint
	@$(PYTEST) -m "not slow and not program" $(ARGS)

bench: setup
	@$(PY) -m experiments.bench $(ARGS)

targets: setup $(COMPILERS)
	@$(PY) -m experiments.bench.targets $(ARGS)

# strict: a warning fails. The variable silences an advertisement of mkdocs-material.
docs: setup
	@$(PY) -c "import material, mkdocstrings, latex2mathml" 2>/dev/null || $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --site-dir site $(ARGS)
	@echo "The site is in site/: open site/index.html"

dist: setup
	@$(PY) -m build --outdir dist .
