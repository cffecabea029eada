# shellcheck shell=bash
# Sourced by the launchers: runs several processes on this machine as one, and ends them as one.

# default_python: $PYTHON, else the checkout's .venv, else the PATH's. Prints it.
default_python() {
  if [ -n "${PYTHON:-}" ]; then
    echo "$PYTHON"
  elif [ -x .venv/bin/python ]; then
    echo "$PWD/.venv/bin/python"
  else
    command -v python3 || { echo "error: no python3 on the PATH; set PYTHON=/path/to/python" >&2 && return 2; }
  fi
}

# need_number NAME: the variable of that name is a whole number above 0.
need_number() {
  [[ ${!1} =~ ^[1-9][0-9]*$ ]] || { echo "error: $1='${!1}': must be a whole number above 0" >&2 && return 2; }
}

# need_file NAME: the variable of that name is a file that can be read and has something in it.
need_file() {
  if ! [ -f "${!1}" ] || ! grep -q '[^[:space:]]' -- "${!1}" 2>/dev/null; then
    echo "error: $1='${!1}': must be a file that can be read and is not empty" >&2
    return 2
  fi
}

# need_program NAME PROGRAM: what the variable of that name stands for can be run.
need_program() {
  [ -n "$(command -v -- "$2")" ] || { echo "error: $1='$2': there is no such program" >&2 && return 2; }
}

# pick SPACED_LIST INDEX: the entry INDEX modulo the list's length.
pick() {
  local -a entries
  read -ra entries <<<"${1//$'\n'/ }"
  echo "${entries[$2 % ${#entries[@]}]}"
}

# read_token: $DDRL_SIDECAR_TOKEN, out of TOKEN_FILE where that is given. A command line would show it to everyone.
read_token() {
  if [ -n "${TOKEN_FILE:-}" ]; then
    need_file TOKEN_FILE || return
    DDRL_SIDECAR_TOKEN=$(tr -d '[:space:]' <"$TOKEN_FILE")
  fi
  export DDRL_SIDECAR_TOKEN=${DDRL_SIDECAR_TOKEN:-}
}

# train_process NUMBER ARGUMENT...: becomes that process of a run. Of several addresses in $URLS it takes one.
train_process() {
  local number=$1
  shift
  read_token || exit
  if [ -n "${URLS:-}" ]; then
    set -- "$@" --config.reward.launch=False --config.reward.url="$(pick "$URLS" "$number")"
  fi
  exec "$PYTHON" -m ddrl_jax.main "$@"
}

# await PID: its status once it has ended. A plain `wait` is cut short by a trap; here traps run between two looks.
await() {
  while kill -0 "$1" 2>/dev/null; do sleep 0.2; done
  wait "$1"
}

# begin COMMAND...: starts it in the background, in a process group of its own, each line marked with its number in $pids.
pids=()
begin() {
  local index=${#pids[@]}
  set -m # only with job control does a background process get a group of its own, and keep Ctrl-C
  "$@" </dev/null > >(trap '' INT TERM && exec sed -u "s/^/$index: /") 2>&1 &
  set +m
  pids+=($!)
}

# until_all_end: waits for all that `begin` started. Once one fails the others get SIGTERM, and SIGKILL GRACE (30)
# seconds later. SIGTERM and Ctrl-C go to all of them; a second one kills. Returns the status of the first that failed.
until_all_end() {
  local first=0 told=TERM deadline=0 pid status index
  local -a left=("${pids[@]}")
  signal_all() { for pid in "${left[@]}"; do kill "-$1" -- "-$pid" 2>/dev/null || true; done; }
  # shellcheck disable=SC2329 # called by the trap
  pass_on() {
    signal_all "$told"
    told=KILL
  }
  trap pass_on TERM INT
  while ((${#left[@]} > 0)); do
    # Polled: `wait -n` of some versions of bash misses a child that a signal ended, and needs bash 4.3.
    sleep 0.2
    for index in "${!left[@]}"; do
      pid=${left[index]}
      if kill -0 "$pid" 2>/dev/null; then
        if ((deadline > 0 && SECONDS >= deadline)); then kill -KILL -- "-$pid" 2>/dev/null || true; fi
        continue
      fi
      status=0
      wait "$pid" || status=$?
      unset "left[index]"
      if ((status != 0 && first == 0)); then
        first=$status
        if ((${#left[@]} > 0)); then echo "a process ended with status $status; the others are ended too" >&2; fi
        signal_all TERM
        deadline=$((SECONDS + ${GRACE:-30}))
      fi
    done
  done
  trap - TERM INT
  return "$first"
}

# run_local COUNT COMMAND...: COUNT processes joined by jax.distributed, on the CPU, DEVICES (1) devices each. Returns
# what until_all_end does.
run_local() {
  local LOCAL=$1 DEVICES=${DEVICES:-1} index python port
  shift
  need_number LOCAL && need_number DEVICES || return
  python=$(default_python) || return
  need_program PYTHON "$python" || return
  port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  for ((index = 0; index < LOCAL; index++)); do
    begin env JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES="$DEVICES" JAX_COORDINATOR_ADDRESS="127.0.0.1:$port" \
      JAX_NUM_PROCESSES="$LOCAL" JAX_PROCESS_ID="$index" "$@"
  done
  until_all_end
}
