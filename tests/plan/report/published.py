"""Closed forms as their papers print them, with which tests check arithmetic against published tables.

These formulas do not describe jtrain: `jtrain.plan.estimate` does. Bytes are of one device. Sizes have the
papers'
letters: s sequence, b microbatch, h hidden, a heads, l layers, t tensor parallel, p pipeline stages, n
  devices.
"""

import math
from typing import Literal

from jtrain.plan.estimate.step_time import SECONDS_PER_DAY


def zero_bytes(params: float, n: int, stage: int, *, optimizer: float = 12) -> float:
    """Model states of mixed-precision Adam: 2 bytes of weights, 2 of gradients, `optimizer` of the rest.

    Source: arXiv:1910.02054, figure 1 and table 1.
    """
    weights, gradients = (2 / n if stage >= 3 else 2), (2 / n if stage >= 2 else 2)
    return params * (weights + gradients + (optimizer / n if stage >= 1 else optimizer))


def deepspeed_bytes(
    params: float,
    largest_layer: float,
    n: int,
    stage: Literal[2, 3],
    *,
    offload: Literal["none", "optimizer", "all"],
    init: bool = False,
) -> tuple[float, float]:
    """Device bytes, and bytes of the host that has all n devices, as DeepSpeed's memory estimators say.

    Args:
      largest_layer: parameters of the largest layer, which stage 3 gathers.
      offload: the optimizer's state, or under stage 3 the parameters as well.
      init: under stage 3, whether the model is made in shards (`zero.Init`), not on the host as a whole.

    Source: DeepSpeed's docs, memory requirements; `estimate_zero2_` and
      `estimate_zero3_model_states_mem_needs`.
    """
    spare = 1.5  # "additional buffer factor"
    if stage == 2:
        if offload == "none":
            return 4 * params + 16 * params / n, params * 4 * n * spare
        return 2 * params, params * max(4 * n, 16) * spare
    gathered = 4 * largest_layer
    if offload == "none":
        return gathered + 18 * params / n, (largest_layer * 4 * n if init else params * 4 * n) * spare
    if offload == "optimizer":
        return gathered + 2 * params / n, params * (16 if init else max(4 * n, 16)) * spare
    return gathered, params * (18 if init else max(4 * n, 18)) * spare


type Recompute = Literal["none", "selective", "full"]


def korthikanti_activation_bytes(
    *,
    a: int,
    h: int,
    l: int,  # noqa: E741 - the paper's letter
    t: int,
    p: int = 1,
    b: int = 1,
    s: int = 2048,
    interleaved: int | None = None,
    sequence_parallel: bool,
    recompute: Recompute,
) -> float:
    """Activations of the first pipeline stage, 16 bits, without embedding and output.

    The first stage holds p microbatches of l / p layers, so l layers; interleaving m chunks makes it
    1 + (p - 1) / (p m) of that.

    Source: arXiv:2205.05198, table 2 and section 4.2.3.
    """
    scores = 5 * a * s / h if recompute == "none" else 0.0
    per_layer = (34 + scores) / t if sequence_parallel else 10 + (24 + scores) / t
    if recompute == "full":
        per_layer = 2 / t if sequence_parallel else 2
    stages = 1 + (p - 1) / (p * interleaved) if interleaved else 1.0
    return s * b * h * per_layer * l * stages


def korthikanti_state_bytes(*, h: int, l: int, t: int, p: int) -> float:  # noqa: E741
    """Weights, gradients and Adam's state: 18 bytes for each of the layers' 12 l h^2 parameters."""
    return 18 * 12 * l * h**2 / (t * p)


def megatron_parameters(*, h: int, l: int, s: int = 2048, v: int = 51_200) -> float:  # noqa: E741
    """Parameters of a GPT of vocabulary v. Source: arXiv:2104.04473, equation 2."""
    return 12 * l * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * l * h))


def megatron_flops(*, h: int, l: int, b: int, s: int = 2048, v: int = 51_200) -> float:  # noqa: E741
    """FLOPs of one iteration over b sequences with full recomputation. Source: arXiv:2104.04473, equation
    3.
    """
    return 96 * b * s * l * h**2 * (1 + s / (6 * h) + v / (16 * l * h))


def megatron_training_days(*, tokens: float, params: float, n: int, flops_per_s: float) -> float:
    """End-to-end time with full recomputation: 8 T P / (n X). Source: arXiv:2104.04473, equation 4."""
    return 8 * tokens * params / (n * flops_per_s) / SECONDS_PER_DAY


def roofline_alpha(peak_flops: float, axis_bytes_per_s: float) -> float:
    """FLOPs per byte of one ICI axis, both directions: 2,550 on a v5p. Source: scaling book, part 5."""
    return peak_flops / axis_bytes_per_s


def data_parallel_min_tokens(alpha: float, axes: int) -> float:
    """Tokens per chip above which FSDP over `axes` torus axes is compute-bound. Source: scaling book, part
    5.
    """
    return alpha / axes


def tensor_parallel_limit(d_ff: int, alpha: float, axes: int) -> float:
    """Chips below which tensor parallelism over `axes` torus axes is compute-bound. Source: scaling book,
    part 5.
    """
    return axes * d_ff / alpha


def mixed_optimum(tokens: float, d_ff: int, n: int, *, data_axes: int = 1, tensor_axes: int = 1) -> float:
    """Chips of n that FSDP should have, the rest being tensor parallel. Source: scaling book, part 5."""
    return math.sqrt(tokens / d_ff * data_axes / tensor_axes * n)


def mixed_min_tokens(alpha: float, d_ff: int, *, data_axes: int = 1, tensor_axes: int = 1) -> float:
    """Tokens per chip above which FSDP with tensor parallelism is compute-bound. Source: scaling book, part
    5.
    """
    return 4 * alpha**2 / (data_axes * tensor_axes * d_ff)


def training_days(flops: float, *, n: int, peak_flops: float, mfu: float) -> float:
    """Days that n chips take at that utilisation."""
    return flops / (n * peak_flops * mfu) / SECONDS_PER_DAY
