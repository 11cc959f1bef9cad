"""Sizes that all layers of a model share."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model, which the parts of its layers take where they have none of their own.

    num_layers: layers of the whole model, however they are stacked: the deviation of a branch's last weights
      follows from it.
    d_model, num_heads, num_kv_heads, head_dim, d_ff: D, N, K, H and F.
    norm_eps: added to the mean square, or to the variance, in every norm.
    attention_chunk: queries whose scores exist at a time.
    """

    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    norm_eps: float
    attention_chunk: int

    def branch_std(self, width: int) -> float:
        """Deviation of the weights that end a branch of `width` inputs.

        Each layer adds two branches to the residual stream: 1 / sqrt(2 Y) keeps its variance at any depth.
        """
        return (width * 2 * self.num_layers) ** -0.5
