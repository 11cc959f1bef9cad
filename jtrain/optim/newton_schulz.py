"""Muon's update of one layer's matrix."""

import math
from typing import Any

import jax.numpy as jnp
import optax.contrib
from jaxtyping import Array, Float, Int

from jtrain.errors import UserError
from jtrain.layout.dims import ParamInfo
from jtrain.optim.spec import Muon


def matrix_dims(info: ParamInfo) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Input and output dimensions of one layer's matrix; a leading expert dimension X is a batch.

    Raises:
      UserError: `dims` does not tell inputs from outputs: neither begins it with D or a latent, nor ends it
        D.
    """
    dims = info.dims.removeprefix("Y")
    matrix = tuple(range(1 if dims[0] == "X" else 0, len(dims)))
    inputs_first = dims[matrix[0]] in "DQC"
    if len(matrix) < 2 or not (inputs_first or dims[-1] == "D"):
        raise UserError(
            f"Muon cannot tell inputs from outputs of {info.path} with dimensions {info.dims}: the model's "
            "width D, or a latent, must come first (inputs), or D last (outputs). Use optimizer=AdamW."
        )
    # D first: the inputs are D and all else are outputs (q is DNH); otherwise D is the output (o is NHD).
    return (matrix[:1], matrix[1:]) if inputs_first else (matrix[:-1], matrix[-1:])


def orthogonal_step(
    spec: Muon, info: ParamInfo, grad: Array, mu: Array, step: Int[Array, ""]
) -> tuple[Array, Float[Array, "..."]]:
    """Update direction of root mean square `update_rms`, and new momentum; f32, of one layer."""
    inputs, outputs = matrix_dims(info)
    fan_in, fan_out = (math.prod(info.shape[1:][i] for i in axes) for axes in (inputs, outputs))
    muon = optax.contrib.scale_by_muon(
        ns_steps=spec.newton_schulz_steps,
        beta=spec.momentum,
        weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(inputs, outputs),
    )
    # A scalar stands for the parameter: the moment and the count are replaced before use.
    initial: Any = muon.init(jnp.zeros(()))  # for the Newton-Schulz coefficients
    result: Any = muon.update(grad, initial._replace(count=step, mu=mu))
    direction, state = result
    # An orthogonal m x n matrix has root mean square 1 / sqrt(max(m, n)).
    return spec.update_rms * math.sqrt(max(fan_in, fan_out)) * direction, state.mu
