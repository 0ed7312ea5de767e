# The user's verbs. Settings: make bench SCHEDULE=colocate_sync MODEL=tiny SEEDS=3 ITERATIONS=60 ARGS="engine.slots=32"
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PEER := .venv-peer

SETTINGS = $(if $(SCHEDULE),schedule=$(SCHEDULE)) $(if $(MODEL),model=$(MODEL)) $(if $(ENGINE),engine=$(ENGINE)) \
	$(if $(TASK),task=$(TASK)) $(if $(BACKEND),backend=$(BACKEND)) $(if $(SEEDS),seeds=$(SEEDS)) \
	$(if $(ITERATIONS),iterations=$(ITERATIONS)) $(if $(DEVICES),cluster.devices=$(DEVICES)) \
	$(if $(COST),cost=$(COST)) \
	$(if $(EXPERIMENT),experiment=$(EXPERIMENT)) $(if $(FORCE),force=true) $(ARGS)

.PHONY: help setup bench list doctor ui table test test-redis lint unit perf perf-queue clean

help:
	@echo "make bench   run a job: SCHEDULE= MODEL= TASK= ENGINE= SEEDS= ITERATIONS= DEVICES= FORCE=1 ARGS=\"setting=value\""
	@echo "make list    what can be chosen"
	@echo "make table   every schedule under twelve conditions on the virtual clock, into docs/schedule_table.md"
	@echo "make doctor  is this machine fit, and what does each missing thing mean"
	@echo "make ui      MLflow on what was written (PORT=5000)"
	@echo "make test    lint, types and tests"
	@echo "make perf    benchmarks of the harness itself; perf-queue: the queue beside its peer (ARGS=--quick)"
	@echo "make test-redis   the queue over a real Redis server"

setup: $(STAMP)

$(STAMP): pyproject.toml .ci/constraints.txt
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (about three minutes the first time)"
	@PIP_CONSTRAINT=$(CURDIR)/.ci/constraints.txt $(RUN) -m pip install --quiet --disable-pip-version-check torch
	@PIP_CONSTRAINT=$(CURDIR)/.ci/constraints.txt $(RUN) -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $@

bench: $(STAMP)
	@$(RUN) -m harness bench $(SETTINGS)

list: $(STAMP)
	@$(RUN) -m harness list

doctor: $(STAMP)
	@$(RUN) -m harness doctor

table: $(STAMP)
	@$(RUN) -m harness table

ui: $(STAMP)
	@$(RUN) -m harness ui $(if $(PORT),port=$(PORT))

lint: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

unit: $(STAMP)
	$(RUN) -m pytest tests/unit

test: lint
	$(RUN) -m pytest

test-redis: $(STAMP)
	@command -v redis-server >/dev/null || { echo "redis-server is missing: apt-get install redis-server"; exit 1; }
	$(RUN) -m pytest -m redis

# The peer of the queue's benchmark installs packages of its own, some named like ours: never into our environment.
$(PEER)/.installed: .ci/constraints.txt
	@test -x $(PEER)/bin/python || $(PYTHON) -m venv $(PEER)
	@echo "installing the queue's peer into $(PEER)"
	@PIP_CONSTRAINT=$(CURDIR)/.ci/constraints.txt $(PEER)/bin/python -m pip install --quiet --disable-pip-version-check torch
	@PIP_CONSTRAINT=$(CURDIR)/.ci/constraints.txt $(PEER)/bin/python -m pip install --quiet --disable-pip-version-check \
		numpy ray psutil tensordict==0.15.3 TransferQueue==0.1.11
	@touch $@

perf-queue: $(STAMP) $(PEER)/.installed
	OMP_NUM_THREADS=1 $(RUN) -m tests.benchmarks.transfer_queue --peer $(PEER)/bin/python $(ARGS)

perf: $(STAMP) perf-queue
	OMP_NUM_THREADS=1 $(RUN) -m tests.benchmarks.bench_rollout
	OMP_NUM_THREADS=1 $(RUN) -m tests.benchmarks.bench_overhead
	OMP_NUM_THREADS=1 $(RUN) -m tests.benchmarks.bench_simulation
	OMP_NUM_THREADS=1 $(RUN) -m tests.benchmarks.bench_paced
	OMP_NUM_THREADS=1 $(RUN) -m tests.benchmarks.bench_prediction

clean:
	rm -rf $(VENV) $(PEER) .mypy_cache .pytest_cache .ruff_cache
