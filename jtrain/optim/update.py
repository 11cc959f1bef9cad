"""Scalars of a step that the update of every parameter needs."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Update:
    """Scalars of a step that the update of every parameter needs; f32, except `step` and `applied`.

    step: updates completed before this one, int32.
    grad_norm: global norm of all gradients, before clipping.
    grad_scale: factor that clips the gradients.
    mu_scale, nu_scale: bias corrections 1 / (1 - b^(step + 1)) of the moments. Factors: XLA divides by a
      scalar, or multiplies by its inverse with another last bit, as the rest of the program has it.
    applied: False leaves parameters and state as they are, bit for bit; bool.
    """

    step: Any
    learning_rate: Any
    grad_norm: Any
    grad_scale: Any
    mu_scale: Any
    nu_scale: Any
    applied: Any

    @property
    def metrics(self) -> dict[str, Array]:
        """The step's metrics that the optimizer computes."""
        return {"grad_norm": self.grad_norm, "learning_rate": self.learning_rate}
