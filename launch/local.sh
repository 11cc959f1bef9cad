#!/usr/bin/env bash
# One or several processes on this machine.
#
#   launch/local.sh --config=tiny
#   launch/local.sh -n 2 --config=tiny --with zero3 --emulate-devices 4
#
# With -n N, N processes join over a free port on localhost; each sees all of this machine's devices, so on CPUs add
# --emulate-devices (devices per process), and on GPUs one process for all of them is what you want. A signal to this
# script goes to every process; it exits with the first code that is not 0.
set -euo pipefail

processes=1
if [[ "${1:-}" == "-n" ]]; then
  processes="${2:?-n needs a number of processes}"
  shift 2
fi
PYTHON="${PYTHON:-python}"

if [[ "$processes" == 1 ]]; then
  exec "$PYTHON" -m jtrain.launch "$@"
fi

JTRAIN_COORDINATOR="localhost:$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')"
export JTRAIN_COORDINATOR JTRAIN_NUM_PROCESSES="$processes"

pids=()
trap 'kill -TERM "${pids[@]}" 2>/dev/null || true' TERM INT
for ((id = 0; id < processes; id++)); do
  JTRAIN_PROCESS_ID="$id" "$PYTHON" -m jtrain.launch "$@" &
  pids+=("$!")
done

code=0
for pid in "${pids[@]}"; do
  # A trapped signal ends `wait` early with a code over 128; the process itself is still saving then.
  while true; do
    status=0
    wait "$pid" || status=$?
    kill -0 "$pid" 2>/dev/null || break
  done
  if [[ "$code" == 0 ]]; then code="$status"; fi
done
exit "$code"
