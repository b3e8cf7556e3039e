# Everything is installed into .venv by the first target that needs it. make and one of these versions of Python are all
# that has to be there. JAX ends support of a Python long before we do, so newer ones have a newer JAX: constraints.txt.
VERSIONS := 3.13 3.12 3.11
# Each is run, not only looked for: pyenv has a command for every version that it installed, which fails unless that one
# is chosen, and Debian has interpreters that cannot make environments.
that_run = $(shell for python in $(1); do $$python -c 'import ensurepip, venv' 2>/dev/null && echo $$python; done)
# Found out once, and only where it is used.
PYTHON ?= $(eval PYTHON := $(firstword $(call that_run,$(VERSIONS:%=python%))))$(PYTHON)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Tests start several hundred processes, and each would compile all of our modules if none kept what it compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help train test check lint types kernels tests-with-ray tests-without-ray halves long-tests serving-faults fuzz env clean simulate simulate-slices slices lease-races chaos chaos-short elastic faults papers signals test-other-python

help:
	@echo "make train   train DLRM on two hosts of this machine"
	@echo "make test    checks and tests"
	@echo "make check   ruff and pyright only"
	@echo "make test-other-python   what JAX's versions change, on another Python than that of .venv, if one is there; some minutes"
	@echo "make simulate SEEDS=1000        random faults over the real driver, on a fake clock; SEED=17 replays one"
	@echo "make simulate-slices SEEDS=200  the same with TPU slices that come and go"
	@echo "make slices SEEDS=20            random schedules of pretended slices on real Ray nodes; a quarter of an hour"
	@echo "make lease-races ROUNDS=200     three real drivers that fight for one run"
	@echo "make chaos   inject faults: the whole list, then ROUNDS=50 random schedules from SEED=1 on; an hour or two"
	@echo "make chaos-short   the same in about a minute"
	@echo "make faults  all fault tests with real processes, also those that make test leaves out; half an hour, as root with cut networks"
	@echo "make serving-faults  servers, shards and publishers under faults; half an hour"
	@echo "make long-tests  what make test leaves out, but for tests of faults; half an hour"
	@echo "make elastic machines that join, vanish and drain under a run; some minutes"
	@echo "make papers  the jobs of papers on 1, 2 and 3 hosts and over restarts; a quarter of an hour"
	@echo "make signals SIGTERM and Ctrl-C at every tenth of a second (EVERY) of a start; hours"
	@echo "make fuzz    fuzz what reads files, SECONDS (60) for each target; installs atheris"
	@echo "make clean   remove the environment, generated data and runs"

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(if $(PYTHON),command -v $(PYTHON) >/dev/null,false) || { echo "Found no $(or $(PYTHON),$(VERSIONS:%=python%)) that runs. Expected Python $(lastword $(VERSIONS)) to $(firstword $(VERSIONS)). Install one, or run: make PYTHON=/path/to/python3"; exit 1; }
	@# An environment that works keeps its Python, unless one is asked for.
	$(if $(filter command environment,$(origin PYTHON)),$(PYTHON) -m venv --clear $(VENV),$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV))
	@# Python compiles what is imported. To compile all of 20,000 files beforehand would take more than a minute.
	@# uv needs a fifth of pip's time. It does not know pip's settings, so pip installs where uv cannot.
	-@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt uv
	$(BIN)/uv pip install --quiet --system-certs --python $(BIN)/python -c constraints.txt -e '.[dev]' || \
		$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

EVERY ?= 0.1

signals: $(STAMP)
	$(BIN)/python -m tests.faults.signal_sweep --every $(EVERY)

train: $(STAMP)
	$(BIN)/podembed train --job synthetic --hosts 2 --threads-per-host 1

check: lint types

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	nice -n 19 $(BIN)/pyright

# One half after the other: side by side, a dozen processes on two cores take half as much processor time again. Pyright
# takes what they leave: the second half waits for half of its time.
ifdef TESTS
test: check
	$(BIN)/python -m pytest $(TESTS)
else
test: lint
	rm -rf $(VENV)/compiled
	@$(MAKE) --no-print-directory -j 2 types halves
endif

halves:
	@$(MAKE) --no-print-directory tests-without-ray
	@$(MAKE) --no-print-directory tests-with-ray

# A dozen processes begin at the same time, and each that finds no kernels in numba's cache compiles for half a minute.
kernels: $(STAMP)
	$(BIN)/python -c 'from tests.small_job import compile_small_job; compile_small_job()'

tests-with-ray tests-without-ray: kernels

# One process more than processors: these tests wait, too. What pytest makes of our modules is kept by a process before
# them, since each of several at once would make it anew.
tests-without-ray: $(STAMP)
	-@$(BIN)/python -m pytest --collect-only -m "not ray" >/dev/null 2>&1
	$(BIN)/python -m pytest -m "not ray" -n $$(($$(nproc) + 1)) --maxprocesses 4 --dist worksteal

# tests/scheduling.py divides them. To read the other files would take either process as long as a test. While one
# process has its last file the other waits, so files of a minute come before others, and the largest group before all.
# That of `pod_strategy` comes later: its cluster and its hosts stay, and take a twentieth of a processor.
FILES_WITH_RAY = $(shell grep -rl --include='test_*.py' 'mark\.ray' tests | sort)
LONGEST = $(addprefix tests/,orchestrator/driver/test_equality.py faults/storage/test_object_store_run.py installation/test_ray_jobs.py conformance/test_tpu_embedding_pod.py test_pages.py faults/test_leaks.py)
WITH_RAY = $(LONGEST) $(filter-out $(LONGEST),$(FILES_WITH_RAY))

tests-with-ray: $(STAMP)
	$(BIN)/python -m pytest -m ray -n 2 --dist loadscope $(WITH_RAY)

# What depends on JAX most, and one run with kills, on the newest other Python; beside the newest one on the oldest. Here
# versions that pyenv has and nobody chose will do.
PYENV_ROOT ?= $(HOME)/.pyenv
NAME_OF_PYTHON = python$(shell $(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
OTHER_PYTHONS = $(call that_run,$(foreach name,$(filter-out $(NAME_OF_PYTHON),$(VERSIONS:%=python%)),$(name) $(wildcard $(PYENV_ROOT)/versions/$(name:python%=%).*/bin/$(name))))
OTHER_PYTHON = $(eval OTHER_PYTHON := $(if $(filter python$(firstword $(VERSIONS)),$(NAME_OF_PYTHON)),$(lastword $(OTHER_PYTHONS)),$(firstword $(OTHER_PYTHONS))))$(OTHER_PYTHON)
ON_OTHER_PYTHON = tests/embedding/tf/keras tests/tools/sparsecore tests/serving/artifact/test_export_model.py tests/workers/model/test_frameworks.py tests/faults/test_chaos.py

test-other-python: $(STAMP)
	@$(if $(OTHER_PYTHON),$(MAKE) --no-print-directory VENV=$(VENV)-other PYTHON=$(OTHER_PYTHON) env,echo "Found no Python among $(VERSIONS) that runs, beside that of $(VENV). So nothing is tested on another one.")
	$(if $(OTHER_PYTHON),$(VENV)-other/bin/python -m pytest -n 2 --dist loadscope $(ON_OTHER_PYTHON))

# make simulate SEEDS=1000 [FIRST=1] [PROCESSES=2], or SEED=17 to see what happens in one of them.
SEEDS ?= 1000
FIRST ?= 1
PROCESSES ?= $(shell nproc)

simulate: $(STAMP)
	$(BIN)/python -m tests.simulation $(if $(SEED),--seed $(SEED),--seeds $(SEEDS) --first $(FIRST) --processes $(PROCESSES))

simulate-slices: $(STAMP)
	$(BIN)/python -m tests.simulation.slices $(if $(SEED),--seed $(SEED),--seeds $(if $(filter command line,$(origin SEEDS)),$(SEEDS),200) --first $(FIRST))

# make serving-faults SEEDS=1000 KILLS=30 BODIES=100000 LOAD=3600: histories in one process, real processes killed, odd
# requests, seconds of load.
serving-faults: $(STAMP)
	$(BIN)/python -m tests.serving.campaign --seeds $(SEEDS) --first $(FIRST) --processes $(PROCESSES) --kills $(or $(KILLS),30) --bodies $(or $(BODIES),100000) --load-seconds $(or $(LOAD),300)

slices: $(STAMP)
	$(BIN)/python -m tests.faults.slices.schedules --seeds $(if $(filter command line,$(origin SEEDS)),$(SEEDS),20) --first $(FIRST)

lease-races: $(STAMP)
	$(BIN)/python -m tests.orchestrator.commit.races.lease_races --rounds $(or $(ROUNDS),200)

# The whole list, then make chaos ROUNDS=50 SEED=1 random schedules; each is replayed by its own SEED and ROUNDS=1.
chaos: $(STAMP)
	$(BIN)/podembed chaos --only all --rounds $(or $(ROUNDS),50) --seed $(or $(SEED),1)

chaos-short: $(STAMP)
	$(BIN)/podembed chaos --only F1.4
	$(BIN)/podembed chaos --in-process --only F6,F16,F19,F26

faults: $(STAMP)
	PODEMBED_LONG_TESTS=1 $(BIN)/python -m pytest tests/faults tests/orchestrator/driver/test_kill_during_save.py \
		tests/orchestrator/driver/test_staleness.py tests/orchestrator/driver/test_equality.py

long-tests: $(STAMP)
	PODEMBED_LONG_TESTS=1 $(BIN)/python -m pytest -m "long or hypothesis" --ignore=tests/faults

elastic: $(STAMP)
	PODEMBED_LONG_TESTS=1 $(BIN)/python -m pytest tests/faults/test_elastic.py tests/faults/network/test_placement.py tests/faults/network/test_node_loss.py tests/faults/slices

# make papers JOBS="sasrec hstu" for some of them.
papers: $(STAMP)
	$(BIN)/python benchmarks/papers.py $(if $(JOBS),--jobs $(JOBS))

SECONDS ?= 60
fuzz: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(TARGETS)

clean:
	rm -rf $(VENV) $(VENV)-other .data .runs .fuzz .pytest_cache .ruff_cache .hypothesis *.egg-info
