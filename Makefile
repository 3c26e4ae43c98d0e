# Two commands for users of a clone: `make lab` and `make test`. `make help` lists the rest.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest
# Most tests wait now and then: one worker more than cores. Each runs whole files, in the order of conftest.py.
TEST_WORKERS ?= $(shell expr 1 + $$(nproc))
PARALLEL := -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
NPM := npm --prefix labextension --silent
FUZZ_SECONDS ?= 20

CPP := $(shell find native tests/doubles -name '*.h' -o -name '*.cpp')
PY := jupyter_sing kernelproxy tests benchmarks tools hatch_build.py

.DEFAULT_GOAL := help
LABEXTENSION := jupyter_sing/labextension/package.json
LABEXTENSION_SOURCES := $(shell find labextension/src labextension/style labextension/schema -type f) \
  labextension/package.json labextension/tsconfig.json jupyter_sing/server/openapi.yaml
LABEXTENSION_LINK := $(VENV)/share/jupyter/labextensions/jupyter-sing

.PHONY: help system venv native labextension lab wheels test test-all test-py conformance test-fast test-cpp test-ts test-torch test-cuda test-libraries fuzz lint format docs bench pictures clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

system:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "Python's venv module is needed (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	@$(PYTHON) -c 'import os, sysconfig; p = sysconfig.get_paths()["include"]; \
	  raise SystemExit(not os.path.exists(p + "/Python.h"))' || \
	  { echo "Python's C headers are needed (Debian, Ubuntu: apt install python3-dev)"; exit 1; }
	@command -v $(or $(firstword $(CXX)),g++) >/dev/null || \
	  { echo "A C++20 compiler is needed (Debian, Ubuntu: apt install g++)"; exit 1; }
	@node -e 'process.exit(parseInt(process.versions.node) < 20 ? 1 : 0)' 2>/dev/null || \
	  { echo "Node 20 or newer, with npm, is needed (https://nodejs.org)"; exit 1; }

$(VENV)/.created: | system
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch first and alone: nothing that follows may choose another one.
$(VENV)/.torch: constraints.txt | $(VENV)/.created
	$(PIP) install --constraint constraints.txt torch
	@touch $@

$(VENV)/.package: pyproject.toml hatch_build.py $(VENV)/.torch
	$(PIP) install --constraint constraints.txt --editable '.[test,lint]'
	@touch $@

labextension/node_modules/.installed: labextension/package.json labextension/.npmrc | system
	npm --prefix labextension --loglevel=error install
	@touch $@

# Generated and built files among the sources are younger than what is made of them: no targets.
$(LABEXTENSION): labextension/node_modules/.installed $(filter-out %/openapi.ts,$(LABEXTENSION_SOURCES))
	$(NPM) run build
	@touch $@

# JupyterLab finds what was built where it was built.
$(LABEXTENSION_LINK): | $(VENV)/.package
	@mkdir -p $(@D)
	ln -sfn $(abspath jupyter_sing/labextension) $@

labextension: $(LABEXTENSION) $(LABEXTENSION_LINK)

venv: $(VENV)/.package native labextension ## set everything up in .venv; again in a second when nothing changed

# Looks at the sources itself: returns at once when the libraries for them are there.
native: $(VENV)/.package
	@$(BIN)/python -m kernelproxy.native >/dev/null

# In containers one often is root, and Jupyter asks for that to be said.
LAB_FLAGS ?= $(if $(filter 0,$(shell id -u)),--allow-root)

lab: venv ## JupyterLab with the tutorial
	$(BIN)/jupyter lab $(LAB_FLAGS) docs/tutorial.ipynb

# A wheel with the libraries of these torches for the Python of .venv, so that nobody compiles. Torches
# with CUDA have other libraries than those without: TORCHES="2.13.0+cpu 2.13.0+cu130" names both,
# and pip finds them where its settings say, as with PIP_EXTRA_INDEX_URL. A gigabyte each.
TORCHES ?= 2.11.0 2.12.0 2.13.0

build/torch-%/torch/version.py: | $(VENV)/.created
	rm -rf build/torch-$*
	$(PIP) install --no-deps --no-compile --target build/torch-$* torch==$*
	@touch $@

empty :=
wheels: venv $(TORCHES:%=build/torch-%/torch/version.py) ## a wheel in dist/ that brings the libraries of TORCHES
	JUPYTER_SING_TORCH_DIRS="$(subst $(empty) $(empty),:,$(TORCHES:%=$(CURDIR)/build/torch-%/torch))" \
	  $(BIN)/python -m hatchling build -t wheel

# Says how long each part took.
IN_PARTS = @for part in $(1); do began=$$(date +%s); \
  $(MAKE) --no-print-directory $$part $(2) || exit; \
  echo "== make $$part: $$(($$(date +%s) - began)) s"; done

test: ## all tests of a change: 28 minutes on two cores
	$(call IN_PARTS,venv test-cpp test-ts fuzz test-py)

test-all: ## these, and repetitions and sweeps that docs/testing.md lists
	$(call IN_PARTS,venv test-cpp test-ts fuzz test-py,EXHAUSTIVE=yes)

# What measures time has the machine to itself.
CHOSEN := $(if $(EXHAUSTIVE),,and not exhaustive)
test-py: venv
	$(PYTEST) $(PARALLEL) -m 'not alone $(CHOSEN)'
	$(PYTEST) -m 'alone $(CHOSEN)'

conformance: venv ## PyTorch's samples of all operators, in all dtypes; an hour
	$(BIN)/python -m tests.conformance

test-fast: venv ## what is quick: under two minutes
	$(PYTEST) $(PARALLEL) -m 'not slow and not e2e and not alone and not exhaustive'

TORCH_DIR = $$($(BIN)/python -m kernelproxy.native --torch-dir)
IN_NATIVE = $(MAKE) --no-print-directory -j$(shell nproc) -C native PYTHON=$(abspath $(BIN)/python)

test-cpp: venv ## client and worker in C++, with sanitizers of addresses and undefined behaviour
	$(IN_NATIVE) test TORCH_DIR="$(TORCH_DIR)"

test-ts: labextension
	$(NPM) test

# Another torch than that of .venv, from the index: 5 GB where it brings CUDA, which needs no GPU.
TORCH ?= 2.11.0
OTHER := .venv-$(TORCH)
OTHER_BIN := $(OTHER)/bin/python

$(OTHER)/.package: pyproject.toml hatch_build.py constraints.txt | system
	$(PYTHON) -m venv $(OTHER)
	grep -v '^torch==' constraints.txt > $(OTHER)/constraints.txt
	echo torch==$(TORCH) >> $(OTHER)/constraints.txt
	$(OTHER_BIN) -m pip install --quiet --disable-pip-version-check \
	  --constraint $(OTHER)/constraints.txt torch --editable '.[test]'
	@touch $@

test-torch: $(OTHER)/.package ## what depends on torch, with TORCH=2.11.0 in an environment of its own
	$(IN_NATIVE) test KIND=plain BUILD=build-$(TORCH) PYTHON=$(abspath $(OTHER_BIN)) \
	  TORCH_DIR="$$($(OTHER_BIN) -m kernelproxy.native --torch-dir)"
	$(OTHER_BIN) -m pytest tests/unit/native/test_native.py tests/e2e/programs/test_driver.py \
	  tests/e2e/programs/test_surface.py tests/e2e/programs/test_behaviours.py tests/e2e/programs/test_training_equality.py

# A CUDA build of torch on a double of NVIDIA's driver and runtime: 5 GB, no GPU. Of a version that is
# not in PIP's directories of files, where builds without CUDA may be.
CUDA_TORCH ?= 2.13.0
CUDA := .venv-cuda
CUDA_BIN := $(CUDA)/bin/python
CUDA_TESTS ?= tests/cuda

$(CUDA)/.package: pyproject.toml hatch_build.py constraints.txt | system
	$(PYTHON) -m venv $(CUDA)
	grep -v '^torch==' constraints.txt > $(CUDA)/constraints.txt
	echo torch==$(CUDA_TORCH) >> $(CUDA)/constraints.txt
	env -u PIP_FIND_LINKS PIP_CONFIG_FILE=/dev/null $(CUDA_BIN) -m pip install --quiet \
	  --disable-pip-version-check --constraint $(CUDA)/constraints.txt torch torchvision nvidia-ml-py \
	  --editable '.[test]'
	@touch $@

test-cuda: $(CUDA)/.package ## sessions with a CUDA build of torch on a double of the driver, with two cards
	$(CUDA_BIN) -m kernelproxy.native
	$(CUDA_BIN) -m tests.doubles.cuda.build build/cuda-double
	$(CUDA_BIN) -m pytest $(CUDA_TESTS)

# Libraries that use GPUs themselves, which need no GPU to be tried. Without what they require: they
# may not choose another torch.
GPU_LIBRARIES := bitsandbytes cuda-bindings cuda-core cuda-pathfinder cupy-cuda13x fastrlock jax jaxlib llvmlite \
  ml_dtypes numba numba-cuda opt_einsum scipy triton xformers
GPU_LIBRARIES_DIR := build/gpu-libraries

$(GPU_LIBRARIES_DIR)/.installed: | $(VENV)/.package
	rm -rf $(@D)
	$(PIP) install --no-deps --target $(@D) $(GPU_LIBRARIES)
	$(PIP) install --no-deps --no-build-isolation --target $(@D) torch_scatter
	@touch $@

test-libraries: venv $(GPU_LIBRARIES_DIR)/.installed ## libraries that use GPUs themselves: 2 GB, and compiles for minutes
	PYTHONPATH=$(abspath $(GPU_LIBRARIES_DIR)) $(PYTEST) -rs tests/integration/kernels/test_gpu_libraries.py

fuzz: venv
	$(IN_NATIVE) fuzz TORCH_DIR="$(TORCH_DIR)" SECONDS=$(FUZZ_SECONDS)

lint: $(VENV)/.package labextension ## style and types
	$(BIN)/ruff check $(PY)
	$(BIN)/ruff format --check $(PY)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/prose.py
	$(BIN)/python tools/structure.py
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(NPM) run lint

format: $(VENV)/.package ## put the sources in shape
	$(BIN)/ruff check --fix --exit-zero $(PY)
	$(BIN)/ruff format $(PY)
	$(BIN)/clang-format -i $(CPP)
	$(NPM) run format

$(VENV)/.docs: $(VENV)/.package
	$(PIP) install --constraint constraints.txt mkdocs
	@touch $@

docs: $(VENV)/.docs ## the documentation as a site, in build/docs
	$(BIN)/python tools/pages.py build/docs-sources
	$(BIN)/mkdocs build --quiet --strict

bench: venv ## measure, and write BENCHMARKS.md
	$(BIN)/python -m benchmarks.bench --write

PICTURES := suspended queued activity

pictures: venv ## the README's, from the tests that make them
	$(PYTEST) tests/browser/test_tutorial.py tests/browser/test_competing.py tests/browser/test_activity.py
	mkdir -p docs/pictures
	cp $(PICTURES:%=test-results/pictures/%.png) docs/pictures

clean:
	rm -rf labextension/node_modules labextension/lib jupyter_sing/labextension
	rm -rf $(VENV) .venv-* build dist .mypy_cache .pytest_cache .ruff_cache native/build*
