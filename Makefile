# Each target does its own set-up: a fresh clone needs nothing but make, bash and Python 3.11 to 3.13.
.DEFAULT_GOAL := help
.PHONY: help core setup demo test test-all test-xla check check-types check-house format bench structure exam real docs lock

PY := .venv/bin/python
WORKERS ?= 2
# Files stay whole, and the longest begin first (tests/conftest.py).
SPREAD := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# One thread a process: the tests run in WORKERS processes, and a fixed count keeps sums the same to the bit.
test test-all check check-house docs: export OMP_NUM_THREADS := 1
# Rewritten tests and shape-checked modules are kept, also where the environment keeps no bytecode: half of the start.
test test-all check check-house: export PYTHONDONTWRITEBYTECODE :=

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' Makefile | awk -F'|' '{ printf "%-13s %s\n", $$1, $$2 }'

core:
	@scripts/setup core

setup:  ## install octjepa with its development tools into .venv (silent when nothing is to do)
	@scripts/setup

demo: core  ## synthetic eyes as DICOM -> ingest -> pretrain -> embed -> probe -> one HTML page (ARGS="--out DIR")
	@.venv/bin/octjepa demo $(ARGS)

test: setup  ## run the quick tests, of about a second each at most (ARGS="-k name" for some of them)
	@$(PY) -m pytest $(SPREAD) --ignore=tests/house -m "not slow" $(ARGS)

test-all: setup  ## run every test, the slow ones too; CI runs this after `make check`
	@$(PY) -m pytest $(SPREAD) --ignore=tests/house $(ARGS)

test-xla:  ## the training update by torch_xla, on its CPU device, in .venv-xla of its own (2.7 GB; docs/launch.md)
	@scripts/environments/setup-xla
	@PJRT_DEVICE=CPU TPU_SKIP_MDS_QUERY=1 OMP_NUM_THREADS=1 \
	  XLA_FLAGS="--xla_llvm_disable_expensive_passes=true --xla_backend_optimization_level=0" \
	  .venv-xla/bin/python -m pytest tests/xla $(ARGS)

check: setup  ## what has to be clean before a commit: format, lint, types, import contract, words, docs
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .
	@$(MAKE) --no-print-directory -j 2 check-types check-house

# The two parts of `check` that take longest, side by side: types and imports need one core only.
check-types: setup
	@$(PY) -m mypy
	@.venv/bin/lint-imports

check-house: setup
	@$(PY) -m pytest -q $(SPREAD) tests/house

format: setup  ## rewrite the sources in the project's format and apply the safe lint fixes
	@.venv/bin/ruff check --fix --quiet . || true
	@.venv/bin/ruff format .

docs: export NO_MKDOCS_2_WARNING := 1
docs: setup  ## check the documentation, build it as a site for reading offline (build/site), check the site's links
	@$(PY) -m pytest -q tests/house/test_docs.py tests/house/test_capabilities.py
	@$(PY) -m mkdocs build --quiet --clean
	@$(PY) scripts/site/check.py build/site

bench: setup  ## list the benchmarks; run one (ARGS="precision")
	@$(PY) -m benchmarks $(ARGS)

structure: setup  ## compute how easy the code is to take over, and write the table in CONTRIBUTING.md
	@$(PY) benchmarks/structure.py --write $(ARGS)

exam: setup  ## go on with the exam of encoders in docs/exam (ARGS="--list")
	@$(PY) -m benchmarks.exam $(ARGS)

real: setup  ## score layers, fluid and thickness on real eyes in ../shared, write docs/real (ARGS="--weights DIR")
	@$(PY) -m benchmarks.real_eyes $(ARGS)

lock: setup  ## choose the newest versions that fit pyproject.toml and pin them in constraints.txt
	@scripts/lock
