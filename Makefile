# What the README shows, as targets. Each sets up .venv first, which is quick when nothing changed.

NPROC ?= 2
MODEL ?= tiny
DEVICE ?= auto
DTYPE ?= float32
# How many tests run at once: they wait about as long as they compute.
AT_ONCE ?= 3
TEST_FLAGS = -q -rs --durations 5 $(shell $(BIN)/python -c 'import xdist' 2>/dev/null && \
  printf %s '-n $(AT_ONCE) --dist worksteal')
PYTHON ?= python3
BIN := .venv/bin
# Names with spaces, quotes or dollars reach the shell as they are.
export MODEL DEVICE DTYPE
# torchrun waits for the host by its own name, which does not resolve everywhere.
export PET_LOCAL_ADDR ?= 127.0.0.1
FOUND = $(shell grep -l '__name__ == "__main__"' tasks/*.py)
FIRST := $(patsubst %,tasks/%.py,tp_mlp tp_attention tp_llama dtensor_llama kv_cache ulysses_forward \
  ulysses_finetune)
SCRIPTS = $(FIRST) $(filter-out $(FIRST),$(FOUND))

.PHONY: help demo test test-all stress soak test-real test-course bench max-seq-len report figures
.PHONY: estimate lift tiny-llama gpu gpu-long lint clean
help:
	@echo "make demo         every task, NPROC=$(NPROC) ranks, MODEL=$(MODEL), DTYPE=$(DTYPE)," \
	  "DEVICE=$(DEVICE)"
	@echo "make test-all     the tests; make test: the fast ones"
	@echo "make stress       a sixth of the long tests (PART=2/6: the next; PART=1/1: all, hours)"
	@echo "make soak         fifty kills; make gpu rehearsed (an hour)"
	@echo "make test-real    every task on a real model, SmolLM2-135M (93 MB are fetched)"
	@echo "make test-course  the tests with the course's versions of transformers and peft"
	@echo "make lift         a technique as one file: TASK=tp_llama OUT=file.py"
	@echo "make report       run every task: the tables and outputs of the pages anew"
	@echo "make bench        measure speed (up to two hours); make figures: draw what was measured"
	@echo "make estimate     the memory of a step by each technique, and how many ranks it takes"
	@echo "make max-seq-len  find the longest sequence under limits on memory (an hour)"
	@echo "make gpu          all that one GPU can show, in 20 minutes (DEVICE=cpu rehearses)"
	@echo "make gpu-long     what takes half an hour more there"
	@echo "make tiny-llama   write, train and evaluate the embedded model anew"
	@echo "make lint, make clean"

demo: .venv/ready
	@$(BIN)/python launch/demo.py --nproc $(NPROC) --model "$$MODEL" --dtype "$$DTYPE" \
	  --device "$$DEVICE" $(SCRIPTS)

test: .venv/ready
	$(BIN)/python -m pytest $(TEST_FLAGS) -m quick

test-all: .venv/ready
	$(BIN)/python -m pytest $(TEST_FLAGS) -m "not stress and not real"

# PART=2/6: another part; PART=1/1: all of them.
PART ?= 1/6
stress: .venv/ready
	$(BIN)/python -m pytest $(TEST_FLAGS) -m "stress and not real and not soak" --part $(PART)

soak: .venv/ready
	$(BIN)/python -m pytest -q -rs --durations 5 -m soak

# REAL_TESTS="-m real -k float32": a part of them.
test-real: .venv/ready
	$(BIN)/python -m pytest -q -rs --durations 5 $(or $(REAL_TESTS),-m real)

# COURSE_TESTS="-m quick": a part of them.
test-course: BIN := .venv-course/bin
test-course: .venv-course/ready
	$(BIN)/python -m pytest $(TEST_FLAGS) \
	  $(or $(COURSE_TESTS),-m "not stress and not real")

bench: .venv/ready
	$(BIN)/python -m figures.bench.tp_speed
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node 2 -m figures.bench.pipeline \
	  --json figures/records/pipeline.json
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node 2 -m figures.bench.data_speed \
	  --json figures/records/data_parallel.json
	$(BIN)/python -m figures.bench.worker_speed
	$(BIN)/python -m figures.bench.thread_speed
	$(BIN)/python -m figures.bench.strategies
	$(BIN)/python -m figures.bench.training_memory
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node 2 -m figures.plan.estimate_check \
	  --json figures/records/estimate.json
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node 4 -m figures.bench.mesh_speed \
	  --json figures/records/mesh_speed.json
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node 4 -m figures.bench.ring_speed \
	  --json figures/records/ring_speed.json
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node 2 -m figures.bench.ring_speed \
	  --json figures/records/ring_speed_2.json
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node 2 -m figures.bench.sequence_speed \
	  --num-layers 2 --json figures/records/sequence_speed.json
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node 4 -m figures.bench.sequence_speed \
	  --num-layers 2 --repeats 1 --seq-len 2048 8192 --json figures/records/sequence_speed_4.json
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node 2 -m figures.bench.compiled \
	  --json figures/records/compiled.json
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node 4 -m figures.bench.precise_sums \
	  --dtype bfloat16 --gloo --json figures/records/precise_sums.json

# ESTIMATE="--seq-len 8192 --device-memory 24": its flags. tiny fits anywhere.
estimate: .venv/ready
	$(BIN)/python -m figures.plan.estimate $(if $(filter-out tiny,$(MODEL)),--model "$(MODEL)") $(ESTIMATE)

max-seq-len: .venv/ready
	$(BIN)/python -m figures.bench.longest

# STEP=3: one of its steps. DEVICE=cpu: a rehearsal. OUT=DIR: where its files go. SMOLLM2=DIR: the
# model's directory, where it can neither be fetched nor is in the cache.
GPU = $(BIN)/python -m figures.bench.gpu $(if $(filter cpu,$(DEVICE)),--device cpu) \
  $(if $(OUT),--out "$(OUT)") $(if $(SMOLLM2),--smollm2 "$(SMOLLM2)")
gpu: .venv/ready
	$(GPU) $(if $(STEP),--step $(STEP))

gpu-long: .venv/ready
	$(GPU) --long

report: .venv/ready
	$(BIN)/python -m figures.bench.report

figures: .venv/ready
	$(BIN)/python -m figures.draw

tiny-llama: .venv/ready
	$(BIN)/python tasks/tiny_llama/train.py

# make lift TASK=tp_llama OUT=file.py: a technique as one file.
lift: .venv/ready
	$(BIN)/python launch/lift.py $(if $(TASK),"$(TASK)") $(if $(OUT),"$(OUT)")

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf .venv .venv-course .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# ---------------------------------------------------------------- environments

COURSE := s/^transformers==.*/transformers==4.48.3/; s/^peft==.*/peft==0.14.0/
.venv/ready: PINS :=
.venv-course/ready: PINS := $(COURSE)
# A checkout that was moved: the environment's scripts name the old place. Made anew.
.PHONY: $(shell for dir in .venv .venv-course; do \
  test ! -e $$dir/ready || grep -qsxF "$$(pwd -P)" $$dir/ready || echo $$dir/ready; done)

.venv/ready .venv-course/ready: requirements.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: PYTHON=$(PYTHON): no such program" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "error: Python 3.11 or later is needed: make PYTHON=python3.12 ...")'
	@set -e; dir=$(@D); pins=$$(mktemp); said=$$(mktemp); trap 'rm -f "$$pins" "$$said"' EXIT; \
	trap 'exit 130' INT TERM; sed '$(PINS)' requirements.txt > "$$pins"; site=; folders=; \
	if found=$$($(PYTHON) launch/packages.py torch $$dir 2>/dev/null); then \
	  echo "$$dir: using the PyTorch $$(echo "$$found" | sed -n 1p) of $(PYTHON)"; \
	  sed -i.bak '/^torch==/d' "$$pins"; rm -f "$$pins.bak"; \
	  folders=$$(echo "$$found" | sed 1d); test -n "$$folders" || site=--system-site-packages; \
	else \
	  echo "$$dir: installing $$(grep ^torch== "$$pins") and the rest"; \
	fi; \
	: "(a link to another checkout's environment: that one is left as it is)"; \
	test ! -h $$dir || rm $$dir; \
	if $(PYTHON) -m venv --clear $$site $$dir >/dev/null 2>&1; then \
	  pip="$$dir/bin/python -m pip"; \
	else \
	  $(PYTHON) -m pip --version >/dev/null 2>&1 || { echo "error: $(PYTHON) has neither ensurepip" \
	    "nor pip: install python3-venv (Debian, Ubuntu), or name another with PYTHON=" >&2; exit 1; }; \
	  $(PYTHON) -m venv --clear --without-pip $$site $$dir; \
	  pip="$(PYTHON) -m pip --python $$dir/bin/python"; \
	fi; \
	: "the packages of another virtual environment, behind those that are installed here"; \
	: "(a new environment's own setuptools, older than PyTorch wants, would hide theirs)"; \
	if test -n "$$folders"; then \
	  $$pip uninstall -q -y setuptools >/dev/null 2>&1 || :; \
	  echo "$$folders" > "$$($$dir/bin/python -c \
	    'import sysconfig; print(sysconfig.get_path("purelib"))')/of_another_python.pth"; \
	fi; \
	$$pip install -q -r "$$pins" 2> "$$said" || \
	  $$dir/bin/python launch/packages.py enough "$$said" || { cat "$$said" >&2; exit 1; }; \
	test -x $$dir/bin/torchrun || printf '#!/bin/sh\nexec "$$(dirname "$$0")/python" -m %s "$$@"\n' \
	  torch.distributed.run > $$dir/bin/torchrun && chmod +x $$dir/bin/torchrun; \
	pwd -P > $@
