#!/usr/bin/env bash
# The training command on every worker of TPU slices that are there: one name, or several for a run over all of them.
#
#   ZONE=us-east5-a NAMES=mine launch/tpu/pod.sh --config=llama8b --workdir=gs://bucket/run
#   ZONE=us-east5-a NAMES="mine-0 mine-1" launch/tpu/pod.sh --config=llama8b --set mesh.replica=2 --workdir=gs://bucket/run
#
# PYTHON is a Python of the workers with jtrain[tpu] (default: .venv/bin/python in the home folder). Ctrl-C or SIGTERM
# stops the run with a save (75); where the connection is lost, it goes on, and the same command is refused until it ends.
set -euo pipefail
read -ra names <<<"${NAMES:?set NAMES to the TPUs, as gcloud compute tpus tpu-vm list prints them}"
zone="--zone=${ZONE:?set ZONE to the zone of the TPUs}"

addresses=() # of all workers, slice by slice, in the order of their numbers
for name in "${names[@]}"; do
  found="$(gcloud compute tpus tpu-vm describe "$name" "$zone" --format="value(networkEndpoints[].ipAddress.list(separator=' '))")"
  read -ra found <<<"$found"
  addresses+=("${found[@]}")
done

# A worker finds its number by its address. The first one is the coordinator, of jax and of the slices.
arguments="$(printf ' %q' "$@")"
remote="addresses='${addresses[*]}' slices=${#names[@]} python=${PYTHON:-.venv/bin/python}"'
number=0
for address in $addresses; do
  case " $(hostname -I) " in *" $address "*) break ;; esac
  number=$((number + 1))
done
first=${addresses%% *} count=$(echo "$addresses" | wc -w)
export JTRAIN_COORDINATOR=$first:8476 JTRAIN_NUM_PROCESSES=$count JTRAIN_PROCESS_ID=$number
if [ "$slices" -gt 1 ]; then # libtpu reaches the other slices over the network of the data center
  export MEGASCALE_COORDINATOR_ADDRESS=$first MEGASCALE_NUM_SLICES=$slices MEGASCALE_SLICE_ID=$((number * slices / count))
fi
echo $$ >jtrain.pid
exec "$python" -m jtrain.launch --supervise'"$arguments"

on() { gcloud compute tpus tpu-vm ssh "$1" "$zone" --worker=all --command="$2"; }
stop() {
  echo "stopping with a save" >&2
  for name in "${names[@]}"; do on "$name" 'kill -TERM "$(cat jtrain.pid)"' & done
}
trap stop INT TERM

slices=()
for name in "${names[@]}"; do
  on "$name" "$remote" &
  slices+=("$!")
done
code=0
for slice in "${slices[@]}"; do
  while :; do # a signal interrupts `wait`
    ended=0
    wait "$slice" || ended=$?
    kill -0 "$slice" 2>/dev/null || break
  done
  if ((code != 76 && (ended == 76 || ended > code))); then code=$ended; fi # a faulty host before all else
done
exit "$code"
