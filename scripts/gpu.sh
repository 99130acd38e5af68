#!/usr/bin/env bash
# What has to be run on a machine with a GPU: correctness first, then timings. Needs the package with its test and demo
# extras. Two thirds of all cases took eight minutes on 16 cores, so one in three is run; ALL=1 runs all of them.
# ROUNDS names the models of which whole rounds are timed (llama, gemma, smollm2); smollm2 needs PROMPTS, which names
# Spec-Bench's question.jsonl.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
share=(--one-in "$([ -n "${ALL:-}" ] && echo 1 || echo 3)")
OMP_NUM_THREADS=1 python3 -m pytest -q -m gpu -p no:benchmark -n "${WORKERS:-$(nproc)}" --dist worksteal "${share[@]}" tests
python3 examples/benchmarks/verify_attention.py
rounds=()
for model in ${ROUNDS:-llama}; do rounds+=(--part "$model"); done
python3 examples/benchmarks/gpu_rounds.py "${rounds[@]}" ${PROMPTS:+--prompts "$PROMPTS"}
