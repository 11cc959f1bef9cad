"""Checkpoints: save, restore and verify the state, data state and config of a step; a save is atomic."""

from typing import TYPE_CHECKING, Any

from jtrain.checkpoint.files import CheckpointError

if TYPE_CHECKING:
    from jtrain.checkpoint.save_restore import Checkpoints, CheckpointSpec

__all__ = ["CheckpointError", "CheckpointSpec", "Checkpoints"]


def __getattr__(name: str) -> Any:
    """Imports `save_restore` at its first use, so that `python -m jtrain.checkpoint` does not wait for
    numpy.
    """
    # PEP 562: Python calls this for names that the module lacks, so importing `CheckpointError` loads no jax.
    if name in ("CheckpointSpec", "Checkpoints"):
        from jtrain.checkpoint import save_restore

        return getattr(save_restore, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
