"""`jtrain launch` in a process that may map so many bytes: malloc fails above it.

python train_within.py BYTES ARGUMENT...
"""

import resource
import sys

from jtrain.cli import launch
from jtrain.train import setup

limit, *arguments = sys.argv[1:]
# As where nothing says what is there: whatever is free now, the run starts.
setup.available_bytes = lambda devices: None
resource.setrlimit(resource.RLIMIT_AS, (int(limit), int(limit)))
sys.exit(launch.main(arguments))
