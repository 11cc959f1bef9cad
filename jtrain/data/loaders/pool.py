"""Interface of pools of Source Loaders: request documents, collect them, free their memory."""

from typing import Any, Protocol, runtime_checkable

from jtrain.data.loaders.messages import ChunkRun, LoaderState, RequestPart


@runtime_checkable
class Pool(Protocol):
    """Interface between a constructor and its loaders, wherever these run."""

    @property
    def retries(self) -> int:
        """Number of reads that were repeated since the pool began."""
        ...

    def request(self, parts: list[RequestPart], *, first: bool = False) -> None:
        """Requests documents; with `first` they go before all requests that no loader has begun.

        A part of a grouped source may be answered in several runs, whose numbers are together those of the
        part, or of its share.
        """
        ...

    def connections(self) -> list[Any]:
        """Returns connections for `multiprocessing.connection.wait`; none for a pool without processes."""
        ...

    def collect(self) -> list[ChunkRun]:
        """Returns the documents read since the last call and replaces lost loaders; to call every second.

        Raises:
          DataError: the stream cannot continue.
        """
        ...

    def release(self, run: ChunkRun) -> None:
        """Frees the memory of a run; its arrays must not be used afterwards."""
        ...

    def states(self) -> list[LoaderState]: ...

    def place(self, placement: dict[str, tuple[int, ...]]) -> None:
        """Sets the placement, loader -> its sources; starts new loaders and retires those left out."""
        ...

    def close(self) -> None: ...
