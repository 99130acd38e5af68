#!/usr/bin/env bash
# Makes .venv in the root of the checkout and installs specdec with the named extras.
# Usage: bash scripts/environment.sh test,docs,dev
# A later call with nothing changed returns at once. PYTHON names another interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=$1
python=${PYTHON:-python3}
ready=".venv/.ready-$extras-$(cat pyproject.toml scripts/environment.sh | cksum | cut -d' ' -f1)"
[ -e "$ready" ] && exit 0

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "specdec needs Python 3.11 or newer; $python is $("$python" -V 2>&1). Set PYTHON to a newer one." >&2
    exit 1
fi
[ -x .venv/bin/python ] || "$python" -m venv .venv
# Torch first and pinned, so that no other package's requirement chooses the build.
.venv/bin/python -c 'import torch' 2>/dev/null || .venv/bin/python -m pip install 'torch==2.13.0'
.venv/bin/python -m pip install -e ".[$extras]"
touch "$ready"
