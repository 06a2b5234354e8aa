# Everything a user or a contributor runs. Each target makes the environment it needs:
#   .venv-demo  edgecc installed the way a user installs it, core dependencies only
#   .venv-test  edgecc installed editable, with the development tools
# An environment is made again when pyproject.toml changes, and by every `make test` and `make demo`
# when CI=true. PYTHON chooses the interpreter: make test PYTHON=python3.12

PYTHON ?= python3
ARGS   ?=

DEMO := .venv-demo
DEV  := .venv-test
BIN  := $(DEV)/bin

TARGET := tests/data/pairs/tiny-qwen3-nvfp4
DRAFT  := tests/data/pairs/tiny-qwen3-dspark
BUNDLE := build/demo-bundle

# The theme announces its own future on every build.
export NO_MKDOCS_2_WARNING := 1

SOURCES := $(shell find compiler passes frontends backends -name '*.py' -o -name '*.json')

# Only `test` and `demo` start over in CI; `check` then uses the environment that `test` made.
ifeq ($(CI),true)
FRESH := $(if $(filter test demo,$(MAKECMDGOALS)),FORCE)
endif

.DEFAULT_GOAL := help
.PHONY: help demo test check docs install dist bench clean FORCE

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(DEMO)/.installed ## compile the small pair in tests/data and generate with it
	$(DEMO)/bin/edgecc compile $(TARGET) --draft $(DRAFT) -o $(BUNDLE) --force
	$(DEMO)/bin/edgecc run $(BUNDLE) --prompt "def fibonacci(n):" --max-new-tokens 64 --stats

test: $(DEV)/.installed ## run the test suite (ARGS="-m slow" and the like go to pytest)
	$(BIN)/pytest -q -n auto $(ARGS)

check: $(DEV)/.installed ## lint, format, types, import contracts, docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/mkdocs build --strict --quiet --site-dir build/site

docs: $(DEV)/.installed ## build the documentation into site/
	$(BIN)/mkdocs build --strict

install: $(DEV)/.installed ## make the development environment, with git hooks
	$(BIN)/pre-commit install
	@echo "Now run: source $(BIN)/activate"

# A module deleted from the sources would still be shipped from an old build/lib.
dist: $(DEV)/.installed ## build dist/: the sdist, and the wheel from that sdist
	rm -rf build/lib build/bdist.* dist
	$(BIN)/python -m build --quiet

bench: $(DEV)/.installed ## measure (ARGS="--large" adds a pair of the Qwen3-0.6B shape)
	$(BIN)/python -m benchmarks $(ARGS)

clean: ## remove everything that was built, environments included
	rm -rf build dist site compiler/*.egg-info $(DEMO) $(DEV)
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find compiler passes frontends backends tests -name __pycache__ -type d -prune -exec rm -rf {} +

# --- environments -----------------------------------------------------------------------------

define new_venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "edgecc needs Python 3.11 or newer; choose one with PYTHON=..." >&2; exit 1; }
rm -rf $(1)
$(PYTHON) -m venv $(1)
endef

$(DEV)/.installed: pyproject.toml $(FRESH)
	$(call new_venv,$(DEV))
	$(BIN)/pip install --quiet -e '.[dev]'
	@touch $@

$(DEMO)/.venv: pyproject.toml $(FRESH)
	$(call new_venv,$(DEMO))
	@touch $@

# Runs again when sources change: pip then replaces edgecc and keeps its dependencies.
$(DEMO)/.installed: $(DEMO)/.venv $(SOURCES)
	rm -rf build/lib build/bdist.*
	$(DEMO)/bin/pip install --quiet .
	@touch $@

FORCE:
