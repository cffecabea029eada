#!/usr/bin/env bash
# Makes an environment with the test extra and runs everything: lint, types, the whole test suite.
# Arguments go to pytest: bash launch/test.sh -m 'not slow'
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/python.sh
make_venv "${VENV:-.venv-test}"
"$VENV_PYTHON" -m pip install --quiet -e '.[test]'
"$VENV_PYTHON" -m ruff check .
"$VENV_PYTHON" -m ruff format --check .
"$VENV_PYTHON" -m mypy
exec "$VENV_PYTHON" -m pytest -n 2 --durations=10 "$@"
