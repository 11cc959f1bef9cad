"""Event files for TensorBoard, written record by record so that a full disk never stops a run.

tensorboardX's SummaryWriter writes in a thread: on a full disk the thread ends, and once its queue holds 10
events the next `add_scalar` waits for ever.
"""

import socket
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jtrain.telemetry.append_file import AppendFile


class EventFile:
    """Event file of one attempt.

    Args:
      folder: TensorBoard's folder; made if missing.
      start_step: readers drop what earlier attempts wrote after this step.
      say: prints a warning.
    """

    def __init__(self, folder: Path, *, start_step: int, say: Callable[[str], None]) -> None:
        from tensorboardX.proto import event_pb2  # lazy: 0.4 s

        self._events: Any = event_pb2
        # File names have whole seconds only; the step tells attempts of the same second apart.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.from{start_step}"
        self._file = AppendFile(folder / name, say=say)
        # Every event file begins with this event.
        self._add(file_version="brain.Event:2")
        # A START event makes readers drop events of earlier files from this step on.
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._add(step=start_step + 1, session_log=start)

    def add(self, step: int, numbers: Iterable[tuple[str, float]]) -> None:
        """Writes numbers, each with its tag, as one event of `step`."""
        from tensorboardX.summary import scalar

        summary: Any = None
        # One event for all numbers of a step, since each event has a header and two checksums of its own.
        for tag, number in numbers:
            value_summary = scalar(tag, number)
            if summary is None:
                summary = value_summary
            else:
                summary.MergeFrom(value_summary)
        if summary is not None:
            self._add(step=step, summary=summary)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _add(self, **fields: Any) -> None:
        from tensorboardX.record_writer import masked_crc32c

        data = self._events.Event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(data))
        # TFRecord: length, its checksum, data, its checksum.
        checksums = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
        self._file.append(length + checksums[0] + data + checksums[1])
