# make train | horovod | wheelhouse | check | test | test-keras | test-slow | test-faults | test-cluster | test-all | test-extras | test-torch | test-gpu | test-simulated-gpu | test-4 | test-debian-13 | mutants | dist | lock | clean.
# Each installs what it needs.
#   make train RANKS=4 ARGS="epochs=3" LIMIT_S=3600      make test ARGS="-k sampler"      make PYTHON=python3.12 train
#   make train ACCEPT="torch torchvision 'nvidia-*'"     packages of another index, whose files constraints.txt does not list
#   make train TORCH=2.14.1                              another torch than constraints.txt has; TORCH=site: the one that PYTHON has
#   make lock ARGS="--upgrade-package rich"              constraints.txt anew
SHELL := /bin/bash
PYTHON ?= python3
RANKS ?= 2
LIMIT_S ?= 1800
ARGS ?=
VENV ?= .venv
DIR ?= wheelhouse
PY := $(VENV)/bin/python
ACCEPT ?=
TORCH ?=
INSTALL := $(PY) install.py $(if $(ACCEPT),--accept $(ACCEPT)) $(if $(TORCH),--torch $(TORCH))
OF_TORCH := $(if $(TORCH),-torch-$(TORCH))
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1
THREADS := $(shell cores=$$(nproc); echo $$(( cores > $(RANKS) ? cores / $(RANKS) : 1 )))

# The site's own MPI where mpicc is on the path; elsewhere Open MPI's wheel from PyPI. Each has its own stamp file, so a changed path reinstalls.
SITE_MPICC := $(filter-out $(abspath $(VENV))/bin/mpicc,$(shell command -v mpicc))
COMPILER := $(firstword $(foreach name,$(CXX) c++ g++ clang++,$(shell command -v $(name))))
ifdef SITE_MPICC
MPIRUN := mpirun
READY := $(VENV)/.ready-with-site-mpi$(OF_TORCH)
else
MPIRUN := $(VENV)/bin/mpirun
READY := $(VENV)/.ready-with-mpi-wheel$(OF_TORCH)
# Shared memory and TCP only: starts about 1 s faster than with a probe for cluster networks. A site's own MPI keeps its own settings.
export OMPI_MCA_btl ?= self,sm,tcp
endif
ifdef COMPILER
HOROVOD := $(VENV)/.horovod
else
HOROVOD := no-compiler
endif

# Defaults for laptops and containers, which the environment overrides: more ranks than cores, no pinning to cores, waiting ranks yield the
# core, root may start ranks, and the ranks share the cores.
export PRTE_MCA_rmaps_default_mapping_policy ?= :oversubscribe
export PRTE_MCA_hwloc_default_binding_policy ?= none
export OMPI_MCA_rmaps_base_oversubscribe ?= 1
export OMPI_MCA_mpi_yield_when_idle ?= 1
export OMP_NUM_THREADS ?= $(THREADS)
# Containers often have it: each process would compile all modules of hvdtrain anew.
unexport PYTHONDONTWRITEBYTECODE
# Several test files at a time: many tests wait for processes that they start. make test PARALLEL= runs them one after the other.
PARALLEL ?= --dist loadfile --no-loadscope-reorder --max-worker-restart 0
workers = $(if $(strip $(PARALLEL)),-n $(1) $(PARALLEL))
# $(call tests,WORKERS,MARKS,OPTIONS): those that look at the clock come last, one after the other, and are tried once more before they count as failed.
# 5 is pytest's code where no test is chosen, as by ARGS="-k NAME"
tests = @first=0; set -x; \
	$(PY) -m pytest $(call workers,$(1)) $(3) -m "$(2) and not clock" $(ARGS) || first=$$?; [ $$first = 0 -o $$first = 5 ] || exit $$first; \
	$(PY) -m pytest -m "$(2) and clock" --reruns 1 -rR $(ARGS) || { last=$$?; [ $$last = 5 -a $$first = 0 ] || exit $$last; }
# a seventh of the largest tables and of the extras, another one each day (tests/README.md); with ARGS every row. "full": the dearest rows, too
test test-keras test-slow test-faults test-cluster test-extras: export HVDTRAIN_TEST_ROUNDS ?= $(if $(ARGS),,day)
# seconds for each test, which only one that hangs takes; pytest-timeout reads it
export PYTEST_TIMEOUT ?= 1000
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT ?= 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM ?= 1
endif

.PHONY: train horovod wheelhouse test test-keras test-torch test-slow test-faults test-cluster test-all test-extras dist mutants test-gpu test-simulated-gpu check test-4 test-debian-13 lock clean no-compiler
.DELETE_ON_ERROR:

train: $(READY) $(HOROVOD)  ## RANKS ranks train on the embedded digits
	timeout --foreground -k 5 $(LIMIT_S) $(MPIRUN) -np $(RANKS) $(PY) -m hvdtrain $(ARGS)

horovod: $(READY)  ## builds it again after it failed; ARGS="--nccl --rebuild"
	rm -f $(VENV)/.horovod
	$(PY) -m hvdtrain.cli.horovod $(ARGS)
	touch $(VENV)/.horovod

wheelhouse: $(READY) $(HOROVOD)  ## wheels for a machine without a network: DIR=wheelhouse ARGS="--without torch --python 3.12"
	[ "$(HOROVOD)" = no-compiler -o -e $(VENV)/.without-horovod ] || $(PY) -m hvdtrain.cli.horovod --copy-to $(DIR)
	$(INSTALL) --extras horovod mpi notebook torchvision --wheelhouse $(DIR) $(ARGS)

test: $(VENV)/.test $(HOROVOD)  ## the fast tests, but for those of `make check`; a seventh of the largest tables: HVDTRAIN_TEST_DAY=2026-11-28
	$(call tests,4,not slow and not faults and not cluster and not gpu and not simulated_gpu,--ignore=tests/test_floors.py)

test-torch:  ## check and the fast tests with another torch, in an environment of its own: make test-torch TORCH=2.9.1
	$(if $(TORCH),,$(error which torch? make test-torch TORCH=2.9.1))
	$(MAKE) VENV=.venv-torch-$(TORCH) check test

# Not in the environment itself: 1.5 GB, and packages that find TensorFlow import it.
test-keras: $(VENV)/keras/.ready  ## Keras on torch, JAX and TensorFlow, libraries of JAX, and transformers, which are installed beside the environment
	PYTHONPATH="$$(echo $(abspath $(VENV))/keras/lib/python3*/site-packages)" $(PY) -m pytest $(call workers,2) tests/horovod_api/test_horovod_keras.py tests/frameworks/test_keras.py tests/frameworks/test_jax_libraries.py tests/frameworks/test_chat_templates.py tests/extras/test_libraries_transformers.py tests/extras/test_libraries_language_models.py tests/extras/test_libraries_page.py $(ARGS)

test-slow: $(VENV)/.test $(HOROVOD)  ## the longest tests: loss curves on 3 and 4 ranks, the tutorials, fuzzing
	$(call tests,3,slow and not faults and not cluster and not gpu)

test-faults: $(VENV)/.test $(HOROVOD)  ## jobs that are killed, run out of memory or disk space, or find damaged files; and how they resume
	$(call tests,3,faults)

# SLURM's jobs run alone: beside other tests the first call of MPI in Horovod has taken minutes under srun, for a reason that is not known
SLURM := tests/cluster/test_cluster_slurm.py
test-cluster: $(VENV)/.test $(HOROVOD)  ## several hosts, SLURM, containers: needs root; installs Debian packages
	$(call tests,3,cluster and not slow,--ignore=$(SLURM))
	@set -x; $(PY) -m pytest -m "cluster and not slow and not clock" $(SLURM) $(ARGS) || [ $$? = 5 ]

test-all:  ## every row of the largest tables too, and how long each part takes; some hours
	HVDTRAIN_TEST_ROUNDS=full .ci/run

test-extras: $(VENV)/.test $(HOROVOD)  ## the fast tests in a copy without an extra: EXTRA=NAME, or all; another one each day where it is not given
	$(PY) tests/support/without_extra.py $(EXTRA) -- -m "not slow and not faults and not cluster and not gpu and not simulated_gpu" $(ARGS)

mutants: $(VENV)/.test $(HOROVOD)  ## changes that break hvdtrain, one at a time in a copy: which tests find each; ARGS are their names
	$(PY) tests/support/mutants.py $(ARGS)

test-gpu: $(VENV)/.test  ## on a machine with an NVIDIA GPU; all other tests compute on the CPU
	$(PY) -m pytest -m gpu $(ARGS)

# In one process: two starts, alone and on two ranks, run every job once.
test-simulated-gpu: $(VENV)/.test  ## jobs on simulated GPUs, which g++ builds once for each version of torch: results, waits, streams, collectives
	$(PY) -m pytest -m "simulated_gpu and not slow" tests/simulated_gpu $(ARGS)

test-debian-13: $(VENV)/.test  ## make train with Python 3.13, in a root folder of Debian 13: needs root, and fetches 3 GB
	$(PY) -m pytest -m "cluster and slow" $(ARGS)

test-4: $(VENV)/.test $(HOROVOD)  ## only the tests that start four ranks
	$(PY) -m pytest -m ranks4 $(ARGS)

check: $(VENV)/.test  ## format, lint, types, floors; the last two at the same time
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy & types=$$!; $(PY) -m pytest -q tests/test_floors.py; floors=$$?; wait $$types && [ $$floors = 0 ]

dist: $(VENV)/.test  ## dist/: the source archive, and the wheel built from it (docs/releasing.md)
	rm -rf dist build
	$(PY) -c "from setuptools import build_meta; build_meta.build_sdist('dist')"
	$(PY) -m pip wheel --no-deps --no-build-isolation --wheel-dir dist dist/hvdtrain-*.tar.gz

lock: $(VENV)/.python  ## constraints.txt from setup.cfg: versions and sha256 of every file; ARGS are options of `uv pip compile`
	$(PY) install.py --packages-only --extras lock
	$(PY) install.py --lock $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

# --system-site-packages means those of the Python under PYTHON, which are others where PYTHON is of a virtual environment itself.
$(VENV)/.python:
	$(PYTHON) -m venv $(if $(filter site,$(TORCH)),--system-site-packages) $(VENV)
	$(if $(filter site,$(TORCH)),$(PYTHON) -c 'import site; print(*site.getsitepackages(), sep="\n")' > "$$(echo $(VENV)/lib/python3*/site-packages)/site.pth")
	touch $@

$(VENV)/.ready-with-mpi-wheel$(OF_TORCH): $(VENV)/.python install.py setup.cfg pyproject.toml constraints.txt
	$(INSTALL) --extras horovod mpi notebook torchvision
	touch $@

# mpi4py is compiled against the site's MPI; its PyPI wheels support only MPICH's and Open MPI's interfaces. The generated C file is huge: -O1
# without debug symbols takes 1.5 minutes instead of 3.7.
$(VENV)/.ready-with-site-mpi$(OF_TORCH): $(VENV)/.python install.py setup.cfg pyproject.toml constraints.txt
	@echo "using this site's MPI: $(SITE_MPICC)"
	CFLAGS="-O1 -g0 $$CFLAGS" $(INSTALL) $(if $(COMPILER),--source mpi4py) --extras horovod notebook torchvision
	touch $@

$(VENV)/.test: $(READY)
	$(INSTALL) --extras test
	touch $@

$(VENV)/keras/.ready: $(VENV)/.test
	$(PY) -m venv $(VENV)/keras
	$(PY) -c 'import site; print(*site.getsitepackages(), sep="\n")' > "$$(echo $(VENV)/keras/lib/python3*/site-packages)/site.pth"
	$(VENV)/keras/bin/python install.py --packages-only --extras keras tensorflow jax-libraries transformers
	touch $@

$(VENV)/.horovod: $(READY)
	$(PY) -m hvdtrain.cli.horovod --or-without
	touch $@

no-compiler:
	@echo "no C++ compiler found: Horovod is left out and training uses the mpi engine (for Horovod, install g++ and run make again)"
