"""A run on a Ray cluster: Ray starts one training process per node, and jtrain does the rest.

    python launch/ray/train.py --nodes 2 --gpus 8 --config=llama8b --workdir=/shared/run

The options that follow --nodes and --gpus are those of `python -m jtrain.launch`. The exit code is that of
the first process to fail; 75 means that all have saved on request (SIGTERM or Ctrl-C here).
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import ray
import ray.exceptions
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


class Trainer:
    """Actor on a node: starts the training process there, and passes on what ends it."""

    def coordinator(self) -> str:
        with socket.socket() as free:
            free.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def start(self, folder: str, arguments: list[str], settings: dict[str, str]) -> None:
        # setpriv: if this actor is killed, the kernel sends SIGTERM to the process, which saves and ends.
        command = ["setpriv", "--pdeathsig", "TERM", sys.executable, "-m", "jtrain.launch", "--supervise"]
        self.process = subprocess.Popen([*command, *arguments], env=os.environ | settings, cwd=folder)

    def code(self, timeout_s: float) -> int | None:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        self.process.terminate()


parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--nodes", type=int, required=True)
parser.add_argument("--gpus", type=int, default=0, help="of each node")
options, arguments = parser.parse_known_args()
ray.init(address="auto")
place = placement_group([{"CPU": 1, "GPU": options.gpus}] * options.nodes, strategy="STRICT_SPREAD")
if not place.wait(60):
    print(
        f"error: no {options.nodes} nodes with {options.gpus} free GPUs each; see `ray status`",
        file=sys.stderr,
    )
    sys.exit(2)
actor: Any = ray.remote(num_cpus=1, num_gpus=options.gpus)(Trainer)
bundles = [
    PlacementGroupSchedulingStrategy(place, placement_group_bundle_index=i) for i in range(options.nodes)
]
trainers: list[Any] = [actor.options(scheduling_strategy=bundle).remote() for bundle in bundles]
shared = {
    "JTRAIN_COORDINATOR": ray.get(trainers[0].coordinator.remote()),
    "JTRAIN_NUM_PROCESSES": str(options.nodes),
}
for i, trainer in enumerate(trainers):
    ray.get(trainer.start.remote(os.getcwd(), arguments, shared | {"JTRAIN_PROCESS_ID": str(i)}))
asked_to_stop: list[int] = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: asked_to_stop.append(number))
codes: dict[int, int] = {}
while len(codes) < options.nodes:
    if asked_to_stop:
        ray.get([trainer.stop.remote() for trainer in trainers])
        asked_to_stop.clear()
    try:
        for i, code in enumerate(ray.get([trainer.code.remote(0.5) for trainer in trainers])):
            if code is not None:
                codes.setdefault(i, code)
    except ray.exceptions.RayActorError as error:
        # The actors end with this process, and their trainers, asked to save, after them.
        sys.exit(f"error: Ray has lost a node of this run. {error}")
sys.exit(next((code for code in codes.values() if code), 0))
