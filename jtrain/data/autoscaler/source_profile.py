"""Measurements of sources and loaders, and the hysteresis that decides when a measurement counts as a change."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float

_RISE, _FALL = 1.25, 0.5  # a change: two windows in a row beyond these ratios; noise of +-30 % cannot cycle


@dataclasses.dataclass
class SourceProfile:
    """Recent cost of a source: sums over its runs, where each new run reduces the weight of older ones by a tenth.

    documents, tokens, bytes: amounts read and sent.
    read_s: seconds of reading and tokenising, without opening files.
    send_s: seconds of handing over: copies into shared memory, messages.
    open_bytes: memory that one loader needs for the open source, buffers included; the largest seen recently.
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
        """Adds one run that a loader has read."""
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
    """Load of a loader.

    busy_share: share of the time since the last report in which it worked, 0 to 1.
    queued: requests that wait for it.
    alive: False if it has died or hangs and no standby took over its number.
    rss_bytes: resident memory.
    """

    busy_share: float
    queued: int
    alive: bool
    rss_bytes: int


class Sticky:
    """Measured columns that change only if two windows in a row agree, and then to the larger of the two."""

    def __init__(self, value: Float[np.ndarray, "rows sources"]) -> None:
        self.value = value
        self._last = value.copy()
        self._last_side = np.zeros(value.shape[1], int)

    def judge(
        self,
        measured: Float[np.ndarray, "rows sources"],
        size_of: Callable[[Float[np.ndarray, "rows sources"]], Float[np.ndarray, " sources"]],
    ) -> Bool[np.ndarray, " sources"]:
        """Takes in a window; returns True for each source that has changed."""
        size, planned, last = size_of(measured), size_of(self.value), size_of(self._last)
        side = (size > planned * _RISE).astype(int) - (size < planned * _FALL)
        changed = (side != 0) & (side == self._last_side)
        self.value = np.where(changed, np.where(size >= last, measured, self._last), self.value)
        self._last, self._last_side = measured, np.where(changed, 0, side)
        return changed
