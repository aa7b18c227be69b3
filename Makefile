# SPDX-License-Identifier: Apache-2.0
# `make help` lists the targets. Variables: VENV (.venv), PYTHON (python3, 3.10 or later),
# STACK (onedl, or openmmlab for the original releases, which want Python 3.10: PYTHON310;
# PYTHON312 is for test-newest),
# DEMO (work_dirs/demo),
# WORKERS (pytest's options for several processes).

VENV ?= .venv
PYTHON ?= python3
STACK ?= onedl
PYTHON310 ?= python3.10
PYTHON312 ?= python3.12
DEMO ?= work_dirs/demo
# test files run in two processes at a time, each with one thread
WORKERS ?= -n 2 --dist loadfile

SHELL := /bin/bash
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --disable-pip-version-check
CONFIG := configs/mask_rcnn_partialformer_b0_digits.py
TRAINED = "$$(cat $(DEMO)/last_checkpoint)"
HEADLESS = $(shell grep -h '^opencv-python-headless==' requirements/$(STACK).txt)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-clean test test-all test-openmmlab test-newest lint install venv clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' Makefile

demo: $(DEMO)/.trained ## train a PartialFormer Mask R-CNN on handwritten digits, AP and pictures
	$(PY) tools/visualize.py predictions $(CONFIG) $(TRAINED) --num 8 --score-threshold 0.5 --out-dir $(DEMO)/pictures
	$(PY) tools/visualize.py foreground $(CONFIG) $(TRAINED) --num 4 --out-dir $(DEMO)/pictures
	$(PY) tools/test.py $(CONFIG) $(TRAINED) --work-dir $(DEMO)
	@echo "Average precision: the lines above. Pictures: $(abspath $(DEMO)/pictures)"

demo-clean: ## forget the trained demo, so that `make demo` trains again
	rm -rf $(DEMO)

test: install ## all tests but the slow ones
	$(PY) -m pytest $(WORKERS) -m "not slow"

test-all: install ## all tests
	$(PY) -m pytest $(WORKERS)

test-openmmlab: ## `make test` with the original OpenMMLab releases, in .venv-openmmlab (Python 3.10)
	$(MAKE) test STACK=openmmlab VENV=.venv-openmmlab PYTHON=$(PYTHON310)

test-newest: ## tests/contract with the newest PyTorch and no framework, in .venv-newest (Python 3.12)
	$(PYTHON312) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --disable-pip-version-check -q \
	    -r requirements/newest.txt -r requirements/tests.txt -e .
	.venv-newest/bin/python -m pytest $(WORKERS) -m "not slow" tests/contract

lint: install ## ruff, check and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

install: $(VENV)/.installed ## the environment in .venv, everything pinned
venv: install

clean: ## remove builds and caches; the environment, data and work_dirs stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find effvit_mm tools tests configs -name __pycache__ -prune -exec rm -rf {} +

# The environment, in three steps that are redone only when their requirements change.

$(VENV)/.torch: requirements/$(STACK)-build.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "error: Python 3.10 or later is needed; choose one with PYTHON=…")'
	@echo "== 1/3 PyTorch into $(VENV) (a large download, about 8 GB on disk)"
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) -r $<
	@touch $@

$(VENV)/.mmcv: requirements/$(STACK).txt requirements/install_mmcv.py $(VENV)/.torch
	@echo "== 2/3 mmcv with compiled operators: minutes the first time on a machine, then seconds"
	$(PY) requirements/install_mmcv.py $<
	@touch $@

# Both builds of OpenCV are required by somebody and share a folder. The one without a window
# system is laid on top, so that no system library (libGL) is needed.
$(VENV)/.installed: $(wildcard requirements/*.txt) setup.py pyproject.toml $(VENV)/.mmcv
	@echo "== 3/3 the frameworks, test tools, and effvit_mm itself"
	$(PIP) -r requirements/$(STACK).txt -r requirements/tests.txt
	$(PIP) --no-deps --force-reinstall $(HEADLESS)
	$(PIP) --no-deps --no-build-isolation --editable .
	$(PY) -c 'import effvit_mm, mmcv.ops, mmdet, mmpretrain, mmseg'
	@touch $@

# The demo. The data set's marker is written last; an interrupted training is resumed.

data/digits/digits.json: | $(VENV)/.installed
	$(PY) tools/prepare_digits.py

$(DEMO)/.trained: data/digits/digits.json | $(VENV)/.installed
	$(PY) tools/train.py $(CONFIG) --work-dir $(DEMO) --resume
	@touch $@
