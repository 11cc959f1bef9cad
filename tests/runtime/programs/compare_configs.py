"""A process of a run that compares its config with the others', and prints the hosts of all.

    python compare_configs.py CONFIG|dies

CONFIG: flat config in JSON; with `dies` the process is killed after it has joined.
"""

import json
import os
import signal
import sys

from jtrain.cli.run import run
from jtrain.runtime import multihost, process_comparison


def main() -> int:
    """Exit code 0 if all processes are alike."""
    multihost.join_processes(os.environ)
    if sys.argv[1] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    own = process_comparison.this_process(json.loads(sys.argv[1]))
    print(json.dumps(process_comparison.compare_processes(own)))
    return 0


sys.exit(run(main))
