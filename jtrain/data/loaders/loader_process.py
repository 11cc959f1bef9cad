"""Handle of a loader process: its connection, shared memory, and the requests that it has not answered."""

import dataclasses
import time

from jtrain.data.loaders.forkserver import Child
from jtrain.data.loaders.loader import IDENTITY_AT, NUMBER, SINCE_NS, SOURCE, STATE
from jtrain.data.loaders.messages import RequestPart
from jtrain.data.loaders.shared_memory import SharedMemory
from jtrain.data.stream.source_setup import SourceSetup


@dataclasses.dataclass(eq=False)
class Request:
    """Request to one loader.

    loader: name of the loader that answers it, if that is up; None: any that reads the first source.
    """

    parts: list[RequestPart]
    loader: str | None

    def each(self) -> "list[Request]":
        """Splits the request into requests of one document each."""
        return [Request([single], self.loader) for part in self.parts for single in part.each()]


class LoaderProcess:
    """Loader process, as the pool sees it.

    in_flight: requests that it has not answered, by number, the oldest first.
    """

    def __init__(
        self, name: str, child: Child, setups: tuple[SourceSetup, ...], shared: SharedMemory
    ) -> None:
        self.name = name
        self.child = child
        self.shared = shared
        self.in_flight: dict[int, Request] = {}
        self.sources: set[int] = set()
        self.opened: set[int] = set()
        # Addresses in `shared` that were given back; the loader has not been told yet.
        self.freed: list[int] = []
        self.busy_s = 0.0
        self.is_retiring = False
        # Start of the opening that the log said last, in ns, and how long it had taken then.
        self.last_line: tuple[int, float] = (0, 0.0)
        child.connection.send(setups)

    def activity(self) -> tuple[int, int, int, str, float]:
        """Returns the loader's state, source, document, its `file:number`, and seconds since that began."""
        header = self.shared.header
        identity = header[IDENTITY_AT:].tobytes().partition(b"\0")[0].decode(errors="replace")
        seconds = (time.monotonic_ns() - int(header[SINCE_NS])) / 1e9
        return int(header[STATE]), int(header[SOURCE]), int(header[NUMBER]), identity, seconds
