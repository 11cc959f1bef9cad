"""`python -m jtrain.generate`: see jtrain/cli/generate.py."""

import sys

from jtrain.cli.generate import main

if __name__ == "__main__":
    sys.exit(main())
