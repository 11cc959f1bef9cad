"""`python -m jtrain.checkpoint`: see jtrain/cli/checkpoint.py."""

import sys

from jtrain.cli.checkpoint import main

sys.exit(main())
