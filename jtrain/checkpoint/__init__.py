"""Save, restore and verify: state, data state and config of a step, committed at once or not at all."""

from jtrain.checkpoint.checkpoints import Checkpoints, CheckpointSpec
from jtrain.checkpoint.files import CheckpointError

__all__ = ["CheckpointError", "CheckpointSpec", "Checkpoints"]
