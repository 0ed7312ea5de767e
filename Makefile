# Sets up environments, and calls cadence in them: make bench SCHEDULE=colocate_sync SEEDS=3 ARGS="engine.slots=32". What
# commands there are, and what each takes, stands in harness/cli/commands.py. Below are goals that are make's own.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# What is installed is for the machine: CUDA's builds where NVIDIA's driver is, else those for CPUs. WHEELS=cpu|cuda says otherwise.
ifeq ($(origin WHEELS),undefined)
WHEELS := $(if $(wildcard /proc/driver/nvidia/version),cuda,$(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu))
endif
ifeq ($(filter cpu cuda,$(WHEELS)),)
$(error WHEELS=$(WHEELS) is neither cpu nor cuda)
endif
CUDA := $(if $(filter cuda,$(WHEELS)),-cuda)
INSTALLED := .installed$(CUDA)
STAMP := $(VENV)/$(INSTALLED)
PEER := .venv-peer
VLLM := .venv-vllm
SGLANG := .venv-sglang
ORACLE := .venv-oracle
SITE := .venv-site
MEGATRON := $(VENV)/.installed-megatron
# A process a core. A file's tests stay in one of them, so that what its fixtures set up is set up once.
PYTEST := $(PY) -m pytest -n logical --maxprocesses=4 --dist loadfile --no-loadscope-reorder

OWN := help setup setup-vllm setup-sglang setup-megatron lint test tests test-slow test-cluster test-engine test-schedule test-vllm \
	test-sglang test-megatron test-oracle test-redis perf perf-queue site clean
# All other goals are cadence's. It gets the variables of make's command line, and refuses those that it does not know.
COMMANDS := $(filter-out $(OWN) .%,$(MAKECMDGOALS))
GIVEN := $(filter-out ARGS WHEELS PYTHON,$(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),$(name))))
VARIABLES = $(foreach name,$(GIVEN),'$(name)=$(subst ','\'',$($(name)))')
TAKES := $(if $(filter test-engine,$(MAKECMDGOALS)),ENGINE) $(if $(filter test-schedule,$(MAKECMDGOALS)),SCHEDULE)
UNKNOWN := $(if $(COMMANDS),,$(filter-out $(TAKES),$(GIVEN)))
ifneq ($(UNKNOWN),)
$(error make $(or $(MAKECMDGOALS),help) does not take $(UNKNOWN:%=%=); it takes $(patsubst %,%=,$(TAKES) ARGS))
endif

# A run whose engine is vLLM uses vLLM's environment, which has everything else too; SGLang's has its server alone.
RUN := $(if $(filter bench compare sweep matrix speedrun test-engine,$(MAKECMDGOALS)),$(foreach name,$(filter ENGINE engine,$(GIVEN)),$($(name))))
BENCH := $(if $(filter vllm,$(RUN)),$(VLLM),$(VENV))

.PHONY: $(OWN) $(COMMANDS)

help:
	@echo "make <command>, each also cadence <command> in .venv/bin; options are variables: make bench SCHEDULE=half_step SEEDS=3 DRY=1"
	@echo "settings stand in ARGS: make bench ARGS=\"schedule.max_staleness=2\"; make bench ARGS=--help lists its options (docs/usage.md)"
	@$(PYTHON) -m harness.cli.commands
	@echo "make's own:"
	@echo "  setup        .venv, as every command does that lacks it; setup-vllm, setup-sglang: for ENGINE=vllm, ENGINE=sglang;"
	@echo "               setup-megatron: megatron-core beside it, for training.engine=megatron"
	@echo "               CUDA's builds where NVIDIA's driver is, else those for CPUs; WHEELS=cpu|cuda says otherwise (docs/gpu.md)"
	@echo "  test         lint, types and tests; test-slow: those that take minutes each"
	@echo "  test-vllm, test-sglang, test-megatron, test-redis, test-oracle: against the engines, a Redis server, verl's and TRL's functions"
	@echo "  test-cluster runs across three hosts in network namespaces, as root (docs/clusters.md)"
	@echo "  test-engine  ENGINE=my_module:MyEngine: the contract of rollout engines, for your own (docs/adding_an_engine.md)"
	@echo "  test-schedule  SCHEDULE=my_module:Mine: everything that is promised of schedules, for your own (docs/tutorial.md)"
	@echo "  perf         benchmarks of the harness itself; perf-queue: the queue beside its peer (ARGS=--quick)"
	@echo "  site         these pages as a site, into results/site"
	@echo "  clean        removes every environment"

$(COMMANDS): $(BENCH)/$(INSTALLED) $(if $(filter sglang,$(RUN)),$(SGLANG)/$(INSTALLED))
	@CADENCE_CALLED_BY_MAKE=1 $(BENCH)/bin/python -m harness $@ $(VARIABLES) $(ARGS)

setup: $(STAMP)

# Before anything is installed, for torch alone takes minutes: a Python that will do, and nothing misspelt.
define supported
	@$(PYTHON) -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))" || { \
		echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), and Cadence needs Python 3.11 or 3.12: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(foreach command,$(COMMANDS),@$(PYTHON) -m harness.cli.commands $(command) $(VARIABLES)
	)
endef

# ENVIRONMENT, LIST OF PINS, where another one has the libraries of a build for CUDA: that. Nothing is resolved: lists are
# complete. Files are those whose digests .ci/hashes.txt has, but for torch, of which an index has its own builds: CUDA's, or for
# CPUs. What has no wheel is built by the setuptools that comes first; nothing else is fetched for it.
PIP_INSTALL = bin/python -m pip install --quiet --disable-pip-version-check --no-deps
REFUSED = { echo "if pip says that hashes do not match, the index has other files than PyPI: docs/security.md, What is installed"; exit 1; }
PINS := .ci/pins.py .ci/hashes.txt
define install
	@$(1)/bin/python .ci/pins.py $(2) $(1)
	@$(1)/$(PIP_INSTALL) --require-hashes -r $(1)/build.txt || $(REFUSED)
	@$(1)/$(PIP_INSTALL) -r $(1)/torch.txt
	@$(1)/bin/python .ci/pins.py --built $(or $(3),$(2)) $(1)
	@$(1)/$(PIP_INSTALL) --require-hashes --no-build-isolation -r $(1)/pins.txt || $(REFUSED)
endef

$(STAMP): pyproject.toml $(PINS) .ci/constraints.txt .ci/constraints$(CUDA).txt
	$(supported)
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV), for $(WHEELS) (about three minutes the first time)"
	$(call install,$(VENV),.ci/constraints$(CUDA).txt)
	@$(VENV)/$(PIP_INSTALL) --no-build-isolation -e .
	@touch $@

# torch.compile, which both engines use, hands the environment's path to a C++ compiler as it is.
without_spaces = @case "$(CURDIR)" in *" "*) echo "$(1) compiles code and cannot do so in a folder with a space in its name: move $(CURDIR)"; exit 1;; esac

setup-vllm: $(VLLM)/$(INSTALLED)

$(VLLM)/$(INSTALLED): pyproject.toml $(PINS) .ci/constraints-vllm$(CUDA).txt
	$(call without_spaces,vLLM)
	$(supported)
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@echo "installing into $(VLLM), for $(WHEELS) (about five minutes the first time)"
	$(call install,$(VLLM),.ci/constraints-vllm$(CUDA).txt)
	@$(VLLM)/$(PIP_INSTALL) --no-build-isolation -e .
	@$(VLLM)/bin/python -m compileall -q -j 2 -x py312 $(VLLM)/lib
	@touch $@

# The server only: it and the harness want different versions of the same packages.
setup-sglang: $(SGLANG)/$(INSTALLED)

$(SGLANG)/$(INSTALLED): $(PINS) .ci/constraints-sglang$(CUDA).txt
	$(call without_spaces,SGLang)
	$(supported)
	@test -x $(SGLANG)/bin/python || $(PYTHON) -m venv $(SGLANG)
	@echo "installing into $(SGLANG), for $(WHEELS) (about five minutes the first time)"
	$(call install,$(SGLANG),.ci/constraints-sglang$(CUDA).txt)
	@$(SGLANG)/bin/python -m compileall -q -j 2 -x py312 $(SGLANG)/lib
	@touch $@

# In the environment itself: it trains in the processes of the harness. What it has of other packages, setup has.
setup-megatron: $(MEGATRON)

$(MEGATRON): $(PINS) .ci/constraints-megatron.txt $(STAMP)
	@echo "installing megatron-core into $(VENV)"
	@$(PY) .ci/pins.py .ci/constraints-megatron.txt $(VENV)
	@$(VENV)/$(PIP_INSTALL) --require-hashes --no-build-isolation -r $(VENV)/pins.txt || $(REFUSED)
	@touch $@

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# With --keep-going the tests run after a failed lint too.
test: lint tests

tests: $(STAMP)
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: $(STAMP)
	$(PYTEST) -m "slow and not cluster" $(ARGS)

# Three hosts of Ray have enough to do beside each other: one process.
test-cluster: $(STAMP)
	$(PY) -m pytest -m cluster tests/integration $(ARGS)

test-engine: $(BENCH)/$(INSTALLED)
	@test -n "$(ENGINE)" || { echo "which engine? make test-engine ENGINE=my_module:MyEngine"; exit 1; }
	$(BENCH)/bin/python -m pytest tests/contract --engine $(ENGINE) $(ARGS)

test-schedule: $(STAMP)
	@test -n "$(SCHEDULE)" || { echo "which schedule? make test-schedule SCHEDULE=my_module:Mine"; exit 1; }
	$(PY) -m pytest tests/schedules/test_every_schedule.py --schedule $(SCHEDULE) $(ARGS)

test-vllm: $(VLLM)/$(INSTALLED)
	$(VLLM)/bin/python -m pytest -m vllm tests/contract tests/integration tests/gpu $(ARGS)

test-sglang: $(STAMP) $(SGLANG)/$(INSTALLED)
	$(PY) -m pytest -m sglang tests/contract tests/integration $(ARGS)

test-megatron: $(MEGATRON)
	$(PY) -m pytest -m megatron tests/training_contract $(ARGS)

# Beside the environment, not in it: it asks for other versions of the same packages, and only imports them.
$(ORACLE)/.installed: $(PINS) .ci/constraints-oracle.txt $(STAMP)
	@echo "installing what is compared with into $(ORACLE)"
	@rm -rf $(ORACLE) && mkdir $(ORACLE)
	@$(PY) .ci/pins.py .ci/constraints-oracle.txt $(ORACLE)
	@$(VENV)/$(PIP_INSTALL) --require-hashes --no-build-isolation --target $(ORACLE) -r $(ORACLE)/pins.txt || $(REFUSED)
	@touch $@

test-oracle: $(ORACLE)/.installed
	PYTHONPATH=.:$(ORACLE) $(PY) -m pytest -m oracle tests/oracle $(ARGS)

test-redis: $(STAMP)
	@command -v redis-server >/dev/null || { echo "redis-server is missing: apt-get install redis-server"; exit 1; }
	$(PY) -m pytest -m redis

# The peer of the queue's benchmark installs packages of its own, some named like ours: never into our environment.
$(PEER)/.installed: $(PINS) .ci/constraints-peer.txt
	@test -x $(PEER)/bin/python || $(PYTHON) -m venv $(PEER)
	@echo "installing the queue's peer into $(PEER)"
	$(call install,$(PEER),.ci/constraints-peer.txt,.ci/constraints.txt)
	@touch $@

perf-queue: $(STAMP) $(PEER)/.installed
	OMP_NUM_THREADS=1 $(PY) -m tests.benchmarks.transfer_queue --peer $(PEER)/bin/python $(ARGS)

perf: $(STAMP) perf-queue
	OMP_NUM_THREADS=1 $(PY) -m tests.benchmarks.bench_rollout
	OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo $(PY) -m tests.benchmarks.bench_weight_sync
	OMP_NUM_THREADS=1 $(PY) -m tests.benchmarks.bench_overhead
	OMP_NUM_THREADS=1 $(PY) -m tests.benchmarks.bench_simulation
	OMP_NUM_THREADS=1 $(PY) -m tests.benchmarks.bench_control_plane
	OMP_NUM_THREADS=1 $(PY) -m tests.benchmarks.bench_paced
	OMP_NUM_THREADS=1 $(PY) -m tests.benchmarks.bench_prediction
	OMP_NUM_THREADS=1 $(PY) -m tests.benchmarks.bench_checkpoints
	OMP_NUM_THREADS=1 $(PY) -m tests.benchmarks.bench_soak backend=virtual cost=tiny_cpu

$(SITE)/.installed: $(PINS) .ci/constraints-site.txt
	$(supported)
	@test -x $(SITE)/bin/python || $(PYTHON) -m venv $(SITE)
	@$(SITE)/bin/python .ci/pins.py .ci/constraints-site.txt $(SITE)
	@$(SITE)/$(PIP_INSTALL) --require-hashes -r $(SITE)/pins.txt || $(REFUSED)
	@touch $@

site: $(SITE)/.installed
	@$(SITE)/bin/python -m mkdocs build --strict --quiet
	@echo results/site/index.html

clean:
	rm -rf $(VENV) $(PEER) $(VLLM) $(SGLANG) $(ORACLE) $(SITE) .mypy_cache .pytest_cache .ruff_cache
