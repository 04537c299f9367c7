# Two targets do all the set-up on a bare Debian 12 machine: `make demo` and `make test`.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# uv where it is installed, else a private copy of it in .uv/ (made with the system's Python).
UV := $(shell command -v uv 2>/dev/null || echo .uv/bin/uv)
export UV_LINK_MODE ?= copy
# Tests run hundreds of commands, each of which would compile the package.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv/bin
DEMO_OUT ?= out/demo

.PHONY: help demo test test-unit test-fast test-nightly coverage fuzz oracle lint format check-types docs bench system-packages install lock wheel packages release site clean \
  test-gpu gpu-bundle bench-gpu cluster-up cluster-down cluster-shell cluster-logs cluster-status cluster-demo cluster-demo-suspend cluster-demo-scale cluster-test

help: ## Show the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.uv/bin/uv:
	@tests/system-packages.sh python
	python3 -m venv .uv
	.uv/bin/python -m pip install --quiet --disable-pip-version-check 'uv>=0.6'

# Built with the package, which uv does not install again if only these files are missing.
LIBRARIES := slurm_affinode/analysis/join/libjoin.so slurm_affinode/base/columns/libcolumns.so \
  slurm_affinode/whatif/profile/libprofile.so
C_FILES := $(wildcard $(addsuffix *.[ch],$(dir $(LIBRARIES))))
rebuild = $(if $(filter-out $(wildcard $(LIBRARIES)),$(LIBRARIES)),--reinstall-package slurm-affinode)

install: $(if $(findstring .uv/,$(UV)),.uv/bin/uv) ## Install the locked runtime dependencies into .venv.
	@$(UV) sync --quiet --frozen --no-default-groups --extra analysis --inexact $(rebuild)

.venv/.dev: pyproject.toml uv.lock hatch_build.py $(C_FILES) $(LIBRARIES) $(if $(findstring .uv/,$(UV)),.uv/bin/uv)
	$(UV) sync --quiet --frozen --all-extras --group dev $(rebuild)
	@touch $@

$(LIBRARIES):  # without them, the rule above runs
	@:

demo: install ## Analyze synthetic jobs and GPU metrics, write out/demo/report.html.
	@$(VENV)/slurm-affinode demo --out $(DEMO_OUT)

system-packages: ## Install the Debian packages that the tests use (needs root).
	@tests/system-packages.sh tests

test: system-packages .venv/.dev ## Install what is needed, check the code, run every test.
	@tests/run.sh

# The packages that compute and decide: their tests start no process of their own.
UNIT := core model metrics engines traces slurm report analysis whatif prediction test_layers.py

test-unit: .venv/.dev ## Only the tests of readers, decisions, figures and pages (two minutes on two cores).
	$(VENV)/pytest -q -n auto --dist worksteal -m "not slow" $(addprefix tests/unit/,$(UNIT))

test-fast: .venv/.dev ## Only the tests that need no server and no browser.
	$(VENV)/pytest -q -n auto --dist worksteal -m "not browser and not database and not cluster and not gpu and not slow"

# Measuring it makes the tests two to three times slower, so `make test` does not.
coverage: system-packages .venv/.dev ## Measure how much of the code the tests without a cluster run (at least 90 %).
	$(VENV)/pytest -q -m "not cluster and not gpu" -n auto --dist loadfile --no-loadscope-reorder \
	  --cov --cov-report=term:skip-covered --cov-fail-under=90

# A million inputs for each target take one to two hours on one core; the tests run a few of each.
fuzz: .venv/.dev ## Fuzz everything that root reads from users (ARGS='note --inputs 10000'; --list, --help).
	@PYTHONHASHSEED=0 PYTHONPATH=tests $(VENV)/python -m fuzz $(ARGS)

oracle: .venv/.dev ## Compare the figures of random clusters with an independent computation (ARGS='--clusters 1000 --seed 1'; --help).
	@PYTHONPATH=tests $(VENV)/python -m oracle $(ARGS)

lint: .venv/.dev ## Check style, spelling and wording.
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/codespell $$(git ls-files)
	$(VENV)/python tests/prose.py
	@if command -v shellcheck >/dev/null; then git ls-files '*.sh' containers/cluster containers/cluster-demo-scale tests/gpu/emulated tests/gpu/bundle/{criu-from-debian,make,run} deploy/packages/build deploy/release | xargs shellcheck; \
	else echo "shellcheck is not installed: shell scripts are not checked" >&2; fi

check-types: .venv/.dev ## Check types.
	$(VENV)/mypy

format: .venv/.dev ## Fix style.
	$(VENV)/ruff check --fix .
	$(VENV)/ruff format .

docs: .venv/.dev ## Regenerate the generated pages of docs/.
	$(VENV)/python docs/generate.py
	$(VENV)/python deploy/grafana/build.py

cluster-up: ## Start a Slurm cluster in containers (SLURM_RELEASE=24.11 or 26.05; needs Docker or root on Debian).
	@containers/cluster up

cluster-down: ## Stop it and remove its data.
	@containers/cluster down

cluster-shell: ## Open a shell on its login node.
	@containers/cluster shell

cluster-logs: ## Show the logs of its daemons.
	@containers/cluster logs

cluster-status: ## Show its containers, nodes and jobs.
	@containers/cluster status

cluster-demo: ## Run real jobs on it, report on its last ten minutes: out/cluster-demo/report.html.
	@containers/cluster-demo

cluster-demo-suspend: ## Suspend an idle job on it, use its GPU for another, resume it on the other node, and report on it.
	@containers/cluster-demo-suspend

test-nightly: .venv/.dev ## Run the further cases that `make test` leaves out (of cluster tests, the GPU suite, object stores).
	@containers/ensure-docker.sh
	$(VENV)/pytest -m nightly tests
	for server in azurite ceph; do \
	  OBJECT_SERVER=$$server $(VENV)/pytest tests/unit/metrics/parquet tests/unit/pipeline/test_object_store.py || exit; done

cluster-demo-scale: ## Report on many generated samples by jobs of Slurm as Dask workers, and compare (SAMPLES=100000000).
	@containers/cluster-demo-scale

cluster-test: .venv/.dev ## Run the tests that need the cluster.
	@containers/ensure-docker.sh
	$(VENV)/pytest -m cluster tests/cluster

# EMULATED=1: on the emulated driver, at small sizes, to see that the tests and benchmarks themselves work. ARGS go to
# pytest, or to the benchmark. A machine on which nothing is installed uses the archive of gpu-bundle where it is.
on_gpu = $(if $(EMULATED),tests/gpu/emulated)
packed := $(if $(wildcard .venv/.dev),,$(wildcard dist/slurm-affinode-gpu.tar.gz))
gpu_ready = $(if $(packed),:,$(MAKE) --no-print-directory .venv/.dev || { echo "without a network: make gpu-bundle on \
  another machine, copy its dist/slurm-affinode-gpu.tar.gz to dist/ here, and call this again" >&2; exit 2; })

test-gpu: ## Run the tests that need an NVIDIA GPU (EMULATED=1: on the emulated driver; ARGS='-k lock').
	@$(gpu_ready)
	@$(on_gpu) $(if $(packed),tests/gpu/bundle/run tests,$(VENV)/pytest -v -m gpu tests/gpu) $(ARGS)

bench-gpu: ## GB/s of a suspension by phase, against the driver alone and PCIe (EMULATED=1; ARGS=--resume).
	@$(gpu_ready)
	@$(on_gpu) $(if $(packed),tests/gpu/bundle/run bench,$(VENV)/python -m benchmarks.gpu) $(ARGS)

gpu-bundle: $(if $(findstring .uv/,$(UV)),.uv/bin/uv) ## Pack what test-gpu and bench-gpu need on a machine without a network: dist/slurm-affinode-gpu.tar.gz.
	@UV='$(UV)' tests/gpu/bundle/make

bench: $(if $(findstring .uv/,$(UV)),.uv/bin/uv) ## Run the benchmarks, print ratios (takes some minutes).
	$(UV) sync --quiet --frozen --all-extras --group dev --group bench
	$(VENV)/python -m benchmarks $(ARGS)

lock: ## Resolve the dependencies again.
	$(UV) lock --upgrade

wheel: $(if $(findstring .uv/,$(UV)),.uv/bin/uv) ## Build the wheel into dist/.
	$(UV) build --quiet --wheel

packages: $(if $(findstring .uv/,$(UV)),.uv/bin/uv) ## Build deb and rpm packages for this system into dist/packages (ARGS=slurm-affinode-node).
	@UV='$(UV)' deploy/packages/build $(ARGS)

release: $(if $(findstring .uv/,$(UV)),.uv/bin/uv) ## Build wheel, source archive, lists of components and checksums into dist/release (KEY=FILE signs them).
	@UV='$(UV)' deploy/release

site: .venv/.dev ## Build the documentation as a web site, which works offline: out/site/index.html.
	@$(VENV)/python deploy/site/build.py

clean: ## Remove the output of all targets.
	rm -rf out dist build .venv .uv .pytest_cache .mypy_cache .ruff_cache .hypothesis htmlcov .coverage
