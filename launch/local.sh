#!/usr/bin/env bash
# One or several processes on this machine, with a supervisor that names a crash or a hang and restarts the run.
#
#   launch/local.sh --config=tiny
#   launch/local.sh -n 2 --config=tiny --with zero3 --emulate-devices 4
#
# With -n N, N processes join over a free port on localhost; each sees all of this machine's devices, so on CPUs add
# --emulate-devices (devices per process), and on GPUs one process for all of them is what you want. A signal to this
# script goes to every process; if one fails, all are ended, and the code is that of the first to fail.
set -euo pipefail

exec "${PYTHON:-python}" -m jtrain.launch --supervise "$@"
