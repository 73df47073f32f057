# Two commands for a fresh machine: `make demo` and `make test`. Each does all its own set-up.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready

.PHONY: demo test check site reference clean

demo: $(READY)
	$(VENV)/bin/paceline train mnist -n 2 name=demo resume=never
	$(VENV)/bin/paceline verify mnist --worlds 1,2,3,4

test: $(READY)
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/check

check: test

site: $(READY)  # the documentation, as pages in site/
	$(VENV)/bin/mkdocs build --strict

reference: $(READY)  # what in docs/ is made from the code
	$(VENV)/bin/python scripts/docs/reference.py

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt setuptools
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis runs site
