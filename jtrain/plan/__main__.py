"""`python -m jtrain.plan`: see jtrain/cli/plan.py."""

import sys

from jtrain.cli.plan import main

sys.exit(main())
