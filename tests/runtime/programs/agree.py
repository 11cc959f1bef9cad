"""One of three processes: all agree through jax's service, and each prints the answers it got."""

import json
import os
from typing import Any

import numpy as np
from jax._src import xla_bridge

from jtrain.runtime import multihost

multihost.join_processes(os.environ)
me = multihost.agreement("before").process
texts = multihost.agreement("before").gather("devices", f"text {me}", seconds=60.0)
answers: dict[str, Any] = {"texts": texts, "no_backend": not xla_bridge.backends_are_initialized()}
multihost.process_count()
answers["gathered"] = [multihost.gather_texts("x" * (me + 1) * 1000 + str(turn)) for turn in range(3)]
answers["zero"] = multihost.from_process_zero(np.asarray([[1.5, me]], np.float32)).tolist()
answers["same"] = [multihost.same_everywhere("a"), multihost.same_everywhere(str(me))]
task = multihost.agreement("task")
if me != 1:
    task.tell("part", "done")
answers["missing"] = task.missing(task.collect("part", seconds=0.5))
gathered = multihost.agreement("gather")
answers["left"] = [number for number in range(6) if gathered.told(str(number))] if me == 0 else [5]
multihost.gather_texts("")
print(json.dumps(answers))
