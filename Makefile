# Two commands for a fresh machine: `make demo` and `make test`. Each does all its own set-up.
# `make quick` is for the inner loop: format, lint, types, doctests and the tests that start no process.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/.run
DEV := $(VENV)/.dev
# Packages are compiled afterwards, on all cores; pip would use one.
INSTALL := $(VENV)/bin/python -m pip install --quiet --no-compile --constraint constraints.txt
COMPILE := $(VENV)/bin/python -m compileall -qq -j 0 $(VENV)/lib/python*/site-packages || true
IN_VENV := PATH="$(CURDIR)/$(VENV)/bin:$$PATH"

# What runs on a GPU; name another environment that has torch and Paceline: make gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(VENV)/bin/python
# pytest-benchmark, where it is installed, ends in an internal error under -n.
GPU_TESTS = $(GPU_PYTHON) -m pytest -q -m gpu --dist load -p no:benchmark
GPU_DEV := $(if $(filter $(VENV)/bin/python,$(GPU_PYTHON)),$(DEV))

.PHONY: demo test test-all quick check gpu gpu-all gpu-tests gpu-models site reference clean

demo: $(RUN)
	$(VENV)/bin/paceline train mnist -n 2 name=demo resume=never
	$(VENV)/bin/paceline verify --worlds 1,2,3,4 mnist

test: $(DEV)
	$(IN_VENV) scripts/check

test-all: $(DEV)  # with every page, every lesson and the long loops; takes an hour on two cores
	$(IN_VENV) PACELINE_HEAVY=1 scripts/check

quick: $(DEV)
	$(IN_VENV) scripts/check --quick

check: test

gpu: $(GPU_DEV)  # every two choices of a training meet in a line, on one card; the table is in gpu-table/
	scripts/with_mps $(GPU_PYTHON) scripts/model_table.py --device cuda --pairs -j 8 --to gpu-table

gpu-all: gpu gpu-tests gpu-models  # each part alone as well

gpu-tests: $(GPU_DEV)  # those in the second line kill ranks
	scripts/with_mps $(GPU_TESTS) -n 8 tests/train tests/kernels tests/measure tests/telemetry tests/verify
	$(GPU_TESTS) -n 4 tests/hang tests/survive

gpu-models: $(GPU_DEV)
	scripts/with_mps $(GPU_PYTHON) scripts/model_table.py --device cuda -j 8 --to gpu-table/models

site: $(DEV)  # the documentation, as pages in site/
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

reference: $(DEV)  # the pages of docs/ that are generated from the code
	$(VENV)/bin/python scripts/docs/reference.py

$(RUN): pyproject.toml constraints.txt  # what a training needs: torch and eight packages
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: Paceline needs Python 3.11 or newer; $$($(PYTHON) --version 2>&1) is too old" >&2; \
	  echo "  fix: name a newer one, such as: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) setuptools
	$(INSTALL) torch==2.13.0
	$(INSTALL) --no-build-isolation --editable .
	$(COMPILE)  # some files are for other Pythons
	touch $(RUN)

$(DEV): $(RUN)  # what the tests need as well
	$(INSTALL) --no-build-isolation --editable '.[dev]'
	$(COMPILE)
	touch $(DEV)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis runs site
