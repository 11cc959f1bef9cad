"""Ends as a command does that has a bug, or finds faulty hardware.

python fail.py bug|hardware
"""

import sys

from jtrain.cli.run import run
from jtrain.errors import HardwareFault


def fail() -> int:
    """Raises what the argument names."""
    if sys.argv[1] == "hardware":
        raise HardwareFault("device 3 of host a")
    return int("a word")


sys.exit(run(fail))
