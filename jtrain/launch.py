"""`python -m jtrain.launch`: jtrain/cli/launch.py."""

import pkgutil
import sys

if __name__ == "__main__":
    sys.exit(pkgutil.resolve_name("jtrain.cli.launch:main")())
