"""`python -m jtrain.data`: see jtrain/cli/data.py."""

import sys

from jtrain.cli.data import main

sys.exit(main())
