"""Named scopes of a step in its compiled program: the phase and the layer that an instruction belongs to.

The compiler keeps the path of named scopes that an instruction was traced from as its `op_name`:
`jit(train_step)/shard_map/transpose(jvp(layers))/while/body/checkpoint/rematted_computation/mlp/dot_general`
belongs to the backward pass of the MLPs; recomputation counts as backward.
"""

import re
from typing import Literal

type Phase = Literal["forward", "backward", "optimizer", "data", "checkpoint", "other"]
"""Part of a train step that an operation belongs to."""

_LAYER_SCOPES = ("batch", "embed", "rope", "layers", "final_norm", "loss", "reduce_gradients", "optimizer")
"""Named scopes of `jtrain.step.train_step` and `jtrain.model.transformer`; each is a layer of the report."""

_SUBLAYERS = {"attention": "attention", "attention_norm": "attention", "mlp": "mlp", "mlp_norm": "mlp"}
"""Scope, or component of a weight's path, inside `layers` -> second half of the layer's name."""

_PHASES: dict[str, Phase] = {"optimizer": "optimizer", "reduce_gradients": "backward", "batch": "data"}

UNMARKED: tuple[Phase, str] = ("other", "")
"""Phase and layer of what has none of our scopes."""


def scope_mark(scope: str) -> tuple[Phase, str]:
    """Phase and layer of a path of named scopes; ("other", "") if it has none of ours.

    >>> scope_mark("jit(train_step)/shard_map/transpose(jvp(layers))/while/body/checkpoint/mlp/dot_general")
    ('backward', 'layers/mlp')
    """
    # A jitted function's name, as in jit(loss), is no scope, though it may be spelt like one.
    names = re.findall(r"[\w.-]+", re.sub(r"\bp?jit\([^)]*\)", "", scope))
    # The outermost of our scopes names the layer; what is inside it only refines `layers`.
    top = next((name for name in names if name in _LAYER_SCOPES), None)
    if top is None:
        return UNMARKED
    if top == "layers":
        part = next((_SUBLAYERS[name] for name in names[names.index(top) + 1 :] if name in _SUBLAYERS), None)
        layer = f"layers/{part}" if part else "layers"
    else:
        layer = top
    # reduce_gradients has no transpose in its path, although it belongs to the backward pass.
    if top in _PHASES:
        return _PHASES[top], layer
    # jax names the backward pass `transpose(jvp(...))`; recomputed ops may lack that name.
    return ("backward" if "transpose" in names or "rematted_computation" in names else "forward"), layer


def kernel_of(scope: str) -> str:
    """`attention, cudnn`: the op of the kernels' registry that a path of scopes is of, and what computes it."""
    # The innermost one: a fused loss calls products.
    kernels = re.findall(r"\bkernel\.(\w+)\.(\w+)", scope)
    return ", ".join(kernels[-1]) if kernels else ""
