"""`python -m jtrain.generate`: jtrain/cli/generate.py."""

import pkgutil
import sys

if __name__ == "__main__":
    sys.exit(pkgutil.resolve_name("jtrain.cli.generate:main")())
