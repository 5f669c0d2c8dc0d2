# One command per thing; `make` alone lists them. Everything a command needs is set up first and kept for the next time:
# system packages (by apt when root, otherwise the exact command is printed), a virtual environment, the compiled module.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
export PYTHON
export TENSORIZER_WERROR := 1
# git trusts this checkout whoever owns it (scripts/trusted.sh).
GIT_SETTINGS := $(or $(GIT_CONFIG_COUNT),0)
export GIT_CONFIG_KEY_$(GIT_SETTINGS) := safe.directory
export GIT_CONFIG_VALUE_$(GIT_SETTINGS) := $(CURDIR)
export GIT_CONFIG_COUNT := $(shell expr $(GIT_SETTINGS) + 1)
VENV ?= .venv
# The CPU build, never gigabytes of CUDA libraries: from pip's configured index, else from TORCH_INDEX, PyTorch's own index of CPU
# builds. `make TORCH=torch==2.13.0` takes the default build of the configured index instead.
TORCH ?= $(shell cat requirements/constraints.txt)+cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
JOBS ?= $(shell nproc)
BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip -qq --disable-pip-version-check
CONSTRAINTS := --constraint requirements/constraints.txt --constraint requirements/constraints-dev.txt
CACHE := .cache

NATIVE_SOURCES := $(shell find csrc)
BUILD_INPUTS := setup.py pyproject.toml tensorizer/_version.py $(NATIVE_SOURCES)

# Commands stand below the last heading, "##@ Use", before them.
.PHONY: help
help:
	@awk -F ':.*  ## ' '/^##@ / { heading = substr($$0, 5); if (!(heading in text)) order[++count] = heading } \
	  /^[a-z0-9-]+:.*  ## / { text[heading] = text[heading] sprintf("  make %-16s%s\n", $$1, $$2) } \
	  END { for (n = 1; n <= count; n++) printf "%s%s:\n%s", n == 1 ? "" : "\n", order[n], text[order[n]] }' $(MAKEFILE_LIST)

##@ Use

.PHONY: system-build system-test system-native system-lint system-constant-time system-wheels system-wheels-all system-docs system-site
system-build system-test system-native system-lint system-constant-time system-wheels system-wheels-all system-docs system-site:
	@scripts/system-packages.sh $(@:system-%=%)

# A package manager may bring in the Python headers and `venv`, so it goes first; order-only, so that it never rebuilds.
$(VENV)/stamp-torch: requirements/constraints.txt | system-build
	@echo "== virtual environment $(VENV) with $(TORCH)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --upgrade pip setuptools wheel ninja
	@TORCH_INDEX="$(TORCH_INDEX)" scripts/install-torch.sh $(BIN)/python "$(TORCH)"
	@touch $@

$(VENV)/stamp-dev: requirements/dev.txt requirements/constraints-dev.txt $(VENV)/stamp-torch
	@echo "== development packages"
	@$(PIP) install $(CONSTRAINTS) --requirement requirements/dev.txt
	@touch $@

.PHONY: environment
environment: $(VENV)/stamp-dev  ## the virtual environment with all that developers need, nothing compiled

# The first build is the editable install; later ones compile in place, where ninja keeps what did not change.
$(VENV)/stamp-build: $(BUILD_INPUTS) $(VENV)/stamp-torch
	@echo "== building tensorizer._C"
	@mkdir -p build
	@if test -e $@; then MAX_JOBS=$(JOBS) $(BIN)/python setup.py --quiet build_ext --inplace >build/build.log 2>&1 \
	  || { grep -vE '^\[[0-9]+/[0-9]+\]' build/build.log; exit 1; }; \
	else MAX_JOBS=$(JOBS) $(PIP) install --no-build-isolation --constraint requirements/constraints.txt --editable .; fi
	@touch $@

.PHONY: build
build: $(VENV)/stamp-build  ## the virtual environment with the compiled module

MODEL ?=
.PHONY: demo say-how-long
say-how-long:
	@test -e $(VENV)/stamp-build || echo "== first run: setting up takes some minutes" \
	  "(system packages, 200 MB of torch, then the compiler); later runs start at once"

demo: say-how-long $(VENV)/stamp-build  ## a real network written, loaded back and used (MODEL=path: your own)
	@$(if $(MODEL),$(PIP) install --constraint requirements/constraints.txt safetensors)
	@$(BIN)/python examples/demo.py --cache $(CACHE)/demo $(if $(MODEL),--model "$(MODEL)")

##@ Test

PYTEST_ARGS ?=
# A third of their time the tests wait, for time-outs and for servers.
WORKERS := $(shell expr $(JOBS) + $(JOBS) / 2)
.PHONY: test test-slow test-all
test: system-test $(VENV)/stamp-dev $(VENV)/stamp-build  ## the Python tests (PYTEST_ARGS='-k name')
	$(BIN)/python -m pytest -q --durations=20 -n $(WORKERS) --dist loadgroup --timeout 300 -m "not slow" $(PYTEST_ARGS)

test-slow: system-test $(VENV)/stamp-dev $(VENV)/stamp-build  ## the tests that take more than a few seconds
	$(BIN)/python -m pytest -q --durations=20 -n $(WORKERS) --dist loadgroup --timeout 600 -m slow $(PYTEST_ARGS)

test-all: export TENSORIZER_REQUIRE_SERVERS := 1
test-all: test test-slow site-check  ## all tests, the slow ones and the site too; a missing server is an error

##@ Package

TOOLS := $(CACHE)/packaging/tools
$(TOOLS)/stamp: requirements/packaging.txt | system-build
	@$(PYTHON) -m venv --clear $(TOOLS)
	@$(TOOLS)/bin/python -m pip -qq --disable-pip-version-check install --no-deps --require-hashes --only-binary :all: -r $<
	@touch $@

# Without names, every Python that is here (PYTHONS='3.11 3.13').
PYTHONS ?=
NOX = TORCH_INDEX="$(TORCH_INDEX)" $(BIN)/nox --noxfile scripts/noxfile.py --reuse-existing-virtualenvs --no-error-on-missing-interpreters $(if $(PYTHONS),--python $(PYTHONS))
.PHONY: wheel wheels wheels-again wheel-test aarch64-wheel rehearse matrix
wheel: system-wheels $(VENV)/stamp-torch $(TOOLS)/stamp  ## a wheel that needs no library, for this Python, in dist/
	$(TOOLS)/bin/python scripts/packaging/build_wheel.py --out dist --jobs $(JOBS) $(BIN)/python

# cibuildwheel builds for this machine's processor alone.
wheels: system-wheels-all $(VENV)/stamp-dev $(TOOLS)/stamp  ## for every Python, x86-64 and aarch64: by cibuildwheel where docker or podman runs, else for those here
	@machines="$(filter-out $(shell uname -m),x86_64 aarch64)"; \
	if docker info >/dev/null 2>&1 || podman info >/dev/null 2>&1; then PATH="$(abspath $(BIN)):$$PATH" scripts/packaging/ci_wheels.sh dist; \
	else echo "== no docker or podman runs here: the same steps with the Pythons of this machine"; machines="$$(uname -m) $$machines"; fi; \
	$(NOX) --session wheel -- --jobs $(JOBS) $$(printf -- '--machine %s ' $$machines)

wheels-again: system-wheels $(VENV)/stamp-torch $(TOOLS)/stamp  ## build the wheel of this Python again, elsewhere: are all bytes equal?
	TOOLS=$(TOOLS)/bin/python scripts/packaging/build_again.sh dist $(BIN)/python

.PHONY: sdist
sdist: $(VENV)/stamp-torch  ## the source distribution, in dist/
	$(BIN)/python scripts/packaging/build_sdist.py --out dist

WHEEL_TEST_ARGS ?=
wheel-test: system-test $(VENV)/stamp-dev  ## the wheels of dist/, each in a clean environment (WHEEL_TEST_ARGS=--suite: with all tests)
	$(NOX) --session wheel_test $(if $(WHEEL_TEST_ARGS),-- $(WHEEL_TEST_ARGS))

aarch64-wheel:  ## the wheel of dist/ for Python 3.11 on aarch64, used with qemu-user (wants root)
	scripts/aarch64.sh wheel dist

rehearse: $(VENV)/stamp-torch  ## what publishing the wheels of dist/ would do, on this machine alone (needs a package index)
	PYTHON=$(BIN)/python scripts/packaging/rehearse.sh dist

MATRIX_ARGS ?= --tags oldest newest
matrix: system-test $(VENV)/stamp-dev  ## build and test with every Python that is here (MATRIX_ARGS='--tags between')
	$(NOX) --session matrix $(MATRIX_ARGS)

##@ Use

CASES ?=
CONTENDERS ?=
SIZE ?= 2GB
RUNS ?= 5
BENCH_ARGS ?=
$(VENV)/stamp-bench: requirements/benchmarks.txt $(VENV)/stamp-torch
	@$(PIP) install --constraint requirements/constraints.txt --requirement requirements/benchmarks.txt
	@touch $@

.PHONY: bench
bench: $(VENV)/stamp-build $(VENV)/stamp-bench  ## measure against the others (CASES='load-hot save-tmpfs' SIZE=2GB RUNS=5)
	$(BIN)/python -m benchmarks --size $(SIZE) --runs $(RUNS) $(if $(CASES),--cases $(CASES)) \
	  $(if $(CONTENDERS),--contenders $(CONTENDERS)) $(BENCH_ARGS)

include scripts/gpu.mk

##@ Test

# In a recipe, so that a git that fails ends it.
CXX_FILES := git ls-files --cached --others --exclude-standard 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'tests/native/*.h' 'tests/native/*.cpp' 'benchmarks/*.cpp'

.PHONY: lint format types
lint: system-lint $(VENV)/stamp-dev  ## ruff, codespell, zizmor, clang-format, mypy --strict, docs/cli.md, clang-tidy (TIDY_FOLDERS='core format')
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo codespell
	@files=$$(git ls-files --cached --others --exclude-standard); $(BIN)/codespell $$files
	@echo zizmor
	@$(BIN)/zizmor --quiet --offline .github
	@echo clang-format --dry-run -Werror
	@files=$$($(CXX_FILES)); [ -z "$$files" ] || $(BIN)/clang-format --dry-run -Werror $$files
	$(BIN)/mypy --strict
	$(BIN)/python scripts/cli_reference.py --check
	@CLANG_TIDY=$(BIN)/clang-tidy JOBS=$(JOBS) scripts/tidy.sh $(TIDY_FOLDERS)

format: system-lint $(VENV)/stamp-dev  ## rewrite Python and C++ in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	@echo clang-format -i
	@files=$$($(CXX_FILES)); [ -z "$$files" ] || $(BIN)/clang-format -i $$files

# C++ without Python.

# ccache leaves files with precompiled headers alone otherwise.
export CCACHE_SLOPPINESS := pch_defines,time_macros
NATIVE_ARGS ?=
FUZZ_SECONDS ?= 8

.PHONY: native native-build native-plain native-asan native-tsan fuzz aarch64
native: native-asan native-tsan  ## the C++ tests with ASan+UBSan and with TSan (NATIVE_ARGS=--gtest_filter=...)

native-build: system-native  ## compile those for ASan+UBSan, run none
	@JOBS=$(JOBS) scripts/native.sh native-asan native_tests

native-plain native-asan native-tsan: system-native
	@echo "== C++ tests: $@"
	@JOBS=$(JOBS) scripts/native.sh $@ native_tests
	@JOBS=$(JOBS) scripts/sharded.sh build/$@/native_tests --gtest_brief=1 $(NATIVE_ARGS)

aarch64:  ## the C++ tests compiled for aarch64 and run with qemu-user (wants root; NATIVE_ARGS)
	@JOBS=$(JOBS) scripts/aarch64.sh tests $(NATIVE_ARGS)

fuzz: system-native  ## every fuzz target for FUZZ_SECONDS each
	@FUZZ_SECONDS=$(FUZZ_SECONDS) JOBS=$(JOBS) scripts/fuzz.sh

.PHONY: constant-time
constant-time: system-constant-time  ## no branch or address of the cipher depends on a secret (MemorySanitizer, valgrind)
	@JOBS=$(JOBS) scripts/constant_time.sh

# Pages are made from the sources as text: this environment has neither torch nor the compiled module.
DOCS := $(CACHE)/docs
$(DOCS)/stamp: requirements/docs.txt requirements/constraints-dev.txt | system-docs
	@$(PYTHON) -m venv --clear $(DOCS)
	@$(DOCS)/bin/python -m pip -qq --disable-pip-version-check install --constraint requirements/constraints-dev.txt --requirement requirements/docs.txt
	@touch $@

.PHONY: docs
docs: $(DOCS)/stamp  ## the documentation site in site/, warnings are errors (needs neither torch nor a compiler)
	scripts/site/build.sh $(DOCS)/bin/zensical site

.PHONY: site-check
site-check: export TENSORIZER_SITE := site
site-check: docs system-site $(VENV)/stamp-dev  ## build the site; links lead somewhere, and no page scrolls sideways in Chromium
	$(BIN)/python -m pytest -q tests/repository/test_site.py

##@ Use

.PHONY: clean distclean
clean:  ## remove what was built, keep the virtual environment and downloads
	rm -rf build dist site *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache benchmarks/out $(VENV)/stamp-build
	find tensorizer -name '*.so' -delete
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean  ## remove everything that is not in the repository
	rm -rf $(VENV) .venv-* .nox $(CACHE)
