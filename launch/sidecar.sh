#!/usr/bin/env bash
#SBATCH --job-name=ddrl-rewards
#SBATCH --nodes=1
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#
# A fleet of reward servers: several on this node or, submitted with sbatch, on every node of a Slurm job. Prints the
# address of each once all answer. Arguments go to `python -m ddrl_jax.sidecar serve`:
#
#   TOKEN_FILE=token COUNT=2 bash launch/sidecar.sh --scorer brightness --codec wan:path=FILE
#   TOKEN_FILE=token TORCH_DEVICES="$(echo cuda:{0..7})" sbatch --nodes=2 --gpus-per-node=8 launch/sidecar.sh --scorer ...
#
# A token is made by: (umask 077 && openssl rand -hex 32 >token)
# Variables:
#   TOKEN_FILE  file with the token; without it DDRL_SIDECAR_TOKEN. It is on no command line
#   TORCH_DEVICES  such as "cuda:0 cuda:1"; server n takes number n modulo their count. Default cpu
#   COUNT       servers a node; default one a device
#   LISTEN      address to listen on; default 127.0.0.1, within Slurm 0.0.0.0
#   PORT        server n listens on PORT + n; default 0, any free port
#   ADDRESSES   file for the addresses, one a line; within Slurm, where all nodes must see it, default rewards-JOB.txt
#   RESTARTS    how often a server that dies is started again, on its port; default 3
#   PYTHON      an interpreter with torch; default that of `python -m ddrl_jax.sidecar build --scorer digits`
#   LOCAL       N: COUNT=N on this machine, within a Slurm job too
# The trainer's reward.url takes one address: launch/slurm_h100.sbatch and launch/tpu_pod.sh give each of a run's processes
# one of a file's (REWARD_URLS=FILE). A load balancer must keep a client on one server, which alone knows its batch, unless
# the servers share a queue: --queue redis://HOST:PORT among the arguments.
set -euo pipefail
if [ -n "${SLURM_SUBMIT_DIR:-}" ] && [ -z "${LOCAL:-}" ]; then
  cd "$SLURM_SUBMIT_DIR"
else
  cd "$(dirname "${BASH_SOURCE[0]}")/.."
fi
source launch/local.sh
read_token
if [ -z "$DDRL_SIDECAR_TOKEN" ]; then
  echo "error: no token; set TOKEN_FILE=FILE, or DDRL_SIDECAR_TOKEN" >&2
  exit 2
fi
in_slurm=
if [ -n "${SLURM_JOB_ID:-}" ] && [ -z "${LOCAL:-}" ]; then in_slurm=1; fi

if [ -n "$in_slurm" ] && [ -z "${FLEET_PARTS:-}" ]; then
  # The batch script: itself once a node, each with a part of the addresses.
  ADDRESSES=$(realpath "${ADDRESSES:-rewards-$SLURM_JOB_ID.txt}")
  export FLEET_PARTS=$ADDRESSES.parts
  rm -rf "$FLEET_PARTS" "$ADDRESSES"
  mkdir "$FLEET_PARTS"
  trap 'rm -rf "$FLEET_PARTS"' EXIT
  srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 --label bash launch/sidecar.sh "$@" &
  srun=$!
  while kill -0 "$srun" 2>/dev/null; do
    parts=("$FLEET_PARTS"/*.txt)
    if [ ! -e "$ADDRESSES" ] && [ -e "${parts[0]}" ] && [ "${#parts[@]}" = "$SLURM_JOB_NUM_NODES" ]; then
      cat "${parts[@]}" >"$FLEET_PARTS/all"
      mv "$FLEET_PARTS/all" "$ADDRESSES" # whole, or not there
      cat "$ADDRESSES"
    fi
    sleep 1
  done
  wait "$srun"
  exit
fi

if [ -n "$in_slurm" ]; then
  ADDRESSES=$FLEET_PARTS/$(printf '%05d' "$SLURM_PROCID").txt
  LISTEN=${LISTEN:-0.0.0.0}
fi
PYTHON=${PYTHON:-$HOME/.cache/ddrl_jax/sidecar/digits/bin/python}
if [ ! -x "$(command -v "$PYTHON")" ]; then
  echo "error: PYTHON='$PYTHON': there is no such interpreter; make it with: python -m ddrl_jax.sidecar build" >&2
  exit 2
fi
LISTEN=${LISTEN:-127.0.0.1}
PORT=${PORT:-0}
TORCH_DEVICES=${TORCH_DEVICES:-cpu}
RESTARTS=${RESTARTS:-3}
COUNT=${LOCAL:-${COUNT:-$(wc -w <<<"$TORCH_DEVICES")}}
need_number COUNT
for name in PORT RESTARTS; do
  [[ ${!name} =~ ^[0-9]+$ ]] || { echo "error: $name='${!name}': must be a whole number" >&2 && exit 2; }
done
if [ -n "${ADDRESSES:-}" ] && ! : 2>/dev/null >"$ADDRESSES.new"; then
  echo "error: ADDRESSES='$ADDRESSES': cannot be written" >&2
  exit 2
fi
ready=$(mktemp -d)
trap 'rm -rf "$ready"' EXIT

# port_of INDEX: where that server listens.
port_of() { sed -E 's/.*"port": *([0-9]+).*/\1/' "$ready/$1.json"; }

# serve INDEX ARGUMENT...: that server, started again when it dies.
# shellcheck disable=SC2329 # called by begin
serve() {
  local index=$1 port=$((PORT > 0 ? PORT + $1 : 0)) starts=$RESTARTS told='' status
  shift
  trap 'told=1' TERM
  while true; do
    status=0
    "$PYTHON" -m ddrl_jax.sidecar serve --host "$LISTEN" --port "$port" --device "$(pick "$TORCH_DEVICES" "$index")" \
      --token-env DDRL_SIDECAR_TOKEN --ready-file "$ready/$index.json" "$@" || status=$?
    # 2 is bad input, which no start mends.
    if [ -n "$told" ] || ((status == 0 || status == 2 || starts == 0)); then return "$status"; fi
    starts=$((starts - 1))
    if [ -e "$ready/$index.json" ]; then port=$(port_of "$index"); fi
    echo "ended with status $status; started again, $starts starts left"
  done
}

announce() {
  local index name=$LISTEN lines=''
  if [ "$LISTEN" = 0.0.0.0 ]; then name=${SLURMD_NODENAME:-$(hostname -f)}; fi
  for ((index = 0; index < COUNT; index++)); do
    while [ ! -s "$ready/$index.json" ]; do sleep 0.2; done
    lines+="http://$name:$(port_of "$index")"$'\n'
  done
  printf '%s' "$lines"
  if [ -n "${ADDRESSES:-}" ]; then
    printf '%s' "$lines" >"$ADDRESSES.new"
    mv "$ADDRESSES.new" "$ADDRESSES"
  fi
}

for ((index = 0; index < COUNT; index++)); do
  begin serve "$index" "$@" >&2
done
announce &
announcer=$!
status=0
until_all_end || status=$?
kill "$announcer" 2>/dev/null || true
exit "$status"
