# Everything sets itself up: `make demo` and `make test` need Python 3.11 and make, nothing else.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= torch==2.13.0
# Modules are compiled when they are first imported: most of what comes with torch never is.
PIP_FLAGS := --quiet --disable-pip-version-check --no-compile
# Processes of the suite; PYTEST_ARGS are added to every call of pytest.
JOBS ?= logical
PYTEST_ARGS ?=
MUTANTS_ARGS ?=
GPU_ARGS ?=
DEMO_ARGS ?=
SCALING_ARGS ?=
REPEAT ?= 10
KILLS ?= 200
# torch_xla has wheels for Linux on x86-64 alone; elsewhere its half of the tests is left out, and said to be.
HAS_XLA := $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m))

.PHONY: demo test mutants gpu lint test-torch test-xla proof kills repeat bench scaling venv venv-xla venv-tpu test-tpu notebook teacher clean
.DEFAULT_GOAL := demo

# DEVICE=xla: torch_xla's device, a TPU where there is one, else the CPU by way of PJRT.
DEVICE ?= auto
FINDS_TPU := -c "import sys; from qat_lora import is_tpu_available; sys.exit(not is_tpu_available())"

ifeq ($(DEVICE),xla)
demo: venv-xla
	.venv-xla/bin/python $(FINDS_TPU) || export PJRT_DEVICE=$${PJRT_DEVICE:-CPU}; .venv-xla/bin/qat-lora demo --device tpu $(DEMO_ARGS)
else
demo: venv  ## all five steps on the embedded teacher, under five minutes on two cores
	.venv/bin/qat-lora demo --device $(DEVICE) $(DEMO_ARGS)
endif

# Both environments are made side by side: most of it is waiting and unpacking.
test:  ## everything: linters, types, the suite on torch, and on torch_xla what it may change
	$(MAKE) --no-print-directory -j2 venv $(if $(HAS_XLA),venv-xla)
	$(MAKE) --no-print-directory lint test-torch $(if $(HAS_XLA),test-xla,test-xla-absent)

lint: venv
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

test-torch: venv
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n $(JOBS) $(PYTEST_ARGS)

# What torch_xla and the oldest torch that is supported may change: devices, numbers, steps, exports. Not files and words.
XLA_TESTS ?= tests/runtime tests/quant tests/kd tests/models tests/adapters tests/train tests/export tests/test_equivalence.py
test-xla: venv-xla  ## on torch 2.9 with torch_xla, on its CPU device: its own tests, and those that it may change
	PJRT_DEVICE=CPU OMP_NUM_THREADS=1 .venv-xla/bin/python -m pytest -n $(JOBS) \
		-m "not slow and not tpu_compiler and not ranks" $(XLA_TESTS) $(PYTEST_ARGS)

test-tpu: venv-xla venv-tpu  ## every kind of step, compiled for a v6e by libtpu; nothing is run
	PJRT_DEVICE=CPU .venv-xla/bin/python -m pytest -m tpu_compiler tests/test_tpu_compile.py $(PYTEST_ARGS)

notebook: venv-xla  ## the notebook with SMALL on, from start to end, on torch_xla's CPU device
	PJRT_DEVICE=CPU .venv-xla/bin/python -m pytest tests/test_notebooks.py $(PYTEST_ARGS)

test-xla-absent:
	@echo "torch_xla has no wheel for this platform: the suite ran on $(TORCH) only"

proof: venv  ## the slow proofs: the demo's bars at 2 and 4 bits, KILLS kills of each command
	KILLS=$(KILLS) .venv/bin/python -m pytest -m slow -s $(PYTEST_ARGS)

mutants: venv  ## plants one fault at a time, and says which ones no test sees
	.venv/bin/python -m tests.mutants $(MUTANTS_ARGS)

gpu: venv  ## for a machine with one GPU: does everything run there, is it right, how fast; at most 8 minutes
	.venv/bin/python benchmarks/gpu.py $(GPU_ARGS)

kills: venv  ## KILLS builds of a cache that die at random moments and are continued; KILL_SEED=n draws the same moments
	KILLS=$(KILLS) .venv/bin/python -m pytest -m slow -s tests/cache/test_kills.py $(PYTEST_ARGS)

# What fails once in ten times does not show in one run of the suite: threads of several ranks end in any order.
repeat: venv $(if $(HAS_XLA),venv-xla)  ## the tests that ranks hold equal bits, REPEAT times, up to the first failure
	@for i in $$(seq $(REPEAT)); do \
		start=$$(date +%s); \
		.venv/bin/python -m pytest -q tests/runtime/test_distributed.py -k equal_bits $(PYTEST_ARGS) \
			|| { echo "failed in repetition $$i of $(REPEAT)"; exit 1; }; \
		test -z "$(HAS_XLA)" || PJRT_DEVICE=CPU .venv-xla/bin/python -m pytest -q tests/runtime/test_xla_ranks.py \
			-k equal_bits $(PYTEST_ARGS) \
			|| { echo "failed in repetition $$i of $(REPEAT), on XLA devices"; exit 1; }; \
		echo "repetition $$i of $(REPEAT) passed in $$(( $$(date +%s) - start )) s"; \
	done

bench: venv
	.venv/bin/python benchmarks/step_time.py

scaling: venv  ## bytes per step and time with two ranks on this machine, efficiency of TPU slices on paper
	.venv/bin/python benchmarks/scaling.py $(SCALING_ARGS)

teacher: venv  ## make the embedded teacher anew (about an hour)
	.venv/bin/python scripts/train_embedded_teacher.py

venv: .venv/.ready
venv-xla: .venv-xla/.ready
venv-tpu: .venv-tpu/.ready

# torch comes first and by version, so that every machine tests the same one.
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install $(PIP_FLAGS) "$(TORCH)"
	.venv/bin/pip install $(PIP_FLAGS) -c constraints.txt -e ".[dev]"
	@touch $@

.venv-xla/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-xla
	.venv-xla/bin/pip install $(PIP_FLAGS) -c constraints.txt -e ".[xla,dev,notebook]"
	! .venv-xla/bin/python $(FINDS_TPU) || .venv-xla/bin/pip install $(PIP_FLAGS) -c constraints.txt -e ".[tpu]"
	@touch $@

# libtpu compiles for a TPU on a machine without one; benchmarks/tpu_compile.py makes the same by itself.
.venv-tpu/.ready:
	$(PYTHON) -m venv .venv-tpu
	.venv-tpu/bin/pip install $(PIP_FLAGS) "jax[tpu]==0.10.2" "libtpu==0.0.42.1"
	@touch $@

clean:
	rm -rf .venv .venv-xla .venv-tpu build *.egg-info .pytest_cache .mypy_cache .ruff_cache
