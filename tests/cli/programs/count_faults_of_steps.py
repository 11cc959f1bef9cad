"""Trains 16 steps of tiny, and prints the page faults from each to the next as JSON.

python count_faults_of_steps.py WORKDIR
"""

import io
import itertools
import json
import resource
import sys

from jtrain.cli import launch


class StepLines(io.StringIO):
    """Output that notes the page faults so far at each line of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def write(self, text: str) -> int:
        if text.startswith("step "):
            self.counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        return len(text)


output, sys.stdout = sys.stdout, StepLines()
sets = ("num_steps=16", "model.num_layers=1", "metrics.log_every_steps=1", "eval.every_steps=None")
flags = [word for text in sets for word in ("--set", text)]
code = launch.main(["--config=tiny", "--workdir", sys.argv[1], *flags])
print(json.dumps([after - before for before, after in itertools.pairwise(sys.stdout.counts)]), file=output)
sys.exit(code)
