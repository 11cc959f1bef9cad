"""Supervisor of processes that beat as a training process does.

    python supervise.py PROCESSES SIGNALS BEHAVIOUR [ARGUMENT...]

SIGNALS: numbers of those that it ignores at its start, separated by commas.
BEHAVIOUR: one of `beat.py`.
"""

import os
import signal
import sys
from pathlib import Path

from jtrain.supervise.supervisor import Supervisor

processes, ignored, *behaviour = sys.argv[1:]
for number in filter(None, ignored.split(",")):
    signal.signal(int(number), signal.SIG_IGN)
command = [sys.executable, str(Path(__file__).with_name("beat.py")), *behaviour]
sys.exit(Supervisor(command, os.environ, processes=int(processes), workdir=None).run())
