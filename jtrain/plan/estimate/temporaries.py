"""Bytes of a step's temporaries at one moment: the loss, a layer, the embedding or the update."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Temporaries:
    """Bytes of temporaries on one device, by the classes of `jtrain.plan.estimate.memory.MemoryPlan`."""

    name: Literal["loss", "layer", "embedding", "update"]
    gradients: int = 0
    weights: int = 0
    activations: int = 0
    loss: int = 0
    workspace: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of all classes together."""
        return self.gradients + self.weights + self.activations + self.loss + self.workspace
