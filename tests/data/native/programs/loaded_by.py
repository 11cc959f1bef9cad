"""Imports a module, then prints which of some packages are loaded.

python loaded_by.py MODULE PACKAGE...
"""

import importlib
import sys

importlib.import_module(sys.argv[1])
print(sorted(set(sys.argv[2:]) & set(sys.modules)))
