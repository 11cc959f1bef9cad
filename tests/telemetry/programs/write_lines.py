"""Writes lines of metrics until it is killed, and prints the step of each.

    python write_lines.py WORKDIR LINE

LINE: JSON of a line's fields.
"""

import dataclasses
import io
import itertools
import json
import sys
from pathlib import Path

from jtrain.telemetry.metrics import MetricsSpec, TrainLine
from jtrain.telemetry.metrics_writer import Metrics

metrics = Metrics(Path(sys.argv[1]), MetricsSpec(), num_steps=10**9, start_step=0, stream=io.StringIO())
line = TrainLine(**json.loads(sys.argv[2]))
for step in itertools.count(1):
    metrics.train(dataclasses.replace(line, step=step, loss_nats=1 / step))
    print(step, flush=True)
