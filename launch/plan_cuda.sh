#!/usr/bin/env bash
# Makes an environment with the compiler for NVIDIA cards (3.4 GB; no card is needed) and runs the tests that plan for
# them: about 15 minutes on two cores. Arguments go to pytest: bash launch/plan_cuda.sh -k 14B
# To plan a run of your own: .venv-plan/bin/python -m ddrl_jax.main --mode=plan --config=configs/cosmos2b.py
#   --config.plan.target=h100:256
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/python.sh
make_venv "${VENV:-.venv-plan}"
"$VENV_PYTHON" -m pip install --quiet -e '.[plan-cuda]' 'pytest>=8.3'
exec "$VENV_PYTHON" -m pytest -m cuda_plan --durations=0 tests/test_plan_targets.py "$@"
