# make serve   start the server on NPROC ranks of DEVICE, by default 8 of the CPU (flags of the server in ARGS)
# make test    run the tests that need no GPU and no patience
# make lint    ruff, mypy, import contract
# make wheel-check   build the wheel, install it aside, import every module from it
#
# Each target makes .venv first if it is missing or older than pyproject.toml or a file in requirements/.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WHEEL_SITE := build/wheel-site
LOCK := requirements/lock.txt
TRITON := requirements/triton.txt

NPROC ?= 8
DEVICE ?= cpu
ARGS ?=
PYTEST_ARGS ?=
JOBS ?= 2

PACKAGES := kernels comm eplb launch moe_runtime
# Folders are listed too: their times tell when a file has gone.
SOURCES = $(shell find $(PACKAGES) -not -path '*/__pycache__*')

# One rank, one thread: more would change nothing but the speed of the machine's other ranks.
export OMP_NUM_THREADS := 1
# Hundreds of processes start in the tests; without bytecode on disk each would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE
# The folders comm/ and kernels/ must not be importable under those names (see CONTRIBUTING.md).
export PYTHONSAFEPATH := 1

.DEFAULT_GOAL := help
.PHONY: help venv serve test lint style types contract wheel wheel-check clean
.DELETE_ON_ERROR:

help:
	@sed -n '/^# make /s/^# //p' Makefile

# torchrun spells the number of ranks --nproc-per-node: a bare --nproc is ambiguous to it.
serve: $(STAMP)
	$(BIN)/torchrun --nproc-per-node $(NPROC) -m moe_runtime.serve --device $(DEVICE) $(ARGS)

test: $(STAMP)
	$(BIN)/pytest -n $(JOBS) --dist loadgroup -m "not slow and not gpu and not multigpu" $(PYTEST_ARGS)

lint: style types contract

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy and import-linter do not follow an editable install that maps folders to packages, so they read the wheel.
types: $(WHEEL_SITE)/.built
	cd $(WHEEL_SITE) && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p moe_runtime

contract: $(WHEEL_SITE)/.built
	cd $(WHEEL_SITE) && ../../$(BIN)/lint-imports ../../pyproject.toml --cache-dir ../../.import_linter_cache

wheel: $(WHEEL_SITE)/.built

wheel-check: $(WHEEL_SITE)/.built
	$(BIN)/python .ci/wheel_check.py dist $(WHEEL_SITE)

# build/lib would carry deleted files into the next wheel.
$(WHEEL_SITE)/.built: $(STAMP) $(SOURCES)
	rm -rf build/lib build/bdist.* $(WHEEL_SITE) dist
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .
	$(BIN)/pip install --quiet --no-deps --no-compile --target $(WHEEL_SITE) dist/*.whl
	touch $@

venv: $(STAMP)

$(STAMP): pyproject.toml $(LOCK) $(TRITON)
	sh requirements/make_venv.sh $(VENV) "$(PYTHON)"
	$(BIN)/pip install --quiet --disable-pip-version-check -r $(LOCK)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r $(TRITON)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	touch $@

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info
