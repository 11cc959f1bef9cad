"""FLOPs per token and model FLOPs utilisation, by one definition for every config.

A trained token costs 6 FLOPs per matrix parameter (2 forward, 4 backward), 4 per frozen one, and 6 * Y * N *
H * L for attention scores and their use: 12 without a causal mask, half of that with one. The unembedding
counts, also a tied one. Not counted are the embedding lookup, norms and recomputation; nor is it considered
that packed documents attend to fewer than L positions. This is PaLM's definition (arXiv:2204.02311, appendix
B) with the causal half of attention; counting both halves would raise MFU by up to 10 % at 8192 positions.
Recurrent mixers count the steps of their states instead (`MixerSpec.mixing_flops`).
"""

import dataclasses
import functools

from jtrain.layout.dims import ParamInfo
from jtrain.model.transformer import Transformer

MFU_DEFINITION = (
    "6 FLOPs per matrix parameter and token (unembedding, not embedding) + causal half of attention"
)
"""Definition of MFU in one line, printed beside every MFU."""


@dataclasses.dataclass(frozen=True)
class TokenFlops:
    """FLOPs of one trained token.

    matmul_params: parameters of the matrices that a token is multiplied with; of experts, the `top_k` chosen
      ones.
    matmul_flops, attention_flops: forward and backward together; attention stands for all that mixes
      positions.
    """

    matmul_params: int
    matmul_flops: int
    attention_flops: int

    @property
    def total_flops(self) -> int:
        """FLOPs of one token, matrices and attention."""
        return self.matmul_flops + self.attention_flops


@functools.lru_cache(maxsize=64)
def flops_per_token(
    model: Transformer, *, seq_len: int, infos: tuple[ParamInfo, ...] | None = None
) -> TokenFlops:
    """FLOPs that training on one token of a sequence of `seq_len` takes.

    Args:
      infos: parameters of the model with an adapter; None for those of the model alone, all of them trained.
    """
    # The lookup is no matmul; a tied embedding comes back as the unembedding.
    matrices = [
        info
        for info in infos or model.param_infos()
        if info.is_matrix and (info.path != "embed_VD" or model.tie_embeddings)
    ]
    params = sum(info.active_size for info in matrices)
    # A frozen matrix has no gradient: a third of a trained one's FLOPs.
    frozen = sum(info.active_size for info in matrices if info.frozen)
    mixers = (block.mixer for block in model.blocks if block.mixer is not None)
    attention = sum(mixer.mixing_flops(model.sizes, seq_len=seq_len) for mixer in mixers)
    return TokenFlops(params, 6 * params - 2 * frozen, attention)


def mfu(
    flops: TokenFlops, *, tokens_per_s: float, num_devices: int, peak_flops: float | None
) -> float | None:
    """Model FLOPs utilisation, as a fraction of the devices' peak; None if the peak is unknown.

    Args:
      tokens_per_s: training rate of the whole run.
      peak_flops: FLOP/s of one device in the compute dtype, dense.
    """
    if peak_flops is None:
        return None
    return flops.total_flops * tokens_per_s / (num_devices * peak_flops)
