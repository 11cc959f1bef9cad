"""`python -m jtrain.dashboard`: jtrain/cli/dashboard.py, by name: no module imports from a row above."""

import pkgutil
import sys

sys.exit(pkgutil.resolve_name("jtrain.cli.dashboard:main")())
