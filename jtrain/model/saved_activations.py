"""Activations that a layer saves for its backward pass: names, bytes, and which of them go to host memory."""

from jtrain.errors import UserError
from jtrain.layout.dims import kv_heads_in_use
from jtrain.layout.layout import Layout, largest_first
from jtrain.layout.precision import itemsize
from jtrain.model.expert_dispatch import buffer_rows
from jtrain.model.forward_placement import LATENT, SAVEABLE
from jtrain.model.layer_scan import LAYER_INPUT

_F32 = 4


def keeps_by_name(layout: Layout) -> bool:
    """True if a layer saves only named activations; always under a pipeline, whose slots hold no weights.

    This also holds with `remat=none` if unnamed residuals would include copies of weights: values derived
    from a gathered or offloaded weight have no name, so the backward pass recomputes them.
    """
    spec = layout.spec
    staged = layout.pipeline is not None
    return staged or spec.remat != "none" or copies_weights(layout) or spec.offload.share("activations") > 0


def copies_weights(layout: Layout) -> bool:
    """True if a layer computes with copies of its weights: gathered (ZeRO-3), or fetched from the host."""
    return layout.gathers_weights or any(p.param_memory == "pinned_host" for p in layout.params)


def saveable(layout: Layout) -> tuple[str, ...]:
    """Names of the activations that the model's layers can save besides their input."""
    has_latents = any("C" in p.info.dims for p in layout.params)
    return (*SAVEABLE, LATENT) if has_latents else SAVEABLE


def kept_names(layout: Layout) -> tuple[str, ...] | None:
    """Names that a layer saves besides its input; None if it saves everything and recomputes nothing."""
    if not keeps_by_name(layout):
        return None
    return saveable(layout) if layout.spec.remat == "none" else layout.spec.remat_save


def named_bytes(layout: Layout) -> dict[str, int]:
    """Bytes per token of each named activation of one turn of the loop over layers, including its input.

    Sum over all devices along `tensor`: each holds 1 / tensor, split by heads, by F, or by positions.
    """
    heads: dict[str, dict[str, int]] = {}
    for info in (p.info for p in layout.params if p.info.is_stacked):
        heads.setdefault(info.path.rpartition(".")[0], {}).update(zip(info.dims, info.shape, strict=True))
    # A turn may have several layers of attention, or none.
    attentions = [size for size in heads.values() if set("NHD") <= set(size)]
    compute_bytes = itemsize(layout.precision.compute_dtype)
    # Repeated heads count: where `tensor` exceeds the key heads, every device saves a copy. Without K each
    # head has keys of its own.
    keys = [(kv_heads_in_use(size.get("K", size["N"]), layout.mesh.tensor), size) for size in attentions]
    latents = sum(size["C"] + size["U"] + size.get("Q", 0) for size in attentions if "C" in size)
    d_model = next(p.info.shape[p.info.dims.index("D")] for p in layout.params if "D" in p.info.dims)
    return {
        LAYER_INPUT: d_model * compute_bytes,
        "attention_q": sum(size["N"] * size["H"] for size in attentions) * compute_bytes,
        "attention_k": sum(heads * size["H"] for heads, size in keys) * compute_bytes,
        "attention_v": sum(heads * size.get("P", size["H"]) for heads, size in keys) * compute_bytes,
        # Plus the log-partition of each head.
        "attention": sum(
            size["N"] * (size.get("P", size["H"]) * compute_bytes + _F32) for size in attentions
        ),
        **({LATENT: latents * compute_bytes} if latents else {}),
        "attention_out": len(attentions) * d_model * compute_bytes,
        "mlp_gate": wide_per_token(layout, "gate") * compute_bytes,
        "mlp_up": wide_per_token(layout, "up") * compute_bytes,
    }


def wide_per_token(layout: Layout, name: str = "up") -> int:
    """Elements per token of one of the mlp's wide arrays, summed over all devices along `tensor`.

    For a mixture of experts: its whole dispatch buffer, sized for the worst case, plus the shared experts.
    """
    elements = 0
    for info in (
        p.info for p in layout.params if p.info.path.rpartition(".")[2] in (f"{name}_DF", f"{name}_XDF")
    ):
        elements += info.shape[info.dims.index("F")] * (rows_per_token(layout) if info.is_experts else 1)
    return elements


def rows_per_token(layout: Layout) -> int:
    """Rows of a device's dispatch buffer per token (`jtrain.model.expert_dispatch`); 0 without experts."""
    for info in (p.info for p in layout.params if p.info.is_experts):
        sizes = dict(num_experts=info.shape[info.dims.index("X")], expert=layout.mesh.expert)
        # One token has top_k pairs; the buffer grows linearly with them.
        return buffer_rows(info.top_k, info.top_k, **sizes)
    return 0


def offloaded_names(layout: Layout) -> tuple[str, ...]:
    """Saved activations that go to host memory: at most the share `layout.offload.activations`.

    Takes the largest activations first and skips those that no longer fit.

    Raises:
      UserError: the share is above zero, but smaller than every saved activation.
    """
    share = layout.spec.offload.share("activations")
    if share == 0:
        return ()
    # The input is saved under every remat, so it is always a candidate.
    candidates = (LAYER_INPUT, *(kept_names(layout) or ()))
    sizes = {name: n for name, n in named_bytes(layout).items() if name in candidates and n}
    chosen = largest_first(share * sum(sizes.values()), sizes)
    if not chosen:
        smallest = min(sizes, key=lambda name: sizes[name])
        raise UserError(
            f"layout.offload.activations={share:g} moves nothing: with layout.remat={layout.spec.remat} a "
            f"layer keeps {', '.join(sizes)}, of which {smallest} is the smallest, "
            f"{sizes[smallest] / sum(sizes.values()):.1%} of the bytes. Set layout.offload.activations to at "
            "least that, or to `none`."
        )
    return tuple(name for name in sizes if name in chosen)
