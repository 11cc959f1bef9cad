"""What is measured of sources and loaders, and when a measurement counts as a change."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float

_RISE, _FALL = 1.25, 0.5  # measured beyond these, two windows in a row, counts as changed: +-30 % noise cannot cycle


@dataclasses.dataclass
class SourceProfile:
    """What a source has cost lately: sums over its runs, older runs fading by a tenth with each new one.

    documents, tokens, bytes: read and sent.
    read_s: seconds of reading and tokenising, without the opening of files.
    send_s: seconds of handing over: copies into the slab, messages.
    open_bytes: memory that one loader holds for the source while it is open, buffers included; the largest seen lately.
    """

    documents: float = 0.0
    tokens: float = 0.0
    bytes: float = 0.0
    read_s: float = 0.0
    send_s: float = 0.0
    open_bytes: float = 0.0

    def observe(
        self, *, documents: int, tokens: int, bytes: int, read_s: float, send_s: float = 0.0, open_bytes: int = 0
    ) -> None:
        """Adds one run that a loader has served."""
        fade = 0.9
        self.documents = fade * self.documents + documents
        self.tokens = fade * self.tokens + tokens
        self.bytes = fade * self.bytes + bytes
        self.read_s = fade * self.read_s + read_s
        self.send_s = fade * self.send_s + send_s
        self.open_bytes = max(0.99 * self.open_bytes, open_bytes)

    @property
    def s_per_document(self) -> float:
        return (self.read_s + self.send_s) / self.documents if self.documents else math.nan

    @property
    def s_per_token(self) -> float:
        return (self.read_s + self.send_s) / self.tokens if self.tokens else math.nan

    @property
    def tokens_per_document(self) -> float:
        return self.tokens / self.documents if self.documents else math.nan

    @property
    def bytes_per_document(self) -> float:
        return self.bytes / self.documents if self.documents else math.nan


@dataclasses.dataclass(frozen=True)
class LoaderLoad:
    """How a loader fares.

    busy_share: share of the time since the last report that it worked, 0 to 1.
    queued: requests that wait for it.
    alive: false once it has died or hung and no shadow took over its number.
    rss_bytes: its memory.
    """

    busy_share: float
    queued: int
    alive: bool
    rss_bytes: int


class Sticky:
    """Measured columns that change only when two windows in a row say so, and then to the larger of the two."""

    def __init__(self, value: Float[np.ndarray, "rows sources"]) -> None:
        self.value = value
        self._last = value.copy()
        self._last_side = np.zeros(value.shape[1], int)

    def judge(
        self,
        measured: Float[np.ndarray, "rows sources"],
        size_of: Callable[[Float[np.ndarray, "rows sources"]], Float[np.ndarray, " sources"]],
    ) -> Bool[np.ndarray, " sources"]:
        """Takes in a window; which sources have changed by it."""
        size, planned, last = size_of(measured), size_of(self.value), size_of(self._last)
        side = (size > planned * _RISE).astype(int) - (size < planned * _FALL)
        changed = (side != 0) & (side == self._last_side)
        self.value = np.where(changed, np.where(size >= last, measured, self._last), self.value)
        self._last, self._last_side = measured, np.where(changed, 0, side)
        return changed
