"""`jtrain node_check` on a host whose clock is ahead.

python check_node.py AHEAD_S ARGUMENT...
"""

import sys
import time

from jtrain.cli import node_check

now, ahead_s = time.time, int(sys.argv[1])
time.time = lambda: now() + ahead_s
sys.exit(node_check.main(sys.argv[2:]))
