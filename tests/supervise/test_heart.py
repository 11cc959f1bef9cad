"""The heartbeat of a process that ends."""

import subprocess
import sys

ENDING = """
import os, threading, time
from jtrain.supervise.heart import VARIABLE, start_heart
reading, writing = os.pipe()
heart = start_heart({VARIABLE: f"{writing},{writing}"})
within = threading.Event()

def collectives():
    within.set()
    threading.main_thread().join()
    time.sleep(0.3)  # an interpreter that does not wait is gone by then
    print("described", flush=True)
    return ""

heart.describe(collectives)
heart.started(0)
within.wait()
"""


def test_a_process_ends_only_when_its_heart_has_read_the_compiled_program() -> None:
    """Python would abort it: reading is C++ code in a thread, which must not be there when the interpreter
    closes.
    """
    done = subprocess.run(
        [sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (0, "described\n"), done.stderr
