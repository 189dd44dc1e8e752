# Each target makes .venv and installs into it when needed; none needs another first.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: demo test drills check fix bench clean

demo: $(INSTALLED)  ## install, make the embedded data set, train on it, evaluate
	$(BIN)/fortyfold train smoke

test: $(INSTALLED)  ## every test
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

drills: $(INSTALLED)  ## the tests that `make test` leaves out since they take minutes each
	FORTYFOLD_REQUIRE=$(FORTYFOLD_REQUIRE),drills $(BIN)/python -m pytest -m drill --numprocesses 2 --dist loadfile

check: $(INSTALLED)  ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: $(INSTALLED)  ## format, and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(INSTALLED)  ## every benchmark; the figures go to benchmarks/README.md by hand
	failed=0; for script in benchmarks/*.py; do $(BIN)/python $$script || failed=1; done; exit $$failed

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis src/fortyfold.egg-info src/fortyfold/data/_native*.so

$(INSTALLED): pyproject.toml setup.py constraints.txt $(wildcard native/*)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fortyfold needs Python 3.11 or newer; try: make PYTHON=python3.11 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@
