"""Agreement of the processes of a run: each tells a short text under a topic, and gets the texts of all.

What carries the texts is an argument: jax's coordination service, which process 0 runs (`ServiceCarrier`),
files in a folder that all hosts share (`FolderCarrier`; the supervisors, which have no jax, and the proof
that a workdir is shared), or a dict for a process alone. No device takes part, so threads in the background
may call it, and a process that is gone is named after a deadline. `multihost.agree` and `multihost.gather`
are the exception, and say why. Standard library only.
"""

import contextlib
import math
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jtrain.runtime.atomic_io import write_whole

EVERYONE = "all"
"""Author of a text that one process tells for all."""

_SLICE_S = 1.0
"""Longest wait for one process, after which all texts are read again: another one may have told what is
enough."""


class ProcessesSilent(Exception):
    """Some processes told nothing in time; the message names them."""


@runtime_checkable
class Carrier(Protocol):
    """Place where texts are put under a key, each with an author: the number of a process, or EVERYONE."""

    def put(self, key: str, author: str, text: str) -> None:
        """Stores a text."""
        ...

    def read(self, key: str, authors: Collection[str]) -> dict[str, str]:
        """Returns the texts that are there, by author."""
        ...

    def wait(self, key: str, author: str, seconds: float) -> None:
        """Waits until this author's text may have come, for so many seconds at most."""
        ...

    def remove(self, key: str, author: str) -> None:
        """Removes what this author has put there; with EVERYONE, all texts whose key begins like this."""
        ...


class DictCarrier:
    """Texts of a process that is alone."""

    def __init__(self) -> None:
        self._texts: dict[tuple[str, str], str] = {}

    def put(self, key: str, author: str, text: str) -> None:
        self._texts[key, author] = text

    def read(self, key: str, authors: Collection[str]) -> dict[str, str]:
        return {author: self._texts[key, author] for author in authors if (key, author) in self._texts}

    def wait(self, key: str, author: str, seconds: float) -> None:
        raise AssertionError(f"nobody else tells {key}")

    def remove(self, key: str, author: str) -> None:
        # Each task of a process that is alone has a carrier of its own (`multihost.agreement`).
        self._texts.clear()


class ServiceCarrier:
    """Texts in jax's coordination service; each is put once.

    Args:
      client: jax's client of the service.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def put(self, key: str, author: str, text: str) -> None:
        self._client.key_value_set(f"jtrain/{key}/{author}", text)

    def read(self, key: str, authors: Collection[str]) -> dict[str, str]:
        # A text for all is read alone: the directory of a key grows with the processes.
        if EVERYONE in authors:
            return self._read_one(key)
        prefix = f"jtrain/{key}/"
        texts = {name.rpartition(prefix)[2]: text for name, text in self._client.key_value_dir_get(prefix)}
        return {author: texts[author] for author in authors if author in texts}

    def _read_one(self, key: str) -> dict[str, str]:
        """Returns the text for all, without those of the processes, which may be thousands."""
        try:
            return {EVERYONE: self._client.key_value_try_get(f"jtrain/{key}/{EVERYONE}")}
        except Exception as error:  # jax raises JaxRuntimeError for a missing key as for a lost connection
            if "NOT_FOUND" not in str(error):
                raise
            return {}

    def wait(self, key: str, author: str, seconds: float) -> None:
        try:
            # In whole milliseconds, the unit of jax's client, and never 0.
            self._client.blocking_key_value_get(f"jtrain/{key}/{author}", max(1, int(1000 * seconds)))
        except Exception as error:  # jax raises JaxRuntimeError for a timeout as for a lost connection
            if "DEADLINE_EXCEEDED" not in str(error):
                raise

    def remove(self, key: str, author: str) -> None:
        self._client.key_value_delete(f"jtrain/{key}/" + ("" if author == EVERYONE else author))


class FolderCarrier:
    """Texts in files of a folder, which may be in an object store; a text that is put again replaces the one
    before.

    Args:
      folder: a folder that all hosts share.
      poll_s: time between two looks for a file; a network file system tells nobody about a new one.
    """

    def __init__(self, folder: Path, *, poll_s: float = 0.05) -> None:
        self.folder = folder
        self._poll_s = poll_s

    def put(self, key: str, author: str, text: str) -> None:
        file = self.file(key, author)
        if "://" in str(self.folder):  # a store writes whole objects, and has no folders to make
            file.write_text(text)
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            # Not durable: after a power cut no process is left to read it.
            write_whole(file, text, durable=False)

    def read(self, key: str, authors: Collection[str]) -> dict[str, str]:
        texts = {}
        # Opened one by one: a network file system may keep an old list of names for a minute.
        for author in authors:
            with contextlib.suppress(OSError):
                texts[author] = self.file(key, author).read_text()
        return texts

    def wait(self, key: str, author: str, seconds: float) -> None:
        time.sleep(min(seconds, self._poll_s))

    def remove(self, key: str, author: str) -> None:
        self.file(key, author).unlink(missing_ok=True)

    def file(self, key: str, author: str) -> Path:
        """Returns the file of a text."""
        return self.folder / f"{key}-{author}"


class Agreement:
    """Texts of one task, on which all processes work at the same time.

    Args:
      task: the same in all processes, and of no other task of this run.
      process, processes: number of this process, and of all.
    """

    def __init__(self, task: str, carrier: Carrier, *, process: int, processes: int) -> None:
        self.process = process
        self.processes = processes
        self._task = task
        self._carrier = carrier

    @property
    def is_alone(self) -> bool:
        return self.processes == 1

    def tell(self, topic: str, text: str) -> None:
        """Tells a text of this process; with most carriers once for each topic."""
        self._carrier.put(self._key(topic), str(self.process), text)

    def told(self, topic: str) -> dict[int, str]:
        """Returns the texts that processes have told so far, by process."""
        return self.collect(topic, seconds=0.0)

    def collect(
        self,
        topic: str,
        *,
        seconds: float,
        of: Collection[int] | None = None,
        counts: Callable[[str], bool] = lambda text: True,
        enough: Callable[[str], bool] = lambda text: False,
    ) -> dict[int, str]:
        """Returns the texts of all processes, or those that came in time.

        Args:
          of: processes that are asked; None for all.
          counts: True for an answer; another text is one that was told earlier, for another purpose.
          enough: True for a text after which the others are not waited for.
        """
        authors = [str(process) for process in (range(self.processes) if of is None else of)]
        return {
            int(author): text for author, text in self._wait(topic, authors, seconds, counts, enough).items()
        }

    def _wait(
        self,
        topic: str,
        authors: list[str],
        seconds: float,
        counts: Callable[[str], bool] = lambda text: True,
        enough: Callable[[str], bool] = lambda text: False,
    ) -> dict[str, str]:
        key, until_s = self._key(topic), time.monotonic() + seconds
        while True:
            # Read before the clock is looked at: with 0 seconds there is still one reading.
            texts = {
                author: text for author, text in self._carrier.read(key, authors).items() if counts(text)
            }
            missing = [author for author in authors if author not in texts]
            # `enough` also ends a wait: one failure told is an answer for all.
            left_s = until_s - time.monotonic()
            if not missing or any(enough(text) for text in texts.values()) or left_s <= 0:
                return texts
            # Waits for one of them, so that thousands of processes do not ask all the time.
            self._carrier.wait(key, missing[0], min(left_s, _SLICE_S))

    def gather(self, topic: str, text: str, *, seconds: float) -> list[str]:
        """Tells a text and returns those of all processes, in their order.

        Raises:
          ProcessesSilent: some told nothing in time.
        """
        self.tell(topic, text)
        # Own text first, then the wait: with both the other way round all would wait for each other.
        texts = self.collect(topic, seconds=seconds)
        if silent := self.silent(texts):
            raise ProcessesSilent(f"no word from {silent} within {seconds:g} s about {self._key(topic)}")
        return [texts[process] for process in range(self.processes)]

    def announce(self, topic: str, text: str) -> None:
        """Tells a text for all processes; one process does so."""
        self._carrier.put(self._key(topic), EVERYONE, text)

    def announced(self, topic: str, *, seconds: float = math.inf) -> str | None:
        """Returns the text of `announce`, waiting for it for so many seconds; None if it did not come."""
        return self._wait(topic, [EVERYONE], seconds).get(EVERYONE)

    def missing(self, texts: Mapping[int, str]) -> list[int]:
        """Returns the processes that are missing in `texts`."""
        return [process for process in range(self.processes) if process not in texts]

    def silent(self, texts: Mapping[int, str], *, most: int = 5) -> str:
        """Names the processes that are missing in `texts`, at most so many; "" if none is."""
        missing = self.missing(texts)
        return f"process {', '.join(map(str, missing[:most]))} of {self.processes}" if missing else ""

    def forget(self, topic: str = "") -> None:
        """Removes all texts of a topic, or of the task, when no process needs them any more."""
        self._carrier.remove(self._key(topic) if topic else self._task, EVERYONE)

    def withdraw(self, topic: str) -> None:
        """Removes the text of this process."""
        self._carrier.remove(self._key(topic), str(self.process))

    def _key(self, topic: str) -> str:
        return f"{self._task}/{topic}" if self._task else topic
