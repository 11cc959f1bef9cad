"""Exchange of texts among the processes of a run without collectives, for threads in the background.

A collective waits for the devices, and all processes must call it at the same point of the program. These calls go
through jax's coordination service, which process 0 runs.
"""

import time
from typing import Any

from jtrain.runtime import multihost

_POLL_S = 0.05
_WAIT_MS = 10_000


class ProcessExchange:
    """Texts of one task, on which all processes work at the same time.

    name: the same in all processes, and of no other task of this run.
    """

    def __init__(self, name: str) -> None:
        self._prefix = f"jtrain/{name}"
        self._alone = multihost.process_count() == 1
        self._told: dict[str, str] = {}  # with one process

    def tell(self, topic: str, text: str) -> None:
        """Publishes a text of this process; once for each topic."""
        self._set(f"{topic}/{multihost.process_index()}", text)

    def told(self, topic: str) -> dict[int, str]:
        """Returns the texts that processes have published so far, by process."""
        prefix = f"{self._prefix}/{topic}/"
        found = self._told.items() if self._alone else self._client().key_value_dir_get(prefix)
        numbers = ((key.rpartition(prefix)[2], text) for key, text in found if prefix in key)
        return {int(number): text for number, text in numbers if number.isdecimal()}

    def wait_for_all(self, topic: str, *, seconds: float, enough: str | None = None) -> dict[int, str]:
        """Returns the texts of all processes, or those that came within so many seconds.

        enough: returns as soon as a process has published another text than this one.
        """
        until = time.monotonic() + seconds
        while True:
            found = self.told(topic)
            differs = enough is not None and any(text != enough for text in found.values())
            if differs or len(found) == multihost.process_count() or time.monotonic() > until:
                return found
            time.sleep(_POLL_S)  # the service can wait for one key only, and this waits for any

    def announce(self, topic: str, text: str) -> None:
        """Publishes a text for all processes; one process does so, once for each topic."""
        self._set(f"{topic}/all", text)

    def announced(self, topic: str) -> str:
        """Waits for the text of `announce`, for as long as the process that runs the coordination service lives."""
        if self._alone:
            return self._told[f"{self._prefix}/{topic}/all"]
        while True:
            try:
                return self._client().blocking_key_value_get(f"{self._prefix}/{topic}/all", _WAIT_MS)
            except Exception as error:  # jax raises JaxRuntimeError for a timeout as for a lost connection
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise

    def forget(self) -> None:
        """Removes all texts of the task, when no process needs them any more."""
        if not self._alone:
            self._client().key_value_delete(f"{self._prefix}/")

    def _set(self, key: str, text: str) -> None:
        if self._alone:
            self._told[f"{self._prefix}/{key}"] = text
        else:
            self._client().key_value_set(f"{self._prefix}/{key}", text)

    def _client(self) -> Any:
        from jax._src import distributed  # public jax has no way to the coordination service

        return distributed.global_state.client
