"""Choices among layouts of a model: what a search compares, what takes the least memory, and how a layout is
written.

The planner compares and prints layouts through this module, so a new option that it should choose is named
here alone.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from jtrain.layout.layout_spec import LayoutSpec
from jtrain.layout.mesh import MeshSpec
from jtrain.layout.offload_spec import OFFLOADABLE
from jtrain.model.block import check_blocks
from jtrain.model.embedding import check_embedding_norm
from jtrain.model.forward_placement import SAVEABLE
from jtrain.model.transformer import Transformer

type ZeroStages = tuple[Literal[0, 1, 2, 3], ...]
"""Values of `layout.zero_stage` that a choice goes with."""

EVERY: ZeroStages = (0, 1, 2, 3)

REMATS: tuple[tuple[str, ...] | None, ...] = (
    None,  # keep everything
    SAVEABLE,
    tuple(name for name in SAVEABLE if not name.startswith("mlp")),
    ("attention_q", "attention_k", "attention_v", "attention"),
    ("attention",),
    (),  # keep the layer's input only
)
"""Activations that a layer keeps for its backward pass, from the most memory and least work to the
opposite."""


def auto_settings(spec: LayoutSpec) -> dict[str, object]:
    """Config path -> value of every setting that `layout.auto` decides."""
    names = ("zero_stage", "remat", "remat_save", "microbatches", "microbatch_tokens")
    settings: dict[str, object] = {f"layout.{name}": getattr(spec, name) for name in names}
    return settings | {
        f"layout.offload.{name}": getattr(spec.offload, name) for name in (*OFFLOADABLE, "update")
    }


def layout_settings(spec: LayoutSpec) -> dict[str, object]:
    """Config path -> value of every setting that a search on a machine decides; `layout.auto` keeps some of
    them.
    """
    names = ("tensor_overlap", "sequence_groups", "mlp_chunk", "context_attention")
    return auto_settings(spec) | {f"layout.{name}": getattr(spec, name) for name in names}


def changed_settings(
    before: Mapping[str, object], after: Mapping[str, object], limit: int | None
) -> dict[str, object]:
    """Config path -> value of what a layout has otherwise than the one before.

    Args:
      before, after: axes of the mesh, `layout_settings`, and settings of a pipeline.
      limit: `layout.microbatch_tokens` of the config.
    """
    settings = {path: value for path, value in after.items() if before.get(path) != value}
    splits_anew = "layout.microbatches" in settings or any(path.startswith("mesh.") for path in settings)
    if limit is not None and splits_anew:
        # The config's limit would choose the number of microbatches again.
        number = after["layout.microbatches"]
        settings |= {"layout.microbatches": number, "layout.microbatch_tokens": None}
    return settings


def layout_line(spec: LayoutSpec) -> str:
    """ZeRO stage, remat, microbatches and offload in one line."""
    offload = "".join(f" offload.{name}={share}" for name, share in host_shares(spec).items())
    return f"zero_stage={spec.zero_stage} remat={spec.remat} microbatches={spec.microbatches}{offload}"


def layout_cells(spec: LayoutSpec) -> dict[str, str]:
    """Heading -> text of what a search decides, for a table of layouts."""
    offload = " ".join(
        f"{name[:5]}={share:.0%}" for name, share in host_shares(spec).items() if not isinstance(share, str)
    )
    return {
        "zero": str(spec.zero_stage),
        "remat": f"{len(spec.remat_save)} named" if spec.remat_save else spec.remat,
        "micro": str(spec.microbatches),
        "offload": offload or "-",
    }


def host_shares(spec: LayoutSpec) -> dict[str, float | str]:
    """Shares of offload that are not `none`."""
    named = {name: getattr(spec.offload, name) for name in OFFLOADABLE}
    return {name: share for name, share in named.items() if share != "none"}


def open_shares(spec: LayoutSpec) -> list[str]:
    """Fields of offload whose share is `as_needed`."""
    return [name for name, share in host_shares(spec).items() if share == "as_needed"]


def with_shares(spec: LayoutSpec, asked: LayoutSpec, changed: Mapping[str, float]) -> LayoutSpec:
    """`spec` with these shares of offload replaced; 0 means `none`.

    `update` is that of `asked` if any optimizer state is on the host; `unified_memory` if nothing is.
    """
    named: dict[str, Any] = {
        name: changed.get(name, getattr(spec.offload, name)) or "none" for name in OFFLOADABLE
    }
    offload = dataclasses.replace(
        asked.offload,
        **named,
        update="device" if named["optimizer"] == "none" else asked.offload.update,
        unified_memory=asked.offload.unified_memory and set(named.values()) == {"none"},
    )
    return dataclasses.replace(spec, offload=offload)


def alternatives(spec: LayoutSpec, mesh: MeshSpec, stages: ZeroStages = EVERY) -> Iterator[list[LayoutSpec]]:
    """Yields the layouts of each ZeRO stage that differ from `spec` in what they keep: all activations first.

    Args:
      stages: those to try where the mesh can shard.
    """
    for stage in stages if mesh.zero_shards > 1 else EVERY[:1]:
        # remat=none keeps what has a name under stage 3.
        remats = [
            names for names in REMATS if not (names == SAVEABLE and stage == 3 and mesh.zero_shards > 1)
        ]
        yield [with_remat(dataclasses.replace(spec, zero_stage=stage), names) for names in remats]


def with_remat(spec: LayoutSpec, names: tuple[str, ...] | None) -> LayoutSpec:
    """`spec` with layers that keep these activations; all for None."""
    remat = "none" if names is None else "named" if names else "full"
    return dataclasses.replace(spec, remat=remat, remat_save=names or ())


_MAX_GROUPS = 4


def check_layers(model: Transformer, spec: LayoutSpec, mesh: MeshSpec) -> None:
    """Refuses a layout that does not compute one of the layers.

    Raises:
      UserError: names the option, the field of the model and the way out.
    """
    check_blocks(model.blocks, spec, mesh)
    if model.embedding_norm:
        check_embedding_norm(mesh.stage)


def computed_layout(model: Transformer, spec: LayoutSpec, mesh: MeshSpec) -> LayoutSpec | None:
    """`spec`, or where it does not compute one of the layers, with sequences split by heads; None if that does
    not compute them either.
    """
    for attention in dict.fromkeys((spec.context_attention, "ulysses")):
        changed = dataclasses.replace(spec, context_attention=attention)
        try:
            check_layers(model, changed, mesh)
        except ValueError:
            continue
        return changed
    return None


def changes_of_one(spec: LayoutSpec, mesh: MeshSpec, *, rows: int, asked: LayoutSpec) -> Iterator[LayoutSpec]:
    """Yields layouts that differ from `spec` in one setting, and in those that it excludes.

    Args:
      rows: sequences of a device in a step.
      asked: of the config; it says how host memory is used.
    """
    seen_specs = {spec}
    for changed in _changes(spec, mesh, rows, asked):
        if changed not in seen_specs:
            seen_specs.add(changed)
            yield changed


def _changes(spec: LayoutSpec, mesh: MeshSpec, rows: int, asked: LayoutSpec) -> Iterator[LayoutSpec]:
    # Chunks of positions exclude what keeps the hidden units of all, and overlaps over `tensor`.
    without_chunks = dataclasses.replace(spec, mlp_chunk=None)
    yield without_chunks
    saved_names = SAVEABLE if spec.remat == "none" else spec.remat_save
    # One name more, or one less.
    neighbours = [
        tuple(name for name in SAVEABLE if (name in saved_names) != (name == other)) for other in SAVEABLE
    ]
    for names in (*REMATS, *neighbours):
        saves_hidden = names is None or any(name.startswith("mlp") for name in names)
        yield with_remat(without_chunks if saves_hidden else spec, names)
    counts = [count for count in range(1, rows + 1) if rows % count == 0]
    yield from (dataclasses.replace(spec, microbatches=count) for count in counts)
    if mesh.zero_shards > 1:
        yield from (dataclasses.replace(spec, zero_stage=stage) for stage in EVERY)
    if mesh.tensor > 1:
        yield dataclasses.replace(without_chunks, tensor_overlap=not spec.tensor_overlap, sequence_groups=1)
        rows_at_once = rows // spec.microbatches
        groups = [n for n in range(1, _MAX_GROUPS + 1) if rows_at_once and rows_at_once % n == 0]
        yield from (
            dataclasses.replace(without_chunks, tensor_overlap=False, sequence_groups=n) for n in groups
        )
    if mesh.context > 1:
        yield dataclasses.replace(spec, context_attention="ring")
        yield dataclasses.replace(spec, context_attention="ulysses")
    shares = host_shares(spec)
    yield from (with_shares(spec, asked, {name: 0.0}) for name in shares)


def frugal(spec: LayoutSpec, mesh: MeshSpec) -> LayoutSpec:
    """`spec` with all that can be sharded on a mesh, and layers that keep their input only."""
    # Without devices to shard over, a higher stage changes nothing.
    stage = 3 if mesh.zero_shards > 1 else spec.zero_stage
    return dataclasses.replace(with_remat(spec, ()), zero_stage=stage, auto=False)
