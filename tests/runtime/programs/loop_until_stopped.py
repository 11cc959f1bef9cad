"""Loops until a signal asks to stop, then saves for a while.

    python loop_until_stopped.py TICKS

TICKS: hundredths of a second that the save takes.
"""

import sys
import time

from jtrain.runtime.signals import StopRequest

with StopRequest() as stop:
    print("looping", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print("saving", flush=True)
    for _ in range(int(sys.argv[1])):
        time.sleep(0.01)
    print("saved", flush=True)
