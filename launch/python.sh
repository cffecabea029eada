# shellcheck shell=bash
# Sourced by the scripts beside it: finds a Python of 3.11 or newer and makes virtual environments.

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3 python; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return 0
    fi
  done
  echo "error: no Python of 3.11 or newer on the PATH; set PYTHON=/path/to/python" >&2
  return 2
}

# make_venv DIR: makes it if it is missing; sets VENV_PYTHON.
make_venv() {
  local python
  if [ ! -x "$1/bin/python" ]; then
    python=$(find_python)
    "$python" -m venv "$1" || {
      echo "error: $python cannot make a virtual environment; on Debian: apt-get install python3-venv" >&2
      return 2
    }
  fi
  VENV_PYTHON=$1/bin/python
  "$VENV_PYTHON" -m pip install --quiet --upgrade pip
}
