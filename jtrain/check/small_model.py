"""Small model with the same kinds of layers: every size becomes small, every relation of sizes stays."""

import dataclasses
from typing import Any

from jtrain.model.attention import AttentionSpec
from jtrain.model.mixer import MixerSpec
from jtrain.model.rope import QueryTemperature
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer

WIDTH, HEADS, HEAD_DIM = 32, 4, 16
IN_BLOCKS = 4
"""Times by which layers are larger whose matrices are in blocks of 64 inputs, of which each shard has whole
ones.
"""
ATTENTION_CHUNKS = 4
"""Most chunks of queries in a row: each is compiled on its own."""

AT_MOST: dict[str, int] = dict(
    d_ff=64,
    shared_d_ff=32,
    head_dim=HEAD_DIM,
    value_head_dim=8,
    nope_head_dim=8,
    rope_head_dim=8,
    kv_rank=16,
    q_rank=16,
    rank=8,
    key_dim=8,
    value_dim=8,
    state_size=8,
    shared_experts=2,
    norm_groups=2,
)
"""Fields of layers -> largest value."""
OF_POSITIONS = ("window", "chunk_size", "original_seq_len")
"""Fields of layers that count positions of a row: they shrink as the rows do."""


def shrink_model(
    model: Transformer, *, columns: int, share: float, vocab_size: int, periods: int, block_inputs: int = 0
) -> Transformer:
    """Returns a model with the same kinds of layers, one of each in a period.

    Layers whose small forms are equal compile and compute alike: of five with a window and one without, one
    of each stays. Blocks of `model.last` are kinds of the pattern, and repeated if the model has some.

    Args:
      columns: length of a small row.
      share: `columns` as a share of the run's data.seq_len.
      vocab_size: ids of the small model.
      periods: repetitions of the pattern.
      block_inputs: least width at which every shard of a frozen base in blocks has whole blocks; 0 without such
        a base.
    """
    shrink = Shrink(model, share, IN_BLOCKS if block_inputs else 1)
    pattern, first = (
        tuple(dict.fromkeys(map(shrink.spec, blocks))) for blocks in (model.pattern, model.first)
    )
    # A last repetition that ends early still does, unless nothing is left to leave out.
    last = min(len(model.last), 1, max(len(pattern) - 1, 0))
    num_heads, num_kv_heads = shrink.heads(model.num_heads, model.num_kv_heads)
    chunk, width = model.loss_chunk_tokens, min(model.d_model, max(WIDTH, block_inputs))
    return dataclasses.replace(
        model,
        num_layers=len(first) + periods * max(len(pattern), 1) + last,
        d_model=width,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=min(model.head_dim, HEAD_DIM * shrink.size_factor),
        d_ff=min(model.d_ff, AT_MOST["d_ff"] * shrink.size_factor),
        vocab_size=vocab_size,
        pattern=pattern,
        first=first,
        moe=model.moe and shrink.spec(model.moe),
        rope=shrink.spec(model.rope),
        # Embeddings as large as before, where the scale follows from the width.
        embedding_scale=width**0.5
        if abs(model.embedding_scale**2 / model.d_model - 1) < 0.01
        else model.embedding_scale,
        # Several chunks of a few tokens, as a run has several of many.
        loss_chunk_tokens=chunk if chunk == "auto" else min(chunk, 64),
        attention_chunk=max(shrink.positions(model.attention_chunk), columns // ATTENTION_CHUNKS),
    )


@dataclasses.dataclass(frozen=True)
class Shrink:
    """Rule that makes the parts of one model small.

    share: length of the small rows, as a share of the run's.
    size_factor: factor of the small sizes.
    """

    model: Transformer
    share: float
    size_factor: int = 1

    def positions(self, count: int) -> int:
        """A number of positions in shorter rows."""
        return max(4, round(count * self.share))

    def heads(self, num_heads: int, num_kv_heads: int) -> tuple[int, int]:
        """Few heads that share keys as before: all, some, or none of them."""
        if num_heads <= 2 * HEADS:
            return num_heads, num_kv_heads
        return HEADS, {num_heads: HEADS, 1: 1}.get(num_kv_heads, HEADS // 2)

    def spec(self, spec: Any) -> Any:
        """A block, or a part of one, with small sizes; fields without a rule keep their values."""
        changes: dict[str, Any] = {}
        for field in dataclasses.fields(spec):
            value = getattr(spec, field.name)
            if dataclasses.is_dataclass(value):
                changes[field.name] = self.spec(value)
            elif isinstance(value, tuple) and any(isinstance(part, MixerSpec) for part in value):
                changes[field.name] = tuple(self.spec(part) for part in value)
            elif isinstance(value, int) and not isinstance(value, bool):
                if field.name in OF_POSITIONS or isinstance(spec, QueryTemperature):
                    changes[field.name] = self.positions(value)
                elif field.name in AT_MOST:
                    changes[field.name] = min(value, AT_MOST[field.name] * self.size_factor)
        return dataclasses.replace(spec, **changes | self._counts(spec) | self._scale(spec))

    def _counts(self, spec: Any) -> dict[str, int]:
        """Numbers of heads, groups and experts, which must divide each other."""
        if isinstance(spec, MoESpec):
            return _experts(spec, self.size_factor)
        changes: dict[str, int] = {}
        if getattr(spec, "num_heads", None) is not None:
            kv_field = "num_key_heads" if hasattr(spec, "num_key_heads") else "num_kv_heads"
            kv_heads = getattr(spec, kv_field, None)
            num_heads, num_kv_heads = self.heads(spec.num_heads, kv_heads or self.model.num_kv_heads)
            changes["num_heads"] = num_heads
            if kv_heads is not None:
                changes[kv_field] = num_kv_heads
            if hasattr(spec, "num_groups"):
                changes |= {name: min(getattr(spec, name), 2) for name in ("num_groups", "norm_groups")}
        elif getattr(spec, "num_kv_heads", None) is not None:
            changes["num_kv_heads"] = self.heads(self.model.num_heads, spec.num_kv_heads)[1]
        return changes

    def _scale(self, spec: Any) -> dict[str, float]:
        """Scale of scores, which grow with the root of a head's size."""
        if not isinstance(spec, AttentionSpec) or spec.scale is None:
            return {}
        size = spec.head_dim or self.model.head_dim
        return {"scale": spec.scale * (size / min(size, HEAD_DIM * self.size_factor)) ** 0.5}


def _experts(spec: MoESpec, size_factor: int) -> dict[str, int]:
    """Eight experts of which a token has a few, in groups if there are groups."""
    num_experts, num_groups = min(spec.num_experts, 8), min(spec.num_groups, 4)
    top_groups = num_groups if spec.top_groups == spec.num_groups else min(spec.top_groups, 2)
    top_k = spec.top_k if spec.num_experts <= 8 else min(spec.top_k, 2)
    return dict(
        num_experts=num_experts,
        num_groups=num_groups,
        top_groups=top_groups,
        top_k=top_k,
        **({} if spec.d_ff is None else {"d_ff": min(spec.d_ff, 32 * size_factor)}),
    )
