"""`python -m jtrain.check`: jtrain/cli/check.py, by name: no module imports from a row above its own."""

import pkgutil
import sys

sys.exit(pkgutil.resolve_name("jtrain.cli.check:main")())
