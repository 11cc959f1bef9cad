"""Runs commands in this process; prints their exit codes, and which packages are loaded then.

    python list_loaded.py PACKAGES COMMAND...

PACKAGES: names between commas. COMMAND: JSON list of a module and its arguments, as `python -m` takes them.
"""

import json
import runpy
import sys

packages, *commands = sys.argv[1:]
codes: list[object] = []
for command in commands:
    sys.argv = json.loads(command)
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        codes.append(end.code)
print(json.dumps([codes, sorted(set(packages.split(",")) & set(sys.modules))]))
