"""Sizes for abstract traces of layers of a pattern: those of the model, with labels for few.

Blocks of a pattern have sizes of their own, which no prime of `labelled_sizes.py` stands for, and loops over
parts of a row. So a trace takes model, mesh and row as they are. Rows alone are a label, and devices along
`expert`, by which an exchange has room for more rows than come.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from jtrain.layout.layout import Layout, make_layout
from jtrain.layout.layout_spec import LayoutSpec
from jtrain.layout.mesh import MeshSpec
from jtrain.model.adapters.lora import Adaptation
from jtrain.model.block import BlockSpec
from jtrain.model.expert_dispatch import num_pieces
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer

FIRST, LAST = "first_layers", "last_layers"


@dataclasses.dataclass(frozen=True)
class PatternSizes:
    """Model, mesh and row of a trace.

    fields: arguments of the model.
    labels: letter -> the prime that stands for rows or for devices along `expert`.
    rings: of the layout.
    """

    fields: tuple[tuple[str, Any], ...]
    mesh: MeshSpec
    seq_len: int
    labels: tuple[tuple[str, int], ...]
    rings: tuple[int, ...]

    def build(
        self, spec: LayoutSpec, adapter: Adaptation | None, **options: Any
    ) -> tuple[Transformer, Layout]:
        """Model and layout of the trace; attention and loss are in one piece."""
        fields: dict[str, Any] = dict(self.fields) | dict(attention_chunk=10**9, loss_chunk_tokens=10**9)
        model = Transformer(**fields)
        infos = model.param_infos()
        if adapter is not None:
            infos, options["adapter_scale"] = adapter.infos(infos), 1.0
        layout = make_layout(spec, self.mesh, infos, is_part=True, **options)
        return model, dataclasses.replace(layout, rings=self.rings)


def pattern_sizes(
    model: Transformer, mesh: MeshSpec, rings: tuple[int, ...], *, rows: int, seq_len: int
) -> PatternSizes:
    """The sizes with which the layers of a model are traced."""
    tokens = seq_len // mesh.context
    sizes = {seq_len, *mesh.shape.values(), *(size for info in model.param_infos() for size in info.shape)}
    primes = [n for n in range(3, 200) if is_prime(n) and all(size % n for size in sizes)]
    router, labels = model.router, dict[str, int]()
    if mesh.expert > 1 and router is not None:
        labels["e"] = primes.pop(0)
        pieces = num_pieces(rows * tokens, router.top_k)
        primes.sort(key=lambda n: num_pieces(n * tokens, router.top_k) != pieces)
        model = _with_experts(model, labels["e"], mesh.expert)
        mesh = dataclasses.replace(mesh, expert=labels["e"])
    labels["b"] = primes[0]
    return PatternSizes(_fields(model), mesh, seq_len, tuple(labels.items()), rings)


def layer_parts(model: Transformer) -> Mapping[str, Transformer]:
    """Models of one repeated pattern each, by the path of their layers: what is looped over, and what comes
    before and after.
    """
    parts: dict[str, tuple[tuple[BlockSpec, ...], int]] = {
        "layers": (model.period, model.num_periods),
        FIRST: (model.first, 1),
        LAST: (model.last, 1),
    }
    fields: dict[str, Any] = dict(_fields(model))
    return {
        path: Transformer(**{**fields, "first": (), "pattern": blocks, "num_layers": repeats * len(blocks)})
        for path, (blocks, repeats) in parts.items()
        if blocks
    }


def _fields(model: Transformer) -> tuple[tuple[str, Any], ...]:
    names = [field.name for field in dataclasses.fields(Transformer) if field.init]
    return tuple((name, getattr(model, name)) for name in names)


def _with_experts(model: Transformer, label: int, expert: int) -> Transformer:
    """The model with as many experts on a device, of which there are `label` along `expert`."""

    def widened(block: BlockSpec) -> BlockSpec:
        moe = block.feed_forward
        if not isinstance(moe, MoESpec):
            return block
        # Without groups: their choice is a few numbers a token.
        moe = dataclasses.replace(
            moe, num_experts=moe.num_experts // expert * label, num_groups=1, top_groups=1
        )
        return dataclasses.replace(block, feed_forward=moe)

    changes: Any = {name: tuple(map(widened, getattr(model, name))) for name in ("pattern", "first")}
    return Transformer(**dict(_fields(model)) | changes)


@functools.cache
def is_prime(number: int) -> bool:
    """True for a number that only 1 and itself divide."""
    return all(number % k for k in range(2, math.isqrt(number) + 1))
