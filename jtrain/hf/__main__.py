"""`python -m jtrain.hf`: see jtrain/cli/hf.py."""

import sys

from jtrain.cli.hf import main

sys.exit(main())
