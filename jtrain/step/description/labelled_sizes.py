"""Sizes for an abstract trace of a step that a reader of the trace can tell apart.

Every size that the layouts of a class may have differently is a prime of its own in the trace: rows,
positions, widths, devices along an axis. The number of elements of a traced array then says by its prime
factors how it depends on each size, and so how many elements the array has in any layout of the class.
"""

import dataclasses
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from jtrain.layout.dims import AdapterDropout, kv_heads_in_use
from jtrain.layout.layout import Layout, make_layout
from jtrain.layout.mesh import MeshSpec
from jtrain.model.expert_dispatch import num_pieces
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer
from jtrain.model.unembedding import PART_COLUMNS, loss_chunk, num_parts
from jtrain.step.description.layout_class import LayoutClass
from jtrain.step.description.monomials import Monomial
from jtrain.step.description.pattern_sizes import is_prime, pattern_values


@dataclasses.dataclass(frozen=True)
class LabelledSizes:
    """Model, layout and batch of a trace.

    labels: letter -> the prime that stands for it. w, p, z, e, t are devices along replica, stage, data,
      expert and tensor (t of a key head, where devices share one), z, r, s those of ZeRO's torus
      dimensions; b rows; l positions; d, k, g, h, f, x, v parts of the sizes D, K, N, H, F, X, V that no axis
      splits; c experts of a token; y layers; u, q, m positions of a device in the loss, those of a chunk, and
      chunks; o columns of a part of the vocabulary, n parts.
    """

    model: Transformer
    layout: Layout
    rows: int
    seq_len: int
    labels: Mapping[str, int]

    @property
    def head_sizes(self) -> frozenset[int]:
        """Sizes that the heads of attention's queries and keys have."""
        mixers = (block.mixer for block in self.model.period)
        sizes = (getattr(mixer, "head_dim", None) for mixer in mixers if mixer is not None)
        return frozenset(size or self.model.head_dim for size in sizes)

    def monomial(self, number: int) -> Monomial:
        """A traced number as a product of labels; 0 has none."""
        if number == 0:
            return 0, ()
        powers: list[tuple[str, int]] = []
        for letter, prime in self.labels.items():
            power = 0
            while number % prime == 0:
                number, power = number // prime, power + 1
            if power:
                powers.append((letter, power))
        return number, tuple(powers)


def label_sizes(layout_class: LayoutClass) -> LabelledSizes:
    """Chooses the sizes of the trace of a class: what all its layouts share as it is, all else as primes.

    The letters are explained in `LabelledSizes`. A size of the model or mesh is a product of primes and
    shared numbers, so that every split of it comes out even: d_ff is f * tensor, and each device has f of it.

    Example, layers of a dense model with ZeRO stage 3: b = 11 sequences, l = 17 positions, t = 13 devices
    along `tensor`, f = 59 of d_ff = 59 * 13. An activation of the feed-forward layer has 11 * 17 * 13 * 59 =
    143,429 elements in the trace, which is b l t f. A layout of the class with two sequences of 128
    positions, tensor = 2 and d_ff = 128 has b = 2, l = 64, t = 2, f = 64: 16,384 elements.
    """
    options: Any = dict(
        context_order=layout_class.order,
        precision=layout_class.precision,
        # Its rate and seed are numbers of the trace, no sizes.
        adapter_dropout=AdapterDropout(0.5, 0) if layout_class.drops else None,
    )
    if (sizes := layout_class.pattern) is not None:
        spec, labels = layout_class.spec, dict(sizes.labels)
        model, layout = sizes.build(spec, layout_class.adapter, **options)
        return LabelledSizes(model, layout, labels["b"] * spec.sequence_groups, sizes.seq_len, labels)
    # Numbers of the class that also divide sizes: no prime may be one of their factors, or `monomial` would
    # mistake them for it.
    fixed_factors = (
        layout_class.context
        # Turns of a ring, and those of its loop: 63 and 62 with context=64.
        * max(1, layout_class.context - 1)
        * max(1, layout_class.context - 2)
        * (1 if layout_class.labels_shared else layout_class.shared)
        * (layout_class.tensor or 1)
        * (layout_class.kv_heads or 1)
        * max(1, layout_class.pieces)
    )
    fixed_factors *= max(1, layout_class.moe.shared_experts) if layout_class.moe else 1
    fixed_factors *= layout_class.adapter.rank if layout_class.adapter else 1
    labels: dict[str, int] = {}
    if layout_class.moe:
        # Small primes: sums over the experts of a token are unrolled. Histories of 8-bit matmuls have 3
        # numbers.
        smallest = 3 if layout_class.precision.matmul_dtype == "compute" else 5
        smallest_primes = (n for n in range(smallest, 30) if is_prime(n) and fixed_factors % n)
        # x before c: with `few` a device has fewer experts, x, than a token chooses, c. Otherwise x is one of
        # the larger primes below.
        labels = {letter: next(smallest_primes) for letter in ("xc" if layout_class.few else "c")}
        fixed_factors *= math.prod(labels.values())
    # An exchange in one piece takes few tokens, one in several takes many. JAX counts the devices of a mesh
    # in 32 bits, so their labels are small.
    first_prime = 5 if layout_class.pieces == 1 else 11
    small_primes, large_primes = (
        (n for n in range(first, 10_000) if is_prime(n) and fixed_factors % n) for first in (first_prime, 101)
    )
    # Several pieces need many tokens: rows and positions get large primes.
    many = "bl" if layout_class.pieces > 1 else ""
    letters = "btlwezrsdkghfxvyp"
    labels = {name: next(large_primes if name in many else small_primes) for name in letters} | labels
    # Fixed by the class, so no label.
    if layout_class.tensor:
        del labels["t"]
    rings = ["z", "r", "s"][: layout_class.rings]
    data = math.prod(labels[name] for name in rings) if rings else labels["z"]
    context = layout_class.context
    # With shared key heads there are k of them, and `shared` devices for each.
    shared = labels["t"] if layout_class.labels_shared else layout_class.shared
    tensor = layout_class.tensor or (shared * labels["k"] if shared > 1 else labels["t"])
    block = layout_class.adapter.block if layout_class.adapter else 1
    # D is split over ZeRO's shards; that of shared key heads' kernels over `tensor` as well.
    width = labels["d"] * data * context * (tensor if layout_class.shared > 1 else 1) * block
    # Both numbers that decide how many key heads there are belong to the class.
    if layout_class.tensor and layout_class.shared > 1:
        del labels["k"]
    kv_heads = tensor // shared if shared > 1 else (layout_class.kv_heads or labels["k"]) * tensor
    heads = max(kv_heads, tensor) * labels["g"] * (context if layout_class.kv_heads else 1)
    # Passes of a pipeline are of single layers, the same in each stage: two stages of one layer are enough.
    stages = (2 if layout_class.part == "layers" else labels["p"]) if layout_class.staged else 1
    # Zig-zag order cuts a device's positions into two, an exchange of tokens into `pieces`.
    halves = math.lcm(2 if context > 1 else 1, layout_class.pieces or 1)
    # `positions` are those of a device, of a sequence that is also split over tensor and context.
    rows, positions = labels["b"] * layout_class.spec.sequence_groups, labels["l"] * halves
    vocab, chunk = labels["v"], 10**9
    if layout_class.part == "loss":
        # 7 chunks, the last one short: positions and those of all chunks are different numbers.
        labels |= {"u": 1009, "m": 7}
        chunked = labels["u"] * (tensor * stages if layout_class.in_parts else 1)
        # A prime too, so that its factor shows which arrays have the length of a chunk.
        chunk = next(n for n in range(-(-chunked // labels["m"]), chunked) if is_prime(n))
        labels["q"], rows, positions = chunk, 1, labels["u"] * stages
        if layout_class.in_parts:
            # The largest prime below PART_COLUMNS, so that the vocabulary is gathered in exactly n parts.
            labels |= {"o": 16381, "n": 5}
            vocab = labels["o"] * labels["n"]
            assert -(-vocab // PART_COLUMNS) == labels["n"]
    hidden = labels["f"] * tensor * block
    moe = layout_class.moe and dataclasses.replace(
        layout_class.moe,
        num_experts=labels["x"] * labels["e"],
        top_k=labels["c"],
        # A width of the experts' own is what f stands for: `tensor` splits it.
        d_ff=None,
        shared_d_ff=_shared_widths(layout_class.moe) * hidden,
    )
    model = Transformer(
        num_layers=2 if layout_class.staged and layout_class.part == "layers" else labels["y"] * stages,
        d_model=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=2 * labels["h"] * block,
        d_ff=hidden,
        vocab_size=vocab * tensor * stages,
        moe=moe,
        qk_norm=layout_class.qk_norm,
        tie_embeddings=layout_class.tied,
        loss_chunk_tokens=chunk,
        attention_chunk=10**9,
    )
    if layout_class.pieces:
        assert num_pieces(rows * positions * tensor, labels["c"]) == layout_class.pieces, (
            "pieces follow from the tokens"
        )
    expert = (
        labels["e"]
        if layout_class.pieces or (layout_class.moe is not None and layout_class.part == "end")
        else 1
    )
    mesh = MeshSpec(labels["w"], stages, data, expert, context, tensor)
    options["pipeline"] = layout_class.pipeline
    infos = model.param_infos()
    if layout_class.adapter is not None:
        infos, options["adapter_scale"] = layout_class.adapter.infos(infos), 1.0
    layout = make_layout(layout_class.spec, mesh, infos, **options)
    if layout_class.rings:
        lengths = [labels[name] for name in rings]
        # The last ring of the torus includes `context`: ZeRO shards over both.
        layout = dataclasses.replace(layout, rings=(*lengths[:-1], lengths[-1] * context))
    return LabelledSizes(model, layout, rows, positions * tensor * context, labels)


def _shared_widths(moe: MoESpec) -> int:
    """Hidden width of the shared experts over that of an expert: exact where it is a whole number, as in files of
    Qwen2-MoE; 0 where `shared_experts` counts them.
    """
    if moe.shared_d_ff is None:
        return 0
    return max(1, round(moe.shared_d_ff / moe.d_ff)) if moe.d_ff else 1


def label_values(
    layout_class: LayoutClass, model: Transformer, layout: Layout, *, rows: int, seq_len: int
) -> dict[str, tuple[int, int]]:
    """Letter of `LabelledSizes` -> its number in a layout of the class, as a ratio."""
    mesh, context = layout.mesh, layout_class.context
    block = layout_class.adapter.block if layout_class.adapter else 1
    if layout_class.pattern is not None:
        rows_of_group = Fraction(rows, layout_class.spec.sequence_groups)
        numbers = pattern_values(layout_class.pattern, model, layout, rows=rows_of_group)
        return {letter: number.as_integer_ratio() for letter, number in numbers.items()}
    tensor, zero_shards = mesh.tensor, mesh.zero_shards
    in_use = kv_heads_in_use(model.num_kv_heads, tensor)
    halves = math.lcm(2 if context > 1 else 1, layout_class.pieces or 1)
    pipeline = layout.pipeline
    layers = model.num_layers if pipeline is None else pipeline.places // pipeline.stages
    shards = tensor * mesh.stage
    positions = -(-rows * seq_len // context // tensor // mesh.stage)
    chunked = positions * (shards if layout_class.in_parts else 1)
    chunk = min(loss_chunk(model.loss_chunk_tokens), chunked) if layout_class.part == "loss" else 1
    parts = num_parts(model.vocab_size, shards) if layout_class.in_parts else 1
    ratios: dict[str, Fraction | int] = {
        "b": Fraction(rows, layout_class.spec.sequence_groups),
        "l": Fraction(seq_len, context * tensor * halves),
        "w": mesh.replica,
        "p": mesh.stage,
        # Overwritten below, where ZeRO's collectives follow the rings of a torus.
        "z": mesh.shape["data"],
        "e": mesh.expert,
        "t": tensor // model.num_kv_heads if layout_class.labels_shared else tensor,
        # A ratio, as are others: a size that no axis of this layout splits may not be a whole number here.
        "d": Fraction(model.d_model, zero_shards * (tensor if layout_class.shared > 1 else 1) * block),
        "k": model.num_kv_heads if layout_class.shared > 1 else Fraction(model.num_kv_heads, tensor),
        # Query heads of a key head; under Ulysses `context` splits the query heads too.
        "g": Fraction(model.num_heads, in_use * (context if layout_class.kv_heads else 1)),
        # Halved, since rotary embeddings cut a head into halves: `head_dim=2 * labels["h"]` above.
        "h": Fraction(model.head_dim, 2 * block),
        "f": Fraction((layout_class.moe and layout_class.moe.d_ff) or model.d_ff, tensor * block),
        "x": Fraction(model.moe.num_experts, mesh.expert) if model.moe else 1,
        "c": model.moe.top_k if model.moe else 1,
        "v": Fraction(model.vocab_size, shards),
        "y": 1
        if pipeline is not None and layout_class.part == "layers"
        else layers,  # a pipeline's passes are of single layers
        "u": positions,
        "q": chunk,
        "m": -(-chunked // chunk),
        "o": -(-model.vocab_size // shards // parts),
        "n": parts,
    }
    for letter, length in zip("zrs", layout.rings, strict=False):
        ratios[letter] = Fraction(length, context if letter == "zrs"[len(layout.rings) - 1] else 1)
    return {letter: value.as_integer_ratio() for letter, value in ratios.items()}
