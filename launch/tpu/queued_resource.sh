#!/usr/bin/env bash
# Asks for TPU slices, waits for them and trains on them with pod.sh. Where they are preempted, or a host is faulty (76),
# it gives them back and asks again, and the run goes on from its last save. Where a store or a disk is away (77) for the
# hour of the supervisors, it starts them again, four times in a row. The slices are kept when the run is done.
#
#   ZONE=us-east5-a TYPE=v5p-16 RUNTIME=v2-alpha-tpuv5 SLICES=2 SETUP='pip install ...' \
#     launch/tpu/queued_resource.sh NAME --config=llama8b --set mesh.replica=2 --workdir=gs://bucket/run
#
# SETUP runs on each worker before the training command; OPTIONS are more of gcloud's, such as --spot or --reserved.
set -euo pipefail
name="${1:?say the name of the queued resource}"
shift
resource() { gcloud compute tpus queued-resources "$1" "$name" --zone="${ZONE:?set ZONE}" "${@:2}"; }
state() { resource describe --format="value(state.state)" 2>/dev/null || echo NONE; }

export NAMES="$name"
nodes=(--node-id="$name")
if ((${SLICES:-1} > 1)); then
  NAMES="$(seq --format="$name-%.0f" --separator=" " 0 $((SLICES - 1)))"
  nodes=(--node-count="$SLICES" --node-prefix="$name")
fi
away=0 # how often in a row the run has ended with 77
read -ra options <<<"${OPTIONS:-}"

while :; do
  now="$(state)"
  echo "queued resource $name: $now"
  case "$now" in
    ACTIVE) ;;
    NONE)
      resource create --accelerator-type="${TYPE:?set TYPE}" --runtime-version="${RUNTIME:?set RUNTIME}" \
        "${nodes[@]}" "${options[@]}"
      continue
      ;;
    FAILED | SUSPENDED)
      resource delete --force --quiet
      continue
      ;;
    *)
      sleep "${POLL_S:-30}"
      continue
      ;;
  esac
  code=0
  for node in $NAMES; do
    gcloud compute tpus tpu-vm ssh "$node" --zone="$ZONE" --worker=all --command="${SETUP:-true}"
  done
  "$(dirname "${BASH_SOURCE[0]}")/pod.sh" "$@" || code=$?
  sleep "${POLL_S:-30}" # the state of slices that were taken away changes some seconds later
  away=$((code == 77 ? away + 1 : 0))
  if ((code == 76)); then
    resource delete --force --quiet
  elif ((code == 77 && away <= 4)); then
    echo "what the run needs is away (77): start $away of 4"
  elif ((code == 0 || code == 2)) || [[ "$(state)" == ACTIVE ]]; then
    echo "give the slices back: gcloud compute tpus queued-resources delete $name --zone=$ZONE --force"
    exit "$code"
  fi
done
