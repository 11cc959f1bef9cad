"""Begins an index in a folder as one of several processes; holds its place until stdin ends.

    python hold_place.py FOLDER PLAN

PLAN: JSON of what the index is made of.
"""

import json
import sys
from pathlib import Path

from jtrain.data.pretokenized.build_process import BuildProcess

with BuildProcess(Path(sys.argv[1])) as process:
    process.begin("web", json.loads(sys.argv[2]))
    print(process.name, flush=True)
    sys.stdin.read()
