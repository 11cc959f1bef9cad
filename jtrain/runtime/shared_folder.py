"""Proof at a start that all processes of a run see one workdir and can write to it."""

import contextlib
import secrets
import socket
from pathlib import Path

from jtrain.errors import UserError
from jtrain.runtime import multihost
from jtrain.runtime.agreement import Agreement, FolderCarrier
from jtrain.runtime.store_paths import WAY_OUT, in_store, said

PATIENCE_S = 60.0
"""Time for a network file system to show a file that another host wrote: NFS keeps listings for up to 60 s."""

_WAY_OUT = (
    "Set --workdir to a folder that all hosts share (NFS, Lustre, ...), or to gs://bucket/run or s3://bucket/run."
)


def check_shared(folder: Path, *, patience_s: float = PATIENCE_S) -> None:
    """Checks that every process can write to `folder`, and that process 0 and each other process see the same one.

    Each process writes a file with a random token of process 0, reads the file of process 0, and process 0 reads all.
    All processes must call it, and all raise the same error.

    Args:
      folder: a folder on a disk, created if missing, or in an object store.
      patience_s: time to wait for files of other processes to appear.

    Raises:
      UserError: some process cannot write there, or does not see what process 0 writes.
    """
    index, count = multihost.process_index(), multihost.process_count()
    if count == 1 and not in_store(folder):
        return  # what a run refuses before it writes leaves no folder behind
    token = multihost.gather_texts(secrets.token_hex(8))[0]
    probe = Agreement("", FolderCarrier(folder), process=index, processes=count)
    topic = f".probe-{token}"
    failed = ""
    try:
        probe.tell(topic, token)
    except Exception as error:  # clients of object stores raise many types
        failed = said(error)
    wrote = multihost.gather_texts(failed)
    hosts = multihost.gather_texts(socket.gethostname())
    if not any(wrote):
        asked = range(count) if index == 0 else [0]
        texts = probe.collect(topic, of=asked, seconds=patience_s, counts=lambda text: text == token)
        failed = ",".join(str(process) for process in asked if process not in texts)
    unseen_by = multihost.gather_texts(failed)  # also keeps the files until every process has read them
    with contextlib.suppress(Exception):  # 16 bytes that nothing reads
        probe.withdraw(topic)
    if any(wrote):
        process = next(number for number, text in enumerate(wrote) if text)
        who = "" if count == 1 else f" by process {process} on host {hosts[process]}"
        raise UserError(
            f"--workdir {folder} cannot be written to{who} ({wrote[process]}). "
            + (WAY_OUT if in_store(folder) else "Fix the cause, or choose another --workdir.")
        )
    apart = sorted(
        {int(other) for text in unseen_by[:1] for other in text.split(",") if other}
        | {process for process, text in enumerate(unseen_by) if process and text}
    )
    if apart:
        others = ", ".join(f"process {process} on host {hosts[process]}" for process in apart)
        raise UserError(
            f"--workdir {folder} is not one shared folder: process 0 on host {hosts[0]} and {others} do not see each "
            f"other's files there, after waiting for {patience_s:.0f} s. {_WAY_OUT}"
        )
