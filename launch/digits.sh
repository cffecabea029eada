#!/usr/bin/env bash
# Makes docs/results/digits.md again: one base, three seeds of DDRL, DanceGRPO and a data-loss-only control beside them.
# RUNS: the runs' folder. Each finished run is skipped, an interrupted one goes on. One to two hours on two cores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/python.sh
make_venv "${VENV:-.venv}"
"$VENV_PYTHON" -m pip install --quiet -e .
"$VENV_PYTHON" -m ddrl_jax.sidecar build --scorer digits
runs=${RUNS:-runs}

run() {
  local name=$1
  shift
  "$VENV_PYTHON" -m ddrl_jax.main --config=configs/digits.py --workdir="$runs/$name" \
    --config.pretrain.from_run="$runs/digits_base" "$@"
}

"$VENV_PYTHON" -m ddrl_jax.main --config=configs/digits.py --workdir="$runs/digits_base" \
  --config.pretrain.from_run= --config.train.steps=0
for seed in 0 1 2; do
  run "digits_ddrl_$seed" --config.seed="$seed"
done
run digits_dance_0 --config.objective.name=dance_grpo --config.objective.data_beta=0.
run digits_sft_0 --config.objective.name=sft --config.objective.data_beta=1.
"$VENV_PYTHON" docs/results/digits_table.py "$runs"
