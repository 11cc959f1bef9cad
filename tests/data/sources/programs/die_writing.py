"""Is killed while it writes a file of the cache.

python die_writing.py FILE
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from jtrain.data.sources.cache import write_once


def write(out: Any) -> None:
    """Writes a half, and dies."""
    out.write(b"ha")
    out.flush()
    os.kill(os.getpid(), signal.SIGKILL)


write_once(Path(sys.argv[1]), write, label="a")
