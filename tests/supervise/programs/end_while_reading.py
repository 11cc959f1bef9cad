"""Ends while a thread of its heart still reads the compiled program."""

import os
import threading
import time

from jtrain.supervise.heart import VARIABLE, start_heart

reading, writing = os.pipe()
heart = start_heart({VARIABLE: f"{writing},{writing}"})
assert heart is not None
is_reading = threading.Event()


def describe_collectives() -> str:
    """Goes on for 0.3 s after the main thread has ended."""
    is_reading.set()
    threading.main_thread().join()
    time.sleep(0.3)  # an interpreter that does not wait is gone by then
    print("described", flush=True)
    return ""


heart.describe(describe_collectives)
heart.started(0)
is_reading.wait()
