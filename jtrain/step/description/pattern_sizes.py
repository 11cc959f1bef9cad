"""Sizes for abstract traces of layers of a pattern: those of the model, with labels for few.

Blocks of a pattern have sizes of their own, which no prime of `labelled_sizes.py` stands for, and loops over
parts of a row. So a trace takes the row, `tensor` and `context` as they are, and with `tensor` the sizes that
it splits. Labels are rows, devices along `replica`, `data` and `expert`, and what ZeRO and `expert` split: D,
the ranks of latents, and experts. A search over hundreds of meshes then traces few of them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from jtrain.layout.layout import Layout, make_layout
from jtrain.layout.layout_spec import LayoutSpec
from jtrain.layout.mesh import MeshSpec
from jtrain.model.adapters.lora import Adaptation
from jtrain.model.block import BlockSpec
from jtrain.model.expert_dispatch import num_pieces
from jtrain.model.latent_attention import LatentAttentionSpec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer

FIRST, LAST = "first_layers", "last_layers"


type ModelArguments = tuple[tuple[str, Any], ...]
"""Arguments of a model, by which it is built anew: models of a pattern are hundreds of objects of flax."""


@dataclasses.dataclass(frozen=True)
class PatternSizes:
    """Model, mesh and row of a trace.

    fields: arguments of the model.
    labels: letter -> the prime that stands for it: b rows; w, e devices along replica and expert, z, r, s those
      of ZeRO's torus dimensions, or z those along data; d, i, j ... parts of D and of ranks of latents, and x
      of experts, that no axis splits; c experts of a token. Axes of one device have none.
    rings: of the layout.
    """

    fields: ModelArguments
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
    model: Transformer, mesh: MeshSpec, rings: tuple[int, ...], *, rows: int, seq_len: int, as_it_is: bool
) -> PatternSizes:
    """The sizes with which the layers of a model are traced.

    Args:
      as_it_is: True for parameters that ZeRO splits by other sizes too: those of an adapter.
    """
    fields = _fields(model)
    sizes = {seq_len, *mesh.shape.values(), *(size for _, shape in _shapes(fields) for size in shape)}
    # Turns of a ring, and those of its loop.
    sizes |= {max(1, mesh.context - 1), max(1, mesh.context - 2)}
    primes = [n for n in range(3, 400) if is_prime(n) and all(size % n for size in sizes)]
    labels = dict[str, int]()
    if model.router is not None:
        fields, labels = _label_experts(
            fields, model.router, mesh, primes, tokens=(rows, seq_len // mesh.context)
        )
    elif mesh.expert > 1:
        labels["e"] = primes.pop(0)
    mesh = dataclasses.replace(mesh, expert=labels.get("e", 1))
    labels["b"] = primes.pop(0)
    # Small ones for axes, because JAX counts the devices of a mesh in 32 bits, but none that a loop may turn.
    primes = sorted(n for n in primes if n > 10)
    if mesh.replica > 1:
        labels["w"] = primes.pop(0)
        mesh = dataclasses.replace(mesh, replica=labels["w"])
    if mesh.shape["data"] == 1 or as_it_is:
        return PatternSizes(fields, mesh, seq_len, tuple(labels.items()), rings)
    lengths = {letter: primes.pop(0) for letter in _RINGS[: len(rings)] or "z"}
    split = dataclasses.replace(mesh, data=math.prod(lengths.values()))
    if (widened := _label_widths(fields, split, primes)) is None:
        return PatternSizes(fields, mesh, seq_len, tuple(labels.items()), rings)
    fields, widths = widened
    labels |= lengths | widths
    if rings:
        # The last ring of a torus includes `context`.
        *slower_rings, last_ring = lengths.values()
        rings = (*slower_rings, last_ring * mesh.context)
    return PatternSizes(fields, split, seq_len, tuple(labels.items()), rings)


_RINGS = "zrs"
_RANKS = "ijkl"
_LATENTS = "QC"


def pattern_values(
    sizes: PatternSizes, model: Transformer, layout: Layout, *, rows: Fraction
) -> dict[str, Fraction]:
    """Letter of `PatternSizes` -> its number in a layout, of which `rows` are computed at a time."""
    mesh, router = layout.mesh, model.router
    values = {"b": rows, "w": Fraction(mesh.replica), "e": Fraction(mesh.expert)}
    if router is not None:
        values |= {"x": Fraction(router.num_experts, mesh.expert), "c": Fraction(router.top_k)}
    values["z"] = Fraction(mesh.shape["data"])
    for index, length in enumerate(layout.rings):
        is_last = index == len(layout.rings) - 1
        values[_RINGS[index]] = Fraction(length, mesh.context if is_last else 1)
    values["d"] = Fraction(model.d_model, mesh.zero_shards * mesh.tensor)
    for letter, rank in zip(_RANKS, _ranks(_fields(model)), strict=False):
        values[letter] = Fraction(rank, mesh.zero_shards)
    return {letter: values[letter] for letter, _ in sizes.labels}


def _ranks(fields: ModelArguments) -> list[int]:
    """Ranks of the latents of a model, each number once."""
    mixers = [block.mixer for name, blocks in fields if name in ("first", "pattern") for block in blocks]
    latents = [mixer for mixer in mixers if isinstance(mixer, LatentAttentionSpec)]
    ranks = [rank for mixer in latents for rank in (mixer.q_rank, mixer.kv_rank) if rank is not None]
    return list(dict.fromkeys(ranks))


def _label_widths(
    fields: ModelArguments, mesh: MeshSpec, primes: list[int]
) -> tuple[ModelArguments, dict[str, int]] | None:
    """The model with labels in what ZeRO splits on a mesh, and these labels by letter; None if other sizes
    follow from those, or if there are more ranks than letters.
    """
    ranks = _ranks(fields)
    if len(ranks) > len(_RANKS):
        return None
    labels: dict[str, int] = dict(zip(("d", *_RANKS[: len(ranks)]), primes, strict=False))
    rank_of = {rank: labels[letter] * mesh.zero_shards for rank, letter in zip(ranks, _RANKS, strict=False)}
    # Kernels of shared key heads are split by D over `tensor` too.
    width = labels["d"] * mesh.zero_shards * mesh.tensor

    def widened(block: BlockSpec) -> BlockSpec:
        mixer = block.mixer
        if not isinstance(mixer, LatentAttentionSpec):
            return block
        q_rank = None if mixer.q_rank is None else rank_of[mixer.q_rank]
        return dataclasses.replace(
            block, mixer=dataclasses.replace(mixer, q_rank=q_rank, kv_rank=rank_of[mixer.kv_rank])
        )

    labelled = _changed(fields, widened, d_model=width)
    for (dims, shape), (_, labelled_shape) in zip(_shapes(fields), _shapes(labelled), strict=True):
        for letter, size, labelled_size in zip(dims, shape, labelled_shape, strict=True):
            expected = width if letter == "D" else rank_of.get(size, size) if letter in _LATENTS else size
            if labelled_size != expected:
                return None
    return labelled, labels


@functools.lru_cache(maxsize=8)
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


def _fields(model: Transformer) -> ModelArguments:
    names = [field.name for field in dataclasses.fields(Transformer) if field.init]
    return tuple((name, getattr(model, name)) for name in names)


@functools.lru_cache(maxsize=256)
def _shapes(fields: ModelArguments) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Letters and sizes of the dimensions of every parameter."""
    return tuple((info.dims, info.shape) for info in Transformer(**dict(fields)).param_infos())


def _changed(
    fields: ModelArguments, change: Callable[[BlockSpec], BlockSpec], **sizes: int
) -> ModelArguments:
    """The model with other blocks, and other sizes."""
    named = dict(fields)
    blocks: Any = {name: tuple(map(change, named[name])) for name in ("pattern", "first")}
    return tuple((named | blocks | sizes).items())


def _mixtures(fields: ModelArguments) -> list[MoESpec]:
    blocks = [block for name, blocks in fields if name in ("first", "pattern") for block in blocks]
    return [block.feed_forward for block in blocks if isinstance(block.feed_forward, MoESpec)]


def _label_experts(
    fields: ModelArguments, router: MoESpec, mesh: MeshSpec, primes: list[int], *, tokens: tuple[int, int]
) -> tuple[ModelArguments, dict[str, int]]:
    """The model with labels of experts on a device, of a token's choices, and of devices along `expert`.

    Args:
      primes: those that may be labels. The chosen ones are taken away, and the others sorted: first those with
        which as many rows are exchanged in as many pieces.
      tokens: rows on a device, and their positions.
    """
    rows, positions = tokens
    pieces, local_experts = num_pieces(rows * positions, router.top_k), router.num_experts // mesh.expert

    def splits_alike(labelled_rows: int, top_k: int) -> bool:
        return mesh.expert == 1 or num_pieces(labelled_rows * positions, top_k) == pieces

    # Sums over a token's experts are unrolled, so small ones; but 3 numbers are in histories of 8-bit matmuls.
    smaller, larger = [n for n in primes if n > 3][:2]
    experts, choices = (smaller, larger) if local_experts < router.top_k else (larger, smaller)
    others, labels = [n for n in primes if n not in (smaller, larger)], dict[str, int]()
    is_one_choice = len({(moe.num_experts, moe.top_k) for moe in _mixtures(fields)}) == 1
    if is_one_choice and any(splits_alike(n, choices) for n in others):
        labels, primes[:] = {"x": experts, "c": choices}, others
    else:
        experts, choices = local_experts, router.top_k
    if mesh.expert > 1:
        # A token chooses among all experts: there must be as many.
        labels["e"] = next(n for n in primes if n * experts >= choices)
        primes.remove(labels["e"])
    primes.sort(key=lambda n: not splits_alike(n, choices))

    def widened(block: BlockSpec) -> BlockSpec:
        moe = block.feed_forward
        if not isinstance(moe, MoESpec):
            return block
        num_experts = labels.get("x", moe.num_experts // mesh.expert) * labels.get("e", 1)
        top_k = labels.get("c", moe.top_k)
        # Without groups: their choice is a few numbers a token.
        moe = dataclasses.replace(moe, num_experts=num_experts, top_k=top_k, num_groups=1, top_groups=1)
        return dataclasses.replace(block, feed_forward=moe)

    return _changed(fields, widened), labels


@functools.cache
def is_prime(number: int) -> bool:
    """True for a number that only 1 and itself divide."""
    return all(number % k for k in range(2, math.isqrt(number) + 1))
