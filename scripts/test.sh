#!/usr/bin/env bash
# The tests on a fresh machine: sets up .venv and runs pytest. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/environment.sh test,docs,dev
# One thread a worker: two workers with thread pools of their own wait for each other.
OMP_NUM_THREADS=1 exec .venv/bin/python -m pytest -n 2 "$@"
