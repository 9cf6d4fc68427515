# Every target sets up what it needs in $(VENV). When that is up to date, no installer runs.
#   make PYTHON=python3.12 demo     uses another interpreter
#   make WORKERS=8 test             runs the tests in 8 processes (the default is 2)

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable
INPUTS := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo lab book pictures lint test test-all test-gpu format clean

help:  ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.ready-notebooks  ## run the start notebook; print its result table and where the page is
	@$(BIN)/python -m oproj_lib demo

lab: $(VENV)/.ready-notebooks  ## open JupyterLab in notebooks/ (this computer only, behind its token)
	@JUPYTER_PREFER_ENV_PATH=1 PYTHONUNBUFFERED=1 $(BIN)/jupyter lab --ip=127.0.0.1 --notebook-dir=notebooks $(if $(filter 0,$(shell id -u)),--allow-root)

book: $(VENV)/.ready-notebooks  ## run every notebook and build the HTML book
	@$(BIN)/python -m oproj_lib book

lint: $(VENV)/.ready-test  ## format, lint, types, notebooks without outputs; changes nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	find notebooks -name '*.ipynb' -not -path '*/.*' -print0 | xargs -0 -r $(BIN)/nbstripout --keep-id --verify

test: lint  ## lint, then the suite; a skipped test is a failure
	$(BIN)/python -m pytest --no-skips -n $(WORKERS) --dist loadgroup -m "not exhaustive and not gpu"

test-all: lint  ## the same over every configuration (an hour or more)
	$(BIN)/python -m pytest --no-skips -n $(WORKERS) --dist loadgroup -m "not gpu"

test-gpu: $(VENV)/.ready-test  ## the tests that need a Hopper GPU, and nothing else
	$(BIN)/python -m pytest --no-skips -m gpu

pictures: $(VENV)/.ready-notebooks  ## draw the README's picture again
	@$(BIN)/python -m oproj_lib.figures

format: $(VENV)/.ready-test  ## format the code, strip the notebooks' outputs
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	find notebooks -name '*.ipynb' -not -path '*/.*' -print0 | xargs -0 -r $(BIN)/nbstripout --keep-id

clean:  ## remove what make built
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find oproj_lib tests notebooks \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +

# ---- set-up ----------------------------------------------------------------------------------------------------

$(VENV)/.python:
	@command -v $(PYTHON) >/dev/null || { echo "make: there is no '$(PYTHON)' here. Install Python 3.11 or newer, or name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: Python 3.11 or newer is needed, and '$(PYTHON)' is $$($(PYTHON) -c 'import platform; print(platform.python_version())'). Name another: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "make: '$(PYTHON)' cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# The demo and the notebooks need no torch, so they do not wait for its download.
$(VENV)/.ready-notebooks: $(INPUTS) | $(VENV)/.python
	@echo "Setting up $(VENV) for the notebooks (a minute or two, once) ..."
	@$(INSTALL) '.[notebooks]'
	@touch $@

$(VENV)/.ready-test: $(INPUTS) | $(VENV)/.python
	@echo "Setting up $(VENV) for the notebooks and the tests, torch included (a few minutes, once) ..."
	@$(INSTALL) '.[notebooks,test]'
	@touch $@ $(VENV)/.ready-notebooks
