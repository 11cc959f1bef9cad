"""Errors that end a run with a code of their own: `UserError` (2, the user can fix it) and `HardwareFault` (76)."""

from jtrain_kernels.errors import FileError, UserError, did_you_mean

__all__ = ["FileError", "HardwareFault", "UserError", "did_you_mean"]


class HardwareFault(Exception):
    """A device or host computes wrongly or hangs; the message names it. Nothing that it computed is saved."""
