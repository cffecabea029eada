#!/usr/bin/env bash
# launch/gke_tpu.yaml with what is yours filled in, for kubectl; arguments, if there are any, are the run's:
#
#   IMAGE=... SIDECAR_IMAGE=... TPU=v6e TOPOLOGY=16x16 bash launch/gke_tpu.sh \
#     --config=configs/cosmos2b.py --workdir=/data/runs/cosmos2b | kubectl apply -f -
#
# Variables (defaults are the file's):
#   NAME           of the JobSet; its address for rewards is NAME-rewards
#   IMAGE          an image with ddrl_jax[tpu];  SIDECAR_IMAGE  one with ddrl_jax[sidecar] and without jax
#   TPU            v5p, v6e or v5e;  TOPOLOGY  such as 4x4x8;  CHIPS  of a host, 4
#   SIDECARS       reward servers;  SIDECAR_ARGS  arguments of `ddrl_jax.sidecar serve`
#   CLAIM          the volume claim that is /data
#   PYTHON         an interpreter with PyYAML, as the trainer's has
#   LOCAL          N: no cluster: the file's commands, one server and N trainers, on this machine's CPU, DEVICES each,
#                  with the folder DATA (default runs/gke) as /data, and SIDECAR_PYTHON (default that of
#                  `ddrl_jax.sidecar build --scorer digits`) for the server
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/local.sh
python=$(default_python)
need_program PYTHON "$python"
if [ -z "${LOCAL:-}" ]; then
  exec "$python" launch/gke_tpu.py manifest "$@"
fi

need_number LOCAL
data=${DATA:-runs/gke}
if ! mkdir -p "$data" 2>/dev/null; then
  echo "error: DATA='$data': no folder can be made there" >&2
  exit 2
fi
data=$(realpath "$data")
scratch=$(mktemp -d)
server=
# shellcheck disable=SC2329 # called by the trap
finish() {
  if [ -n "$server" ]; then
    kill -TERM "$server" 2>/dev/null || true
    await "$server" || true
  fi
  rm -rf "$scratch"
}
trap finish EXIT
DDRL_SIDECAR_TOKEN=$("$python" -c 'import secrets; print(secrets.token_urlsafe(32))')
export DDRL_SIDECAR_TOKEN

# words JOB ...: the words of its command, into the array of that name.
words() {
  "$python" launch/gke_tpu.py command "$1" "$data" "${@:2}" >"$scratch/words"
  mapfile -d '' -t "$1" <"$scratch/words"
}
declare -a sidecar=() trainer=()
read -ra more <<<"${SIDECAR_ARGS:-}"
words sidecar -- ${more[@]+"${more[@]}"}
# As in the cluster, but for the address, which is to be free, and the device. The containers' `python` is the PATH's.
server_python=${SIDECAR_PYTHON:-$HOME/.cache/ddrl_jax/sidecar/digits/bin/python}
need_program SIDECAR_PYTHON "$server_python"
env PATH="$(dirname "$server_python"):$PATH" "${sidecar[@]}" \
  --host 127.0.0.1 --port 0 --device cpu --ready-file "$scratch/ready.json" >&2 &
server=$!
until [ -s "$scratch/ready.json" ]; do
  sleep 0.2
  if ! kill -0 "$server" 2>/dev/null; then
    echo "error: the reward server did not start" >&2
    exit 2
  fi
done
url=http://127.0.0.1:$(sed -E 's/.*"port": *([0-9]+).*/\1/' "$scratch/ready.json")
words trainer REWARD_URL="$url" -- "$@"
PATH=$(dirname "$python"):$PATH
status=0
run_local "$LOCAL" "${trainer[@]}" || status=$?
exit "$status"
