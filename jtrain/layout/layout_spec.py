"""Settings of a layout; `batch_split` has how they split a batch."""

import dataclasses
from typing import Literal

from jtrain.errors import UserError
from jtrain.layout.mesh import MeshSpec
from jtrain.layout.offload_spec import OffloadSpec


@dataclasses.dataclass(frozen=True)
class LayoutSpec:
    """Layout options of a model on a mesh; they change speed and memory, never the losses.

    zero_stage: sharding over `data` and `context`: 0 nothing; 1 optimizer state; 2 also gradients; 3 also
      parameters.
    microbatches: number of parts in which the global batch is computed; their gradients are summed.
    microbatch_tokens: most tokens that a device computes at a time: once the mesh is known, each of the
      `microbatches` is cut into as many parts as that takes (`split_batch`). None leaves them as they are.
    remat: activations that a layer saves for its backward pass: `none` saves all, `full` only the layer's
      input and recomputes the rest, `named` that input and `remat_save`.
    remat_save: activations to save, from `jtrain.model.forward_placement.SAVEABLE`.
    tensor_overlap: True splits collectives over `tensor` into pieces that overlap with a layer's matmuls,
      except where the kernels' cost model predicts that this is slower.
    sequence_groups: groups of a device's sequences that a layer computes side by side, so that the
      collectives of one group over `tensor` overlap with the computation of the others; 1 for all sequences
      together.
    mlp_chunk: positions of each sequence on a device whose hidden units of a dense feed-forward layer exist
      at a time, in both passes; None for all. Long sequences then need memory for their residual stream and
      attention alone.
    offload: arrays kept in host memory.
    context_attention: attention over `context`: `ring` sends keys and values round a ring while blocks of
      scores are computed (arXiv:2310.01889); `ulysses` exchanges positions for heads and back
      (arXiv:2309.14509).
    auto: True lets `jtrain.plan.search` pick zero_stage, remat, remat_save, microbatches and offload: the
      settings that fit with the least predicted step time. They replace the config's, and config.txt holds
      them.
    """

    zero_stage: Literal[0, 1, 2, 3] = 0
    microbatches: int = 1
    microbatch_tokens: int | None = None
    remat: Literal["none", "full", "named"] = "none"
    remat_save: tuple[str, ...] = ()
    tensor_overlap: bool = False
    sequence_groups: int = 1
    mlp_chunk: int | None = None
    offload: OffloadSpec = OffloadSpec()  # noqa: RUF009 - frozen
    context_attention: Literal["ring", "ulysses"] = "ring"
    auto: bool = False

    def __post_init__(self) -> None:
        if self.zero_stage not in (0, 1, 2, 3):
            raise UserError(f"layout.zero_stage={self.zero_stage!r} must be 0, 1, 2 or 3.")
        if self.microbatches < 1:
            raise UserError(f"layout.microbatches={self.microbatches} must be at least 1.")
        if self.microbatch_tokens is not None and self.microbatch_tokens < 1:
            raise UserError(
                f"layout.microbatch_tokens={self.microbatch_tokens} must be at least 1. Set "
                f"layout.microbatch_tokens=None to leave layout.microbatches={self.microbatches} as it is."
            )
        if self.sequence_groups < 1:
            raise UserError(f"layout.sequence_groups={self.sequence_groups} must be at least 1.")
        if self.mlp_chunk is not None:
            self._check_mlp_chunk()
        # An option that silently does nothing is refused in both directions.
        if (self.remat == "named") != bool(self.remat_save):
            way_out = (
                "layout.remat=named, or layout.remat_save=()"
                if self.remat_save
                else "layout.remat_save=('attention',) or other names, or layout.remat=none"
            )
            raise UserError(
                f"layout.remat={self.remat!r} with layout.remat_save={self.remat_save!r}: remat=named saves "
                f"these names, and no other remat does. Set {way_out}."
            )

    def _check_mlp_chunk(self) -> None:
        field = f"layout.mlp_chunk={self.mlp_chunk}"
        saved = {"mlp_gate", "mlp_up"}.intersection(self.remat_save)
        if self.mlp_chunk is not None and self.mlp_chunk < 1:
            raise UserError(
                f"{field} must be at least 1. Set layout.mlp_chunk=None for all positions at once."
            )
        if self.remat == "none" or saved:
            remat = f"layout.remat_save={self.remat_save!r}" if saved else "layout.remat=none"
            raise UserError(
                f"{field} with {remat}, which saves the hidden units of all positions. Set "
                "layout.remat=full, or layout.mlp_chunk=None."
            )
        if self.sequence_groups > 1 or self.tensor_overlap:
            way_out = "tensor_overlap=False" if self.tensor_overlap else "sequence_groups=1"
            name = way_out.partition("=")[0]
            raise UserError(
                f"{field} with layout.{name}={getattr(self, name)}: a layer in chunks does not hide its "
                f"collectives over `tensor`. Set layout.{way_out}, or layout.mlp_chunk=None."
            )

    def sums_within_layers(self, mesh: MeshSpec) -> bool:
        """True if gradients are summed over devices layer by layer, not all at once at the end."""
        return mesh.replica == 1 and (self.zero_stage >= 2 or mesh.zero_shards == 1)
