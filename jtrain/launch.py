"""`python -m jtrain.launch`: see jtrain/cli/launch.py."""

import sys

from jtrain.cli.launch import main

if __name__ == "__main__":
    sys.exit(main())
