"""Starts a child, `start_a_busy_child.py child`, which holds 32 MiB and uses CPU time until it is killed."""

import subprocess
import sys

if sys.argv[1:] == ["child"]:
    data = b"x" * (32 << 20)
    print(len(data), flush=True)
    while True:
        pass
subprocess.run([sys.executable, __file__, "child"], check=True)
