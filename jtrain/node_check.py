"""`python -m jtrain.node_check`: jtrain/cli/node_check.py."""

import pkgutil
import sys

if __name__ == "__main__":
    sys.exit(pkgutil.resolve_name("jtrain.cli.node_check:main")())
