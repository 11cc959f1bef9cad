"""`jtrain launch` on a machine of another name; a workdir is free 3 s after its process was last heard of.

    python launch_on.py MACHINE ARGUMENT...

MACHINE: empty for this one.
"""

import sys

from jtrain.cli import launch
from jtrain.runtime import lease

machine, *arguments = sys.argv[1:]
lease.STALE_S, lease.WATCH_S = 3.0, 1.0
if machine:
    lease.this_machine = lambda: machine
sys.exit(launch.main(arguments))
