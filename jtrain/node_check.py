"""`python -m jtrain.node_check`: see jtrain/cli/node_check.py."""

import sys

from jtrain.cli.node_check import main

if __name__ == "__main__":
    sys.exit(main())
