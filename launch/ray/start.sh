#!/usr/bin/env bash
# Makes this host a node of the Ray cluster that data.engine=ray needs. Returns at once; `ray stop` undoes it.
#
#   launch/ray/start.sh head             on one host: prints what the others must be given
#   launch/ray/start.sh HOST:6379        on each of the others, CPU-only ones too: they will read and tokenise
#
# Loaders inherit this environment, not the trainer's: set credentials (AWS_*, HF_TOKEN, ...) and PYTHONPATH here.
# More options go to `ray start`, for example --object-store-memory=4000000000.
set -euo pipefail

where="${1:?say head, or HOST:PORT of the head}"
shift
# The Ray of the Python that trains: both must be the same version.
RAY="$(dirname "$(command -v "${PYTHON:-python}")")/ray"
if [[ ! -x "$RAY" ]]; then
  echo "error: no ray beside ${PYTHON:-python}: pip install 'jtrain[ray]'" >&2
  exit 2
fi
if [[ "$where" == head ]]; then
  "$RAY" start --head --port=6379 --include-dashboard=false --disable-usage-stats "$@"
  echo "On each other host: launch/ray/start.sh $(hostname -I | cut -d' ' -f1):6379"
else
  "$RAY" start --address="$where" --disable-usage-stats "$@"
fi
