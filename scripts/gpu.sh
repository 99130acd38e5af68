#!/usr/bin/env bash
# What has to be run on a machine with a GPU: correctness first, then timings. Needs the package with its test and demo
# extras. ROUNDS names the models of which whole rounds are timed (llama, gemma, smollm2); smollm2 needs PROMPTS, which
# names Spec-Bench's question.jsonl. With the first alone it takes less than eight minutes on 16 cores and an H200, most
# of them for compiling kernels.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
OMP_NUM_THREADS=1 python3 -m pytest -q -m gpu -p no:benchmark -n "${WORKERS:-$(nproc)}" --dist worksteal tests
python3 examples/benchmarks/verify_attention.py
rounds=()
for model in ${ROUNDS:-llama}; do rounds+=(--part "$model"); done
python3 examples/benchmarks/gpu_rounds.py "${rounds[@]}" ${PROMPTS:+--prompts "$PROMPTS"}
