"""A process of a run that joins the others and presents its devices.

python present_devices.py [EMULATED_DEVICES]
"""

import os
import sys

from jtrain.cli.run import run
from jtrain.runtime import multihost, platform


def main() -> int:
    """Exit code 0 if the devices fit those of the others."""
    if len(sys.argv) > 1:
        platform.start_jax(os.environ, emulate_devices=int(sys.argv[1]))
    multihost.join_processes(os.environ)
    platform.present_devices()
    return 0


sys.exit(run(main))
