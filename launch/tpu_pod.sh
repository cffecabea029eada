#!/usr/bin/env bash
# A run on all hosts of a Cloud TPU slice, from here over ssh; jax finds the hosts and their numbers by itself.
#
#   export TPU=my-slice ZONE=us-east5-a
#   bash launch/tpu_pod.sh install                 # this checkout's HEAD and its dependencies, on every host
#   bash launch/tpu_pod.sh train --config=configs/cosmos2b.py --workdir=/shared/runs/cosmos2b
#   bash launch/tpu_pod.sh stop                    # the run saves and ends; so does Ctrl-C here. train again resumes
#
# The workdir, the weights and the data must be on a file system that every host mounts.
# Variables:
#   TPU, ZONE, PROJECT  the slice, as gcloud knows it; PROJECT: gcloud's default
#   FOLDER       the checkout on the hosts, below the home folder; default ddrl_jax
#   REWARD_URLS  file here with the addresses of sidecars, as launch/sidecar.sh writes it: host p asks number p modulo
#                their count. Without it the config's reward.launch and reward.url hold
#   TOKEN_FILE   file on the hosts with the sidecars' token
#   LOCAL        N: no TPU, N processes on this machine's CPU, DEVICES each:  LOCAL=2 bash launch/tpu_pod.sh train ...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/local.sh
usage() {
  echo "error: $1; usage: TPU=NAME ZONE=ZONE bash launch/tpu_pod.sh install | train ARGUMENT... | stop" >&2
  exit 2
}
action=${1:-}
[[ $action =~ ^(install|train|stop)$ ]] || usage "'$action' is no action"
shift
folder=${FOLDER:-ddrl_jax}
if [ -n "${LOCAL:-}" ]; then
  [ "$action" = train ] || usage "LOCAL is for train"
  folder=$PWD
  PYTHON=$(default_python)
  export PYTHON
elif [ -z "${TPU:-}" ] || [ -z "${ZONE:-}" ]; then
  usage "TPU and ZONE are needed"
fi
where=(--zone="${ZONE:-}" ${PROJECT:+--project="$PROJECT"})

# everywhere COMMAND: on every host, at once.
everywhere() { gcloud compute tpus tpu-vm ssh "$TPU" "${where[@]}" --worker=all --command="$1"; }

if [ "$action" = stop ]; then
  # shellcheck disable=SC2016 # the hosts' own
  everywhere 'kill -TERM "$(cat .ddrl_jax.pid)"'
  exit
fi
if [ "$action" = install ]; then
  pack=$(mktemp -d)
  trap 'rm -rf "$pack"' EXIT
  git archive --format=tar.gz --output="$pack/ddrl_jax.tar.gz" HEAD
  gcloud compute tpus tpu-vm scp "$pack/ddrl_jax.tar.gz" "$TPU:" "${where[@]}" --worker=all
  everywhere "mkdir -p $(printf %q "$folder") && tar -xzf ddrl_jax.tar.gz -C $(printf %q "$folder") \
    && cd $(printf %q "$folder") && source launch/python.sh && make_venv .venv && .venv/bin/python -m pip install -e '.[tpu]'"
  exit
fi

# A host's number ends its name; the command line of `exec` has neither the token nor more than one address.
URLS=
if [ -n "${REWARD_URLS:-}" ]; then
  need_file REWARD_URLS
  URLS=$(tr '\n' ' ' <"$REWARD_URLS")
fi
printf -v start 'cd %q && export PYTHON=%q URLS=%q TOKEN_FILE=%q && source launch/local.sh' \
  "$folder" "${PYTHON:-.venv/bin/python}" "$URLS" "${TOKEN_FILE:-}"
# shellcheck disable=SC2016 # the hosts' own
start+=' && train_process "${JAX_PROCESS_ID:-${HOSTNAME##*-}}"'
if (($# > 0)); then start+=$(printf ' %q' "$@"); fi
status=0
if [ -n "${LOCAL:-}" ]; then
  run_local "$LOCAL" bash -c "$start" || status=$?
  exit "$status"
fi
# The number of the process, which `exec` keeps, is what `stop` asks for.
everywhere "echo \$\$ >.ddrl_jax.pid && $start" &
ssh=$!
trap 'bash launch/tpu_pod.sh stop || true' TERM INT
await "$ssh" || status=$?
exit "$status"
