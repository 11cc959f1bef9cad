"""Prints the parameters of functions as JSON, a line each; null for one that is not there.

python show_parameters.py MODULE:FUNCTION...
"""

import importlib
import inspect
import json
import sys

for word in sys.argv[1:]:
    module, _, name = word.partition(":")
    function = getattr(importlib.import_module(module), name, None)
    print(json.dumps(None if function is None else list(inspect.signature(function).parameters)))
