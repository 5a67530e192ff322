# SPDX-License-Identifier: Apache-2.0
# Everything a fresh machine needs: Python >= 3.10, a C++20 compiler and make. Tools, PyTorch and, where
# there is no nvcc >= 13, NVIDIA's compiler come from PyPI into .venv.
#
#   make demo            install into .venv and run one model walk on the best backend of this machine
#   make test            lint, C++ tests, also sanitized, Python tests, consumer projects
#   make check-sanitized C++ tests and fuzz corpus with address and undefined-behaviour sanitizers
#   make fuzz            run each fuzzer for FUZZ_SECONDS; needs Clang with libFuzzer
#   make mutations       take defences away one by one, and see that a test fails each time
#   make release-check VERSION=1.2.3   every step of a release up to the upload, and what is missing
#   make sanitize        compute-sanitizer over the kernels' tests; needs a GPU and the CUDA toolkit
#   make check-gpu certify   the tests that need a GPU, and a report on it
#   make docs            the documentation as a site in build/site
#   make TARGETS=90a ... compile the kernels for fewer GPUs than the default, for quick developer builds
#   make CUDA=OFF ...    no kernels at all

PYTHON ?= python3
TARGETS ?= 90a;100a;103a
CUDA ?= ON
# Without a GPU, the CPU build of PyTorch is enough and much smaller.
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),,https://download.pytorch.org/whl/cpu)
PYTEST_ARGS ?= -n auto

VENV := .venv
BIN := $(VENV)/bin
# Build tools of the virtual environment come before those of the machine.
export PATH := $(CURDIR)/$(BIN):$(PATH)
ifneq ($(shell command -v ccache),)
export CMAKE_CXX_COMPILER_LAUNCHER ?= ccache
export CMAKE_CUDA_COMPILER_LAUNCHER ?= ccache
export CCACHE_BASEDIR ?= $(CURDIR)
endif
export ATTNRES_CUDA := $(CUDA)
export ATTNRES_CUDA_TARGETS := $(TARGETS)

TOOLS := $(VENV)/.tools
INSTALLED := $(VENV)/.installed-$(if $(filter ON,$(CUDA)),$(subst ;,-,$(TARGETS)),host)
SOURCES := CMakeLists.txt LICENSE README.md pyproject.toml \
  $(shell find cpp cuda python tests/cpp tests/fuzz -type f -not -name '*.pyc')
CXX_FILES = $(shell find cpp cuda examples tests -name '*.[ch]' -o -name '*.[ch]pp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.inl')
# Those that a build without CUDA compiles.
TIDY_FILES = $(filter-out $(addprefix cpp/src/,device%.cpp plan.cpp %registry.cpp),$(wildcard cpp/src/*.cpp))
CMAKE_FILES = CMakeLists.txt $(shell find cpp examples tests -name CMakeLists.txt -o -name '*.cmake') cuda/CMakeLists.txt

.PHONY: all install demo test lint tidy format check-cpp check-python check-sanitized fuzz mutations sanitize audit docs \
  check-gpu certify check-consumers wheel sdist wheels check-dist check-wheel release-agree release-check lock clean
.DELETE_ON_ERROR:
# The compilers are parallel by themselves, and the summary of pytest comes last.
.NOTPARALLEL:

all: install
install: $(INSTALLED)

$(TOOLS): pyproject.toml cpp/cmake/build_backend.py cpp/cmake/find_nvcc.py
	$(PYTHON) -c 'import sys; sys.exit("libattnres needs Python >= 3.10" if sys.version_info < (3, 10) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	# Only PyTorch is looked up in its index; where that cannot be reached, the next line takes it from PyPI.
	$(if $(TORCH_INDEX),$(BIN)/python -m pip install --quiet --no-deps --retries 0 --timeout 10 \
	  --extra-index-url $(TORCH_INDEX) --group torch || true)
	$(BIN)/python -m pip install --quiet --group dev
	$(BIN)/python cpp/cmake/build_backend.py > $(VENV)/build-requirements.txt
	$(BIN)/python -m pip install --quiet -r $(VENV)/build-requirements.txt
	touch $@

# Without isolation the build tree stays valid, so that an unchanged kernel is not compiled again.
$(INSTALLED): $(TOOLS) $(SOURCES)
	rm -rf build/installed $(VENV)/.installed-*
	$(BIN)/python -m pip wheel . --no-deps --no-build-isolation --wheel-dir build/installed -v \
	  --config-settings=cmake.define.ATTNRES_BUILD_TESTS=ON
	$(BIN)/python -m pip install --quiet --force-reinstall --no-deps build/installed/libattnres-*.whl
	touch $@

demo: $(INSTALLED)
	$(BIN)/libattnres demo

test: lint check-cpp check-sanitized check-python

lint: $(TOOLS)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/gersemi --quiet --check $(CMAKE_FILES)
ifneq ($(wildcard .github),)
	$(BIN)/zizmor --quiet --offline .github
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
endif

# Slower than lint, hence by itself: static analysis of the host code.
tidy: $(TOOLS)
	$(BIN)/cmake --preset host -DATTNRES_BUILD_TESTS=OFF
	$(BIN)/clang-tidy --quiet -p build/host $(TIDY_FILES)

format: $(TOOLS)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CXX_FILES)
	$(BIN)/gersemi --quiet --in-place $(CMAKE_FILES)

check-cpp: $(INSTALLED)
	$(BIN)/ctest --test-dir build/$$($(BIN)/python -c 'from packaging.tags import sys_tags; print(next(sys_tags()))') \
	  --no-tests=error --output-on-failure

check-python: $(INSTALLED)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# The host side under the compiler's sanitizers; tests with threads in them take a while.
check-sanitized: $(TOOLS)
	$(BIN)/cmake --preset sanitize
	$(BIN)/cmake --build --preset sanitize
	$(BIN)/ctest --preset sanitize

FUZZ_CXX ?= $(firstword $(foreach name,clang++ clang++-21 clang++-20 clang++-19 clang++-18,$(shell command -v $(name))))
FUZZ_SECONDS ?= 600
# New inputs stay in build/fuzz; a finding is written there as crash-*.
fuzz: $(TOOLS)
	$(if $(FUZZ_CXX),,$(error fuzz needs Clang with libFuzzer; name it with FUZZ_CXX=...))
	$(BIN)/cmake --preset fuzz -DCMAKE_CXX_COMPILER=$(FUZZ_CXX)
	$(BIN)/cmake --build --preset fuzz
	for name in $(notdir $(wildcard tests/fuzz/corpus/*)); do \
	  mkdir -p build/fuzz/corpus/$$name && \
	  build/fuzz/tests/fuzz/fuzz_$$name -max_total_time=$(FUZZ_SECONDS) -max_len=4096 -print_final_stats=1 \
	    -artifact_prefix=build/fuzz/ $$(test ! -f tests/fuzz/$$name.dict || echo -dict=tests/fuzz/$$name.dict) \
	    build/fuzz/corpus/$$name tests/fuzz/corpus/$$name || exit 1; \
	done

# Each in a copy of the tree; those that need a GPU or nvcc are left out where there is none.
mutations: $(INSTALLED)
	$(BIN)/python tests/mutations/run.py --output build/mutations.json

# compute-sanitizer over the kernels' tests; needs a GPU and the CUDA toolkit.
sanitize: $(INSTALLED)
	$(BIN)/python tests/sanitize.py

# The machine code of every kernel against the rules that it must keep; needs no GPU.
audit: $(INSTALLED)
	$(BIN)/libattnres permutations --audit

# What a GPU says: the tests that need one, and a report on verify, races, bench, walk and tune.
check-gpu: $(INSTALLED)
	$(BIN)/python -m pytest -m gpu

CERTIFICATE ?= build/certificate
certify: $(INSTALLED)
	$(BIN)/libattnres certify $(if $(QUICK),--quick) --output "$(CERTIFICATE)"

check-consumers: $(INSTALLED)
	$(BIN)/python -m pytest $(PYTEST_ARGS) tests/python/test_consumer.py

# The site in build/site, its links checked. Docstrings are read from a build without kernels of its own.
docs: $(TOOLS)
	$(BIN)/python -m pip install --quiet --group docs
	$(BIN)/python -m pip install --quiet . --no-deps --no-build-isolation --upgrade --target build/docs/package \
	  --config-settings=cmake.define.ATTNRES_CUDA=OFF --config-settings=build-dir=build/docs/cmake
	PYTHONPATH=build/docs/package $(BIN)/python docs/site/build.py build/site

# A wheel for $(PYTHON) as a user's pip builds it, in an isolated environment.
wheel:
	$(PYTHON) -m pip wheel . --no-deps --wheel-dir dist

# What follows makes and checks what is uploaded, with nothing but tools whose hashes are known.
RELEASE_BIN := build/release-tools/bin
$(RELEASE_BIN)/.ready: release/tools-requirements.txt
	$(PYTHON) -m venv --clear build/release-tools
	$(RELEASE_BIN)/python -m pip install --quiet --require-hashes -r $<
	touch $@

# Files of two builds are equal: their time stamps are those of the commit.
sdist wheels release-check: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct)

sdist: $(RELEASE_BIN)/.ready
	rm -f dist/libattnres-*.tar.gz
	$(RELEASE_BIN)/python -m build --sdist --no-isolation --outdir dist

# Of the source distribution, for every Python and the architecture of this machine; needs Docker.
wheels: $(RELEASE_BIN)/.ready
	ls dist/libattnres-*.tar.gz || $(MAKE) sdist
	$(RELEASE_BIN)/cibuildwheel --output-dir dist dist/libattnres-*.tar.gz

check-dist: $(RELEASE_BIN)/.ready
	$(RELEASE_BIN)/twine check --strict dist/*
	$(RELEASE_BIN)/python release/check_dist.py dist/*

# The wheel of dist for $(PYTHON) in a clean environment, beside a PyTorch of another version.
TORCH ?= 2.13.0
WHEEL ?= dist/libattnres-*-$(shell $(PYTHON) -c 'import sys; print("cp%d%d" % sys.version_info[:2])')-*.whl
SMOKE_TESTS ?= $(addprefix tests/python/test_,api_semantics.py cli.py import.py packaging.py torch_backend.py)
CLEAN := build/clean-$(TORCH)
check-wheel:
	$(PYTHON) -m venv --clear $(CLEAN)
	$(CLEAN)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(if $(TORCH_INDEX),$(CLEAN)/bin/python -m pip install --quiet --no-deps --retries 0 --timeout 10 \
	  --extra-index-url $(TORCH_INDEX) torch==$(TORCH) || true)
	$(CLEAN)/bin/python -m pip install --quiet torch==$(TORCH)
	$(CLEAN)/bin/python -m pip install --quiet --group smoke
	$(CLEAN)/bin/python -m pip install --quiet --no-deps $(WHEEL)
	$(CLEAN)/bin/python -m pip check
	$(CLEAN)/bin/python -m pytest $(PYTEST_ARGS) $(SMOKE_TESTS)

# Version, changelog and tag: what a release needs before anything is built.
release-agree:
	$(PYTHON) release/release_check.py $(VERSION) --agree

# FULL=1 builds with kernels; DIST=dist checks what was built elsewhere; PYTHONS names the interpreters.
release-check: $(RELEASE_BIN)/.ready
	$(if $(VERSION),,$(error release-check: expected VERSION=x.y.z))
	$(RELEASE_BIN)/python release/release_check.py $(VERSION) $(if $(FULL),--full) \
	  $(if $(DIST),--dist $(DIST)) $(addprefix --python ,$(PYTHONS))

# The pinned inputs, anew.
LOCK = $(RELEASE_BIN)/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-annotate \
  --upgrade --custom-compile-command "make lock"
lock: $(RELEASE_BIN)/.ready
	$(LOCK) --python-version 3.10 --group build -o release/build-requirements.txt
	$(RELEASE_BIN)/python -c 'import sys; sys.path.append("cpp/cmake"); import find_nvcc as f; print(f.PYPI_REQUIREMENT)' \
	  | $(LOCK) --python-version 3.10 -o release/cuda-requirements.txt -
	$(LOCK) --python-version 3.11 --group release -o release/tools-requirements.txt

clean:
	rm -rf build dist $(VENV)
