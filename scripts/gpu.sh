#!/usr/bin/env bash
# What has to be run on a machine with a GPU: correctness first, then timings. Needs the package with its test and demo
# extras; PROMPTS names Spec-Bench's question.jsonl, without which the real model is left out.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python3 -m pytest -q -m gpu -p no:benchmark -n "${WORKERS:-8}" tests
python3 examples/benchmarks/verify_attention.py
if [ -n "${PROMPTS:-}" ]; then
  python3 examples/benchmarks/gpu_rounds.py --prompts "$PROMPTS"
else
  python3 examples/benchmarks/gpu_rounds.py --part llama --part gemma
fi
