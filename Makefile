# The user's commands. Settings: make bench SCHEDULE=colocate_sync MODEL=tiny SEEDS=3 ITERATIONS=60 ARGS="engine.slots=32"
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
# A process a core. A file's tests stay in one of them, so that what its fixtures set up is set up once.
PYTEST := $(PY) -m pytest -n logical --maxprocesses=4 --dist loadfile --no-loadscope-reorder
# A run whose engine is vLLM uses vLLM's environment, which has everything else too.
BENCH := $(if $(filter vllm,$(ENGINE)),$(VLLM),$(VENV))

SETTINGS = $(if $(SCHEDULE),schedule=$(SCHEDULE)) $(if $(MODEL),model="$(MODEL)") $(if $(ENGINE),engine=$(ENGINE)) \
	$(if $(TASK),task=$(TASK)) $(if $(BACKEND),backend=$(BACKEND)) $(if $(SEEDS),seeds=$(SEEDS)) \
	$(if $(ITERATIONS),iterations=$(ITERATIONS)) $(if $(DEVICES),cluster.devices=$(DEVICES)) \
	$(if $(COST),cost=$(COST)) $(if $(DEVICE),device=$(DEVICE)) \
	$(if $(EXPERIMENT),experiment=$(EXPERIMENT)) $(if $(FORCE),force=true) $(ARGS)

# What each goal takes, so that a misspelt variable runs no other experiment than was meant. ARGS=, WHEELS= and PYTHON= go anywhere.
JOB := SCHEDULE MODEL ENGINE TASK BACKEND SEEDS ITERATIONS DEVICES COST DEVICE EXPERIMENT FORCE
TAKES.bench := $(JOB) DRY
TAKES.compare := $(JOB) SCHEDULES DRY
TAKES.sweep := $(JOB) DRY
TAKES.matrix := $(JOB) SCHEDULES STALENESS CORRECTIONS DRY
TAKES.speedrun := SCHEDULE ENGINE DEVICES TRACK KEY VERIFY DRY
TAKES.report := EXPERIMENT
TAKES.diff := BEFORE AFTER
TAKES.mlflow-sync := EXPERIMENT
TAKES.doctor := $(JOB)
TAKES.plan := $(JOB)
TAKES.predict := $(JOB) TABLE GIVEN
TAKES.paper := PAPER
TAKES.calibrate := $(JOB) RUN NAME
TAKES.profile := $(JOB) NAME PROFILE
TAKES.gate-gpu := DEVICE PARTS FORCE MINUTES
TAKES.chaos := FIRST SEEDS LIMIT REAL
TAKES.sample := FOLDER
TAKES.ui := PORT
TAKES.serve := PORT HOST CERTIFICATE KEY
TAKES.test-engine := ENGINE
TAKES.test-schedule := SCHEDULE
GIVEN_HERE := $(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),$(name)))
GOALS := $(or $(MAKECMDGOALS),help)
UNKNOWN := $(filter-out ARGS WHEELS PYTHON $(foreach goal,$(GOALS),$(TAKES.$(goal))),$(GIVEN_HERE))
ifneq ($(UNKNOWN),)
$(error make $(GOALS) does not take $(patsubst %,%=,$(UNKNOWN)); it takes $(patsubst %,%=,$(foreach goal,$(GOALS),$(TAKES.$(goal))) ARGS))
endif
# make's own conditions take any text for yes.
override FORCE := $(filter-out 0 false no,$(FORCE))
override DRY := $(filter-out 0 false no,$(DRY))

.PHONY: help setup setup-vllm test-vllm setup-sglang test-sglang test-engine test-schedule bench compare sweep matrix speedrun report diff list doctor ui serve mlflow-sync table memory agentic paper plan scaling calibrate profile gate-gpu chaos sample predict test tests test-slow test-cluster test-redis test-oracle lint perf perf-queue site clean

help:
	@echo "make bench   run a job: SCHEDULE= MODEL= TASK= ENGINE= SEEDS= ITERATIONS= DEVICES= DEVICE= FORCE=1 DRY=1 ARGS=\"setting=value\""
	@echo "make compare schedules side by side, with a report: SCHEDULES=all|a,b SEEDS=3 DRY=1, and what bench takes (docs/comparison.md)"
	@echo "make sweep   the same along settings with several values: ARGS=\"schedule.max_staleness=0,1,2\" DRY=1"
	@echo "make report  one page of what an experiment found, for a browser, and in Markdown: EXPERIMENT= (docs/report.md)"
	@echo "make diff    what changed from one experiment, or commit, to another, and how surely: BEFORE= AFTER= (docs/comparison.md)"
	@echo "make matrix  staleness x correction x schedule, with a heat map: SEEDS=3 SCHEDULES= STALENESS=0,1,2,4 CORRECTIONS=clip,decoupled_4@2e-4 DRY=1"
	@echo "make speedrun  a frozen job to its target, for the record book: SCHEDULE= ENGINE= DEVICES= TRACK= KEY= DRY=1; VERIFY=<record> (docs/speedrun.md)"
	@echo "make list    what can be chosen"
	@echo "make table   every schedule under twelve conditions on the virtual clock, into docs/schedule_table.md"
	@echo "make memory  what lies on the devices of five machines under every schedule, into docs/gpu_memory.md"
	@echo "make agentic  every schedule with turns and slow tools on the virtual clock, into docs/agentic.md"
	@echo "make plan    the fastest split and layout of every schedule (simulated): MODEL= DEVICES= SCHEDULE= DEVICE= ARGS="
	@echo "make scaling every schedule planned for 32 to 1,024 devices, into docs/scaling.md"
	@echo "make predict     a published table's asynchronous rows from the others: TABLE=<csv> GIVEN=train|sync (docs/simulator.md)"
	@echo "make paper   a published experiment beside ours: PAPER=<name>|all (docs/papers.md)"
	@echo "make calibrate   costs from real runs, for COST=: RUN=results/bench/<cell>/seed=0 NAME=mine (docs/calibration.md)"
	@echo "make profile     costs from times of the engines on this machine's device: MODEL=tiny NAME=mine PROFILE=<json>"
	@echo "make gate-gpu    everything that only a machine shows: DEVICE=cpu|gpu PARTS=a,b FORCE=1 MINUTES=10 (docs/gpu.md)"
	@echo "make chaos   random faults over runs of every schedule, and what is promised of them: SEEDS=800 FIRST=0 LIMIT=1800 (s) REAL=30 (docs/chaos.md)"
	@echo "make sample  a small model with a tokenizer, and problems for it, to try text with: FOLDER=my (docs/data.md)"
	@echo "make doctor  is this machine fit, and what does each missing thing mean; with MODEL= SCHEDULE= DEVICES= DEVICE= what lies on each device (docs/gpu.md)"
	@echo "make ui      MLflow on what was written (PORT=5000); mlflow-sync: what it lacks, from the files (EXPERIMENT=)"
	@echo "make serve   rows and weights of a job over HTTP, for a trainer and engines of your own: PORT=8767 HOST= CERTIFICATE= KEY= (docs/service.md)"
	@echo "make test    lint, types and tests; test-slow: those that take minutes each"
	@echo "make perf    benchmarks of the harness itself; perf-queue: the queue beside its peer (ARGS=--quick)"
	@echo "make test-cluster  runs across three hosts in network namespaces, as root (docs/clusters.md)"
	@echo "make test-redis   the queue over a real Redis server"
	@echo "make test-oracle  losses, advantages and estimators against verl's and TRL's functions of the same meaning"
	@echo "make test-engine ENGINE=my_module:MyEngine   the contract of rollout engines, for your own (docs/adding_an_engine.md)"
	@echo "make test-schedule SCHEDULE=my_module:Mine   everything that is promised of schedules, for your own (docs/tutorial.md)"
	@echo "make site    these pages as a site, into results/site"
	@echo "make setup-vllm   an environment for ENGINE=vllm; test-vllm: the engine's tests, against vLLM itself"
	@echo "make setup-sglang the server's environment for ENGINE=sglang; test-sglang: the engine's tests, against a server"
	@echo "    all three: CUDA's builds where NVIDIA's driver is, else those for CPUs; WHEELS=cpu|cuda says otherwise (docs/gpu.md)"

setup: $(STAMP)

# Before anything is installed: torch alone takes minutes.
define supported
	@$(PYTHON) -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))" || { \
		echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), and Cadence needs Python 3.11 or 3.12: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
endef

# Other indexes than PyPI may have torch for CPUs under the same version, and pip prefers it. Torch cannot be imported yet.
for_cuda = $(if $(CUDA),@$(1)/bin/python -c "import runpy; import sysconfig; torch = runpy.run_path(sysconfig.get_path('purelib') + '/torch/version.py'); \
	raise SystemExit(0 if torch['cuda'] else 'torch ' + torch['__version__'] + ' in $(1) \
	is a build for CPUs: make clean, and make again where pip finds none (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL), or WHEELS=cpu')")

# ENVIRONMENT, LIST OF PINS. Nothing is resolved: lists are complete. Files are those whose digests .ci/hashes.txt has, but for torch,
# of which an index has its own builds. What has no wheel is built by the setuptools that comes first; nothing else is fetched for it.
PIP_INSTALL = bin/python -m pip install --quiet --disable-pip-version-check --no-deps
REFUSED = { echo "if pip says that hashes do not match, the index has other files than PyPI: docs/security.md, What is installed"; exit 1; }
PINS := .ci/pins.py .ci/hashes.txt
define install
	@$(1)/bin/python .ci/pins.py $(2) $(1)
	@$(1)/$(PIP_INSTALL) --require-hashes -r $(1)/build.txt || $(REFUSED)
	@$(1)/$(PIP_INSTALL) -r $(1)/torch.txt
	$(call for_cuda,$(1))
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

bench: $(BENCH)/$(INSTALLED) $(if $(filter sglang,$(ENGINE)),$(SGLANG)/$(INSTALLED))
	@$(BENCH)/bin/python -m harness bench $(if $(DRY),dry=true) $(SETTINGS)

compare: $(BENCH)/$(INSTALLED) $(if $(filter sglang,$(ENGINE)),$(SGLANG)/$(INSTALLED))
	@$(BENCH)/bin/python -m harness compare $(if $(SCHEDULES),schedules=$(SCHEDULES)) $(if $(DRY),dry=true) $(SETTINGS)

sweep: $(BENCH)/$(INSTALLED) $(if $(filter sglang,$(ENGINE)),$(SGLANG)/$(INSTALLED))
	@$(BENCH)/bin/python -m harness sweep $(if $(DRY),dry=true) $(SETTINGS)

matrix: $(STAMP)
	@$(PY) -m harness matrix $(if $(SCHEDULES),schedules=$(SCHEDULES)) $(if $(STALENESS),staleness=$(STALENESS)) \
		$(if $(CORRECTIONS),corrections=$(CORRECTIONS)) $(if $(DRY),dry=true) $(SETTINGS)

speedrun: $(BENCH)/$(INSTALLED) $(if $(filter sglang,$(ENGINE)),$(SGLANG)/$(INSTALLED))
	@$(BENCH)/bin/python -m harness speedrun $(if $(SCHEDULE),schedule=$(SCHEDULE)) $(if $(ENGINE),engine=$(ENGINE)) \
		$(if $(DEVICES),cluster.devices=$(DEVICES)) $(if $(TRACK),track=$(TRACK)) $(if $(KEY),key="$(KEY)") \
		$(if $(VERIFY),verify="$(VERIFY)") $(if $(DRY),dry=true) $(ARGS)

report: $(STAMP)
	@$(PY) -m harness report $(if $(EXPERIMENT),experiment=$(EXPERIMENT))

diff: $(STAMP)
	@$(PY) -m harness diff $(BEFORE) $(AFTER)

list: $(STAMP)
	@$(PY) -m harness list

doctor: $(STAMP)
	@$(PY) -m harness doctor $(SETTINGS)

table: $(STAMP)
	@$(PY) -m harness table

memory: $(STAMP)
	@$(PY) -m harness memory

agentic: $(STAMP)
	@$(PY) -m harness agentic

plan: $(STAMP)
	@OMP_NUM_THREADS=1 $(PY) -m harness plan $(SETTINGS)

scaling: $(STAMP)
	@OMP_NUM_THREADS=1 $(PY) -m harness scaling

predict: $(STAMP)
	@$(PY) -m harness predict $(if $(TABLE),table=$(TABLE)) $(if $(GIVEN),given=$(GIVEN)) $(SETTINGS)

paper: $(STAMP)
	@OMP_NUM_THREADS=1 $(PY) -m harness paper $(if $(PAPER),paper=$(PAPER)) $(ARGS)

calibrate: $(STAMP)
	@$(PY) -m harness calibrate $(foreach run,$(RUN),run=$(run)) $(if $(NAME),name=$(NAME)) $(SETTINGS)

profile: $(STAMP)
	@$(PY) -m harness profile $(if $(NAME),name=$(NAME)) $(if $(PROFILE),profile=$(PROFILE)) $(SETTINGS)

gate-gpu: $(STAMP)
	@$(PY) -m harness gate-gpu $(if $(DEVICE),device=$(DEVICE)) $(if $(PARTS),parts=$(PARTS)) \
		$(if $(FORCE),force=true) $(if $(MINUTES),minutes=$(MINUTES))

chaos: $(STAMP)
	@OMP_NUM_THREADS=1 $(PY) -m harness chaos $(if $(FIRST),first=$(FIRST)) $(if $(SEEDS),seeds=$(SEEDS)) \
		$(if $(LIMIT),limit=$(LIMIT)) $(if $(REAL),real=$(REAL))

sample: $(STAMP)
	@$(PY) -m harness sample $(if $(FOLDER),folder="$(FOLDER)")

ui: $(STAMP)
	@$(PY) -m harness ui $(if $(PORT),port=$(PORT))

serve: $(STAMP)
	@$(PY) -m harness serve $(if $(PORT),port=$(PORT)) $(if $(HOST),host=$(HOST)) \
		$(if $(CERTIFICATE),certificate="$(CERTIFICATE)") $(if $(KEY),key="$(KEY)")

mlflow-sync: $(STAMP)
	@$(PY) -m harness mlflow-sync $(if $(EXPERIMENT),experiment=$(EXPERIMENT))

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
$(PEER)/.installed: .ci/constraints.txt
	@test -x $(PEER)/bin/python || $(PYTHON) -m venv $(PEER)
	@echo "installing the queue's peer into $(PEER)"
	@PIP_CONSTRAINT=.ci/constraints.txt $(PEER)/bin/python -m pip install --quiet --disable-pip-version-check torch
	@PIP_CONSTRAINT=.ci/constraints.txt $(PEER)/bin/python -m pip install --quiet --disable-pip-version-check \
		numpy ray psutil tensordict==0.15.3 TransferQueue==0.1.11
	@touch $@

perf-queue: $(STAMP) $(PEER)/.installed
	OMP_NUM_THREADS=1 $(PY) -m tests.benchmarks.transfer_queue --peer $(PEER)/bin/python $(ARGS)

perf: $(STAMP) perf-queue
	OMP_NUM_THREADS=1 $(PY) -m tests.benchmarks.bench_rollout
	OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo $(PY) -m tests.benchmarks.bench_weight_sync
	OMP_NUM_THREADS=1 $(PY) -m tests.benchmarks.bench_overhead
	OMP_NUM_THREADS=1 $(PY) -m tests.benchmarks.bench_simulation
	OMP_NUM_THREADS=1 $(PY) -m tests.benchmarks.bench_paced
	OMP_NUM_THREADS=1 $(PY) -m tests.benchmarks.bench_prediction
	OMP_NUM_THREADS=1 $(PY) -m tests.benchmarks.bench_checkpoints
	OMP_NUM_THREADS=1 $(PY) -m tests.benchmarks.bench_memory backend=virtual cost=tiny_cpu

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
