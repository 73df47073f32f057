# Two commands for a fresh machine: `make demo` and `make test`. Each does all its own set-up (pip
# would compile on one core).
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready
INSTALL := $(VENV)/bin/python -m pip install --quiet --no-compile --constraint constraints.txt

.PHONY: demo test check site reference clean

demo: $(READY)
	$(VENV)/bin/paceline train mnist -n 2 name=demo resume=never
	$(VENV)/bin/paceline verify mnist --worlds 1,2,3,4

test: $(READY)
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/check

check: test

site: $(READY)  # the documentation, as pages in site/
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

reference: $(READY)  # what in docs/ is made from the code
	$(VENV)/bin/python scripts/docs/reference.py

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) setuptools
	$(INSTALL) torch==2.13.0
	$(INSTALL) --no-build-isolation --editable '.[dev]'
	$(VENV)/bin/python -m compileall -qq -j 0 $(VENV)/lib/python*/site-packages || true  # some are for other Pythons
	touch $(READY)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis runs site
