"""`python -m jtrain.profile`: see jtrain/cli/profile.py."""

import sys

from jtrain.cli.profile import main

sys.exit(main())
