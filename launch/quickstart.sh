#!/usr/bin/env bash
# The quick start: makes a virtual environment, installs, runs, and ends by printing the report's path.
# Arguments go to the run: bash launch/quickstart.sh --config.seed=1
# PYTHON: the interpreter (3.11 or newer). VENV: the environment's folder. WORKDIR: the run's folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/python.sh
make_venv "${VENV:-.venv}"
"$VENV_PYTHON" -m pip install --quiet -e .
# The scorer's environment is its own: it has torch and no jax.
"$VENV_PYTHON" -m ddrl_jax.sidecar build --scorer digits
exec "$VENV_PYTHON" -m ddrl_jax.main --config=configs/quickstart.py --workdir="${WORKDIR:-runs/quickstart}" "$@"
