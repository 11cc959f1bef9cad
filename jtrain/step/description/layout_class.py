"""Classes of layouts whose steps do the same in one part, and so share its abstract trace."""

import dataclasses
from typing import Any, Literal

from jtrain.layout.dims import kv_heads_in_use
from jtrain.layout.layout import Layout
from jtrain.layout.layout_spec import LayoutSpec
from jtrain.layout.offload_spec import OffloadSpec
from jtrain.layout.precision import PrecisionSpec
from jtrain.model.adapters.lora import Adaptation
from jtrain.model.expert_dispatch import num_pieces
from jtrain.model.router import MoESpec
from jtrain.model.saved_activations import kept_names
from jtrain.model.transformer import Transformer
from jtrain.model.unembedding import num_parts
from jtrain.pipeline.spec import PipelineSpec
from jtrain.step.description.pattern_sizes import PatternSizes, pattern_sizes
from jtrain.step.gradient_sums import sums_gradients
from jtrain.step.pipeline_ticks import counts_of
from jtrain.step.zero import gathers_once

type PartName = Literal["layers", "embedding", "loss", "end"]
"""Part of a step that is traced on its own: all layers for one microbatch, embedding or loss of one
microbatch, and what a step does once."""


@dataclasses.dataclass(frozen=True)
class LayoutClass:
    """Layouts whose steps do the same in one part, on arrays of other sizes.

    spec, precision: options of the layout, as they are unless this part of a step does not depend on them.
    staged: True with pipeline stages, whose schedule is `pipeline`.
    tensor, kv_heads: devices along `tensor`, and a device's key heads; 0 where only their products matter.
    shared: devices that compute the same key head; 2 for any number that is a label.
    moe: mixture of experts; their number and that of a token's choices are labels, here 2 and 1.
    pieces: pieces of an exchange of tokens over `expert`; 0 without one.
    few: True if a device has fewer experts than a token chooses.
    in_parts: True if the unembedding is gathered in parts.
    rings: number of torus dimensions of ZeRO's collectives.
    adapter: what an adapter adds and freezes; None without one.
    drops: True if its inputs are dropped at random.
    pattern: sizes of layers of a pattern, which then are those of the trace; None where all layers are alike.
    """

    part: PartName
    spec: LayoutSpec
    precision: PrecisionSpec
    staged: bool
    pipeline: PipelineSpec
    context: int
    order: str
    tensor: int
    kv_heads: int
    shared: int
    moe: MoESpec | None
    pieces: int
    few: bool
    qk_norm: bool
    tied: bool
    in_parts: bool
    rings: int
    adapter: Adaptation | None = None
    drops: bool = False
    pattern: PatternSizes | None = None

    @property
    def labels_shared(self) -> bool:
        """True if the devices of a key head have a label."""
        return self.part == "layers" and self.shared > 1 and not self.tensor


def class_of(part: PartName, model: Transformer, layout: Layout, *, rows: int, seq_len: int) -> LayoutClass:
    """The class that a layout belongs to in one part of the step.

    Args:
      rows: sequences that a device computes at a time.
    """
    mesh, spec, precision = layout.mesh, layout.spec, layout.precision
    of_layers, at_end = part == "layers", part == "end"
    pattern = None
    # A loop over parts of a row needs the row as it is.
    as_it_is = bool(model.pattern) or spec.mlp_chunk is not None
    if as_it_is and layout.pipeline is None and (of_layers or at_end):
        has_adapter = Adaptation.of(layout.infos) is not None
        rings = layout.rings
        pattern = pattern_sizes(model, mesh, rings, rows=rows, seq_len=seq_len, as_it_is=has_adapter)
    splits = layout.pipeline is not None and counts_of(layout).splits_backward
    # Passes of a layer are the same in a pipeline, but for what a loop over layers does once for all of them,
    # and for weights in 8 bits.
    shares_trace = of_layers and not splits and mesh.context == 1 and precision.matmul_dtype == "compute"
    staged = layout.pipeline is not None and not shares_trace
    stage = spec.zero_stage if mesh.zero_shards > 1 else 0
    # Only the end of a step sees sharded optimizer state, or weights that were gathered once.
    if not at_end and (stage == 1 or gathers_once(layout)):
        stage = 0
    activations = kept_names(layout) if of_layers else None
    needs_sums = of_layers and mesh.context > 1 and not staged and sums_gradients(layout)
    spec_changes: dict[str, Any] = dict(
        zero_stage=stage,
        microbatches=4 if staged else 2 if needs_sums else 1,
        remat="none" if activations is None else "named" if activations else "full",
        remat_save=activations or (),
        offload=OffloadSpec(),
        # Positions that are a label are no multiple of a chunk: such a trace has all of them at once.
        mlp_chunk=spec.mlp_chunk if pattern is not None and of_layers else None,
        auto=False,
    )
    precision = dataclasses.replace(precision, grad_accum_dtype="float32")
    if not of_layers:
        spec_changes |= dict(tensor_overlap=False, sequence_groups=1, context_attention="ring")
        precision = precision if at_end else dataclasses.replace(precision, matmul_dtype="compute")
    in_heads = of_layers and mesh.context > 1 and spec.context_attention == "ulysses"
    moe = model.router if of_layers or at_end else None
    exchanged_moe = moe if of_layers and mesh.expert > 1 else None
    shards = mesh.tensor * mesh.stage
    layout_class = LayoutClass(
        part,
        dataclasses.replace(spec, **spec_changes),
        precision,
        staged,
        _schedule(layout, splits=splits and of_layers, at_end=at_end) if staged else PipelineSpec(),
        mesh.context,
        layout.context_order,
        mesh.tensor if spec.tensor_overlap and of_layers else 0,
        kv_heads_in_use(model.num_kv_heads, mesh.tensor) // mesh.tensor if in_heads else 0,
        max(1, mesh.tensor // model.num_kv_heads) if of_layers or at_end else 1,
        # Without groups: their choice is a few numbers a token.
        moe and dataclasses.replace(moe, num_experts=2, top_k=1, num_groups=1, top_groups=1),
        num_pieces(rows * seq_len // mesh.context, exchanged_moe.top_k) if exchanged_moe else 0,
        exchanged_moe is not None and exchanged_moe.num_experts // mesh.expert < exchanged_moe.top_k,
        model.qk_norm if of_layers or at_end else False,
        model.tie_embeddings,
        part == "loss" and stage == 3 and num_parts(model.vocab_size, shards) > 1,
        len(layout.rings),
        Adaptation.of(layout.infos),
        of_layers and layout.adapter_dropout is not None,
        pattern,
    )
    if pattern is not None:
        return layout_class
    if layout_class.pieces == 1 and layout_class.shared > 1:
        # Sizes of a trace that tell shared heads apart are too many tokens for one piece.
        layout_class = dataclasses.replace(layout_class, pieces=2)
    return dataclasses.replace(layout_class, shared=2) if layout_class.labels_shared else layout_class


def input_keeping_class(layout_class: LayoutClass) -> LayoutClass:
    """The class of the same layouts, with layers that keep their input alone."""
    return dataclasses.replace(
        layout_class, spec=dataclasses.replace(layout_class.spec, remat="full", remat_save=())
    )


def _schedule(layout: Layout, *, splits: bool, at_end: bool) -> PipelineSpec:
    """The simplest schedule whose passes of a layer are the same."""
    gather = layout.pipeline_spec.gather if at_end else "tick"
    return PipelineSpec("zb-h1" if splits else "1f1b", gather=gather)
