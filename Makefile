.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help install fix check test test-all golden bench gpu reproduce demo demo-mllm demo-multitask clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: $(STAMP)  ## make .venv with everything (CPU torch; README.md says how on CUDA)

# torch is the only pinned step: this spec is the CPU build, a range would fetch gigabytes of CUDA.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "torch==2.13.0"
	$(BIN)/python -m pip install --quiet -e ".[hf,diffusers,demo,ray,datasets,tensorboard,dev]"
	touch $(STAMP)

fix: install  ## format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: install  ## lint, types, import contracts; changes nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

test: install  ## the test suite, under ten minutes on 2 cores
	$(BIN)/python -m pytest -q -m "not slow and not gpu" -n 3 --dist loadfile

test-all: install  ## everything, many processes and minutes
	$(BIN)/python -m pytest -q -m "not gpu"

golden: install  ## rewrite golden files, docs/schemas and docs/reference.md; review them like code
	$(BIN)/python docs/generate.py
	MMPLAN_GOLDEN=write $(BIN)/python -m pytest -q -k golden

bench: install  ## benchmarks; each prints both sides and their ratio
	$(BIN)/python benchmarks/bench_solver.py
	$(BIN)/python benchmarks/bench_convex.py
	$(BIN)/python benchmarks/bench_solve_time.py
	$(BIN)/python benchmarks/bench_mpsp.py
	$(BIN)/python benchmarks/bench_reorder.py
	$(BIN)/python benchmarks/bench_quality.py
	$(BIN)/python benchmarks/bench_gap.py
	$(BIN)/python benchmarks/bench_regret.py
	$(BIN)/python benchmarks/bench_training.py
	$(BIN)/python benchmarks/bench_prediction.py
	$(BIN)/python benchmarks/bench_emulation.py
	$(BIN)/python benchmarks/bench_simulator.py
	$(BIN)/python benchmarks/bench_published.py
	$(BIN)/python benchmarks/bench_mfu.py
	$(BIN)/python benchmarks/bench_proof.py
	$(BIN)/python benchmarks/bench_restart.py
	$(BIN)/python benchmarks/bench_save.py
	$(BIN)/python benchmarks/bench_sequence_parallel.py
	$(BIN)/python benchmarks/bench_slow_ranks.py
	$(BIN)/python benchmarks/bench_traces.py
	$(BIN)/python benchmarks/bench_zero3.py
	$(BIN)/python benchmarks/bench_goodput.py
	$(BIN)/python benchmarks/bench_data.py

gpu: install  ## what one GPU can show: profile, memory, overhead; one line of JSON for each part
	$(BIN)/python benchmarks/bench_gpu.py

reproduce: install  ## plan the papers' workloads under every system; writes docs/reproduction.md
	$(BIN)/python benchmarks/reproduce.py

DEMO := runs/demo
# A core for each worker, two at least: what a step takes is predicted for ranks that do not share.
WORKERS := $(shell getconf _NPROCESSORS_ONLN | awk '{print ($$1 < 2 ? 2 : ($$1 > 4 ? 4 : $$1))}')
CLIP := examples/clip-digits

demo: install  ## plan and train a small CLIP on scanned digits, 2 to 4 workers; leaves report.html
	rm -rf $(DEMO)
	mkdir -p $(DEMO)
	$(BIN)/mmplan profile $(CLIP)/workload.yaml -o $(DEMO)/profile.json
	$(BIN)/mmplan solve $(CLIP)/workload.yaml --profile $(DEMO)/profile.json --devices $(WORKERS) -o $(DEMO)/plan.json
	$(BIN)/mmplan check $(DEMO)/plan.json
	$(BIN)/mmlaunch verify $(DEMO)/plan.json
	$(BIN)/mmlaunch run $(DEMO)/plan.json --run-dir $(DEMO)/run --save-every 100
	$(BIN)/mmplan report $(DEMO)/run -o report.html
	$(BIN)/python $(CLIP)/evaluate.py $(DEMO)/run

DEMO_MLLM := runs/demo-mllm
MLLM := examples/mllm-digits

demo-mllm: install  ## plan and train a small multimodal LLM: encoder, decoder, generator; 4 workers
	rm -rf $(DEMO_MLLM)
	mkdir -p $(DEMO_MLLM)
	$(BIN)/mmplan profile $(MLLM)/workload.yaml --data -o $(DEMO_MLLM)/profile.json
	$(BIN)/mmplan solve $(MLLM)/workload.yaml --profile $(DEMO_MLLM)/profile.json --devices 4 --solver convex -o $(DEMO_MLLM)/plan.json
	$(BIN)/mmplan check $(DEMO_MLLM)/plan.json
	$(BIN)/mmlaunch verify $(DEMO_MLLM)/plan.json
	$(BIN)/mmlaunch run $(DEMO_MLLM)/plan.json --run-dir $(DEMO_MLLM)/run --save-every 200
	$(BIN)/mmplan report $(DEMO_MLLM)/run -o $(DEMO_MLLM)/report.html
	$(BIN)/python $(MLLM)/evaluate.py $(DEMO_MLLM)/run

DEMO_MULTITASK := runs/demo-multitask
MULTITASK := examples/multitask-digits

demo-multitask: install  ## plan and train six senses of digits: five tasks over shared encoders; 4 workers
	rm -rf $(DEMO_MULTITASK)
	mkdir -p $(DEMO_MULTITASK)
	$(BIN)/mmplan profile $(MULTITASK)/workload.yaml -o $(DEMO_MULTITASK)/profile.json
	$(BIN)/mmplan solve $(MULTITASK)/workload.yaml --profile $(DEMO_MULTITASK)/profile.json --devices 4 --solver mpsp -o $(DEMO_MULTITASK)/plan.json
	$(BIN)/mmplan check $(DEMO_MULTITASK)/plan.json
	$(BIN)/mmlaunch verify $(DEMO_MULTITASK)/plan.json
	$(BIN)/mmlaunch run $(DEMO_MULTITASK)/plan.json --run-dir $(DEMO_MULTITASK)/run --save-every 100
	$(BIN)/mmplan report $(DEMO_MULTITASK)/run -o $(DEMO_MULTITASK)/report.html
	$(BIN)/python $(MULTITASK)/evaluate.py $(DEMO_MULTITASK)/run

clean:  ## remove what was built and run
	rm -rf $(VENV) runs report.html build *.egg-info
