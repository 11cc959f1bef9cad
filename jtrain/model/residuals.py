"""What a layer keeps for its backward pass: names, bytes, and which of them wait in host memory."""

from jtrain.layout import Layout, itemsize, largest_first
from jtrain.model.expert_rows import buffer_rows
from jtrain.model.transformer import LAYER_INPUT, SAVEABLE

_F32 = 4


def keeps_by_name(layout: Layout) -> bool:
    """Whether a layer keeps only what has a name: with `remat=none` too, if anything else would hold copies of weights.

    What is made of a weight that was gathered, or that came from host memory, has no name, so it is made again.
    """
    spec = layout.spec
    return spec.remat != "none" or copies_weights(layout) or spec.offload.share("activations") > 0


def copies_weights(layout: Layout) -> bool:
    """Whether a layer computes with copies of its weights that are dropped after use and made again."""
    gathers = layout.spec.zero_stage == 3 and layout.mesh.data > 1
    return gathers or any(p.param_memory == "pinned_host" for p in layout.params)


def kept_names(layout: Layout) -> tuple[str, ...] | None:
    """Names that a layer keeps for its backward pass besides its input; None if it keeps all and recomputes nothing."""
    if not keeps_by_name(layout):
        return None
    return SAVEABLE if layout.spec.remat == "none" else layout.spec.remat_save


def named_bytes(layout: Layout) -> dict[str, int]:
    """Bytes per token of each activation that has a name, of one layer; the layer's input among them.

    On all devices along `tensor` together: each holds 1 / tensor, by heads, by F, or by positions.
    """
    size = {letter: n for p in layout.params for letter, n in zip(p.info.dims, p.info.shape, strict=True)}
    wide = wide_per_token(layout)
    compute = itemsize(layout.spec.compute_dtype)
    query, key = size["N"] * size["H"] * compute, size["K"] * size["H"] * compute
    return {
        LAYER_INPUT: size["D"] * compute,
        "attention_q": query,
        "attention_k": key,
        "attention_v": key,
        "attention": query + size["N"] * _F32,  # with the log-partition of each head
        "attention_out": size["D"] * compute,
        "mlp_gate": wide * compute,
        "mlp_up": wide * compute,
    }


def wide_per_token(layout: Layout) -> int:
    """Elements per token of one of the mlp's wide arrays, on all devices along `tensor` together.

    Of a mixture: of all its rows, there for the worst case too, and of its shared experts.
    """
    wide = 0
    for info in (p.info for p in layout.params if p.info.path.rpartition(".")[2] in ("gate_DF", "gate_XDF")):
        wide += info.shape[info.dims.index("F")] * (rows_per_token(layout) if info.is_experts else 1)
    return wide


def rows_per_token(layout: Layout) -> int:
    """Rows that a device has room for, per token of its own: see `jtrain.model.expert_rows`; 0 without experts."""
    for info in (p.info for p in layout.params if p.info.is_experts):
        sizes = dict(num_experts=info.shape[info.dims.index("X")], expert=layout.mesh.expert)
        return buffer_rows(info.top_k, info.top_k, **sizes)
    return 0


def offloaded_names(layout: Layout) -> tuple[str, ...]:
    """What of that goes to host memory: `layout.offload.activations` of its bytes, the largest first that still fit.

    Raises:
      ValueError: the share is over zero, yet smaller than anything that is kept.
    """
    share = layout.spec.offload.share("activations")
    if share == 0:
        return ()
    candidates = (LAYER_INPUT, *(kept_names(layout) or ()))
    sizes = {name: n for name, n in named_bytes(layout).items() if name in candidates}
    chosen = largest_first(share * sum(sizes.values()), sizes)
    if not chosen:
        smallest = min(sizes, key=lambda name: sizes[name])
        raise ValueError(
            f"layout.offload.activations={share:g} moves nothing: with layout.remat={layout.spec.remat} a layer keeps "
            f"{', '.join(sizes)}, of which {smallest} is the smallest, {sizes[smallest] / sum(sizes.values()):.1%} of "
            "the bytes. Set layout.offload.activations to at least that, or to `none`."
        )
    return tuple(name for name in sizes if name in chosen)
