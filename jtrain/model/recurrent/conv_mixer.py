"""Gated short convolution (LFM2, arXiv:2511.23404)."""

import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float

from jtrain.model import ops
from jtrain.model.mixer import MixerSpec
from jtrain.model.norm import NormSpec
from jtrain.model.param import aligned, vector, weight
from jtrain.model.recurrent.channels import RecurrentMixer, ShortConv
from jtrain.model.sizes import ModelSizes
from jtrain.model.tensor_parallel import TensorAxis, local_part


@dataclasses.dataclass(frozen=True)
class ShortConvSpec(MixerSpec):
    """Convolution of each of A = D channels over a few tokens, with a gate before and one after.

    taps: tokens that it sees, W.
    bias: True adds learned vectors to the projections and the convolution.
    """

    name: ClassVar[str] = "conv"
    taps: int = 3
    bias: bool = False

    def module(self, sizes: ModelSizes, norm: NormSpec, *, layers: int) -> "GatedShortConv":
        """The layer, which has no norm."""
        del norm
        return GatedShortConv(self, sizes, layers=layers)

    def with_sizes(self, sizes: ModelSizes) -> "ShortConvSpec":
        """Itself: its channels are as many as the model's width."""
        del sizes
        return self

    def empty_cache(self, sizes: ModelSizes, *, batch: int, max_len: int, dtype: str) -> ops.LeftContext:
        """The last W - 1 inputs."""
        del max_len
        return ops.empty_context(batch, self.taps, sizes.d_model, dtype)

    def mixing_flops(self, sizes: ModelSizes, *, seq_len: int) -> int:
        """The convolution of every channel."""
        del seq_len
        return 6 * self.taps * sizes.d_model


class GatedShortConv(RecurrentMixer):
    """The layer of a `ShortConvSpec`. Channels are split over `tensor`."""

    def __init__(self, spec: ShortConvSpec, sizes: ModelSizes, *, layers: int) -> None:
        d_model, std = sizes.d_model, sizes.d_model**-0.5
        for name in ("before", "after", "x"):
            setattr(self, f"{name}_DA", weight("DA", (d_model, d_model), std=std, layers=layers))
            if spec.bias:
                setattr(self, f"{name}_bias_A", vector("A", (d_model,), ones=False, layers=layers))
        self.conv = ShortConv("A", (d_model,), taps=spec.taps, bias=spec.bias, layers=layers)
        self.o_AD = weight("AD", (d_model, d_model), std=sizes.branch_std(d_model), layers=layers)
        if spec.bias:
            self.o_bias_D = vector("D", (d_model,), ones=False, layers=layers)
        self.spec = spec

    def mix(
        self,
        x_BLD: Array,
        segment_BL: Array,
        tensor: TensorAxis,
        context: ops.RowSplit,
        cache: ops.LeftContext | None,
    ) -> tuple[Float[Array, "B _ D"], ops.LeftContext]:
        names = ("before", "after", "x")
        projected = tensor.project_in(x_BLD, *(getattr(self, f"{name}_DA")[...] for name in names))
        before_BLA, after_BLA, x_BLA = map(self._biased, names, projected)
        y_BLA, last_inputs = self.conv(
            before_BLA * x_BLA, segment_BL, silu=False, initial=cache, split=context
        )
        out_BLD = tensor.project_out(after_BLA * y_BLA, self.o_AD[...])
        if self.spec.bias:
            # Once, at the positions that this device keeps of the sum.
            out_BLD += aligned(self.o_bias_D[...], out_BLD)
        return out_BLD, last_inputs

    def _biased(self, name: str, x_BLA: Float[Array, "B L A"]) -> Float[Array, "B L A"]:
        if not self.spec.bias:
            return x_BLA
        bias_A = getattr(self, f"{name}_bias_A")[...]
        return x_BLA + aligned(local_part(bias_A, x_BLA.shape[-1]), x_BLA)
