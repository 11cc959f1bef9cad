"""Small runs with the settings of a large one: layouts to compare, and a whole run to interrupt."""

import dataclasses
import itertools
from collections.abc import Iterator

from jtrain.check.small_model import shrink_model
from jtrain.checkpoint import CheckpointSpec
from jtrain.config.integrity_spec import IntegritySpec
from jtrain.config.run import EvalSpec, Run, validate
from jtrain.data import PackedText
from jtrain.errors import UserError
from jtrain.layout.layout import LayoutSpec
from jtrain.layout.mesh import AXES, MeshSpec
from jtrain.layout.offload_spec import OFFLOADABLE
from jtrain.layout.precision import BLOCK, CODES_PER_BYTE, PrecisionSpec
from jtrain.model.adapters.lora import LoRA
from jtrain.model.transformer import Transformer
from jtrain.profile.spec import ProfileSpec
from jtrain.step.objective import Distillation, Objective, ObjectiveSpec
from jtrain.telemetry.alerts import AlertsSpec
from jtrain.telemetry.metrics import MetricsSpec

DEVICES = 8
"""Emulated devices: three axes of two."""
STEPS = 4
"""Steps of the run that is interrupted in its middle."""
RANK = 8
"""Largest rank of a small adapter."""
LARGE_RATE = 1e-2
"""Least rate of the compared updates, so that they are far larger than what float32 rounds of a weight."""
_FLOAT32 = PrecisionSpec(
    param_dtype="float32", compute_dtype="float32", reduce_dtype="float32", grad_accum_dtype="float32"
)


@dataclasses.dataclass(frozen=True)
class SmallRuns:
    """Small runs of one large one.

    run: the large run.
    data: its data, in short rows.
    """

    run: Run
    data: PackedText

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that the run has in use."""
        return axes_in_use(self.run.mesh)

    @property
    def accumulates(self) -> bool:
        """True if the run computes its batch in several parts."""
        layout = self.run.layout
        return layout.microbatches > 1 or layout.microbatch_tokens is not None or layout.auto

    @property
    def has_blocks(self) -> bool:
        """True if the frozen matrices are in blocks."""
        return self.run.adapter is not None and self.run.adapter.base_dtype in CODES_PER_BYTE

    def model(self, vocab_size: int) -> Transformer:
        """The model, with as many layers as every stage and chunk of a pipeline needs."""
        # A repetition of the pattern for each chunk of two stages.
        stages = 2 * self.run.pipeline.chunks_per_worker if "stage" in self.axes and not self._is_file else 2
        return shrink_model(
            self.run.model,
            columns=self.data.seq_len,
            share=self.data.seq_len / self.run.data.seq_len,
            vocab_size=vocab_size,
            periods=min(stages, max(self.run.model.num_periods, 1)) if "stage" not in self.axes else stages,
            # ZeRO shards the width over these axes.
            block_inputs=2 ** len({"data", "context"} & {*self.axes}) * BLOCK if self.has_blocks else 0,
        )

    @property
    def _is_file(self) -> bool:
        return self.run.pipeline.is_file

    def plain(self, vocab_size: int) -> Run:
        """One device in float32, without any option of a layout."""
        optimizer = self.run.optimizer
        run = dataclasses.replace(
            self.run,
            mesh=MeshSpec(),
            layout=LayoutSpec(),
            kernels=(),
            precision=_FLOAT32,
            model=self.model(vocab_size),
            adapter=self._adapter(),
            # The formula of the updates; how their state is stored has tests of its own.
            optimizer=dataclasses.replace(
                optimizer,
                peak_lr=max(optimizer.peak_lr, LARGE_RATE),
                warmup_steps=0,
                moment_dtype="float32",
                master_dtype="none",
                param_rounding="nearest",
            ),
            data=self.data,
            eval=EvalSpec(every_steps=None),
            profile=ProfileSpec(),
            callbacks=(),
            objective=self._objective(vocab_size),
            # Weights of a small model must not come where those of the run are read.
            weight_stream=None,
        )
        validate(run)
        return run

    def _objective(self, vocab_size: int) -> Objective:
        objective = self.run.objective
        if isinstance(objective, Distillation):
            return dataclasses.replace(objective, top_k=min(objective.top_k, vocab_size))
        return objective

    def _adapter(self) -> LoRA | None:
        """The adapter on a drawn base: the run's is as large as its model. Blocks stay blocks."""
        if (adapter := self.run.adapter) is None:
            return None
        return dataclasses.replace(
            adapter,
            base=None,
            start=None,
            base_dtype=adapter.base_dtype if self.has_blocks else None,
            rank=min(adapter.rank, RANK),
            # Masks are random: without them packed rows and rows of one document have one loss.
            dropout=0.0,
        )

    def with_axes(self, plain: Run, axes: tuple[str, ...]) -> Run:
        """The plain run with axes of two devices, and the layout's options.

        Raises:
          UserError: no small layout has these axes.
        """
        refusal: UserError | None = None
        for layout in self._layouts(axes):
            order = self.run.data.context_order
            run = dataclasses.replace(
                plain,
                mesh=MeshSpec(**dict.fromkeys(axes, 2)),
                layout=layout,
                data=dataclasses.replace(plain.data, context_order=order),
            )
            try:
                validate(run)
            except UserError as error:
                # The first one is of the nearest layout.
                refusal = refusal or error
                continue
            return run
        assert refusal is not None
        raise refusal

    def _layouts(self, axes: tuple[str, ...]) -> Iterator[LayoutSpec]:
        """Small forms of the layout, the nearest first; a schedule may want more microbatches."""
        layout = self.run.layout
        shares = {name: 0.5 for name in OFFLOADABLE if getattr(layout.offload, name) == "as_needed"}
        spec = dataclasses.replace(
            layout,
            auto=False,
            # What layout.auto will choose is not known here: stage 3 splits the most.
            zero_stage=3 if layout.auto else layout.zero_stage,
            microbatch_tokens=None,
            sequence_groups=min(layout.sequence_groups, 2),
            # Several chunks of a small row, of which the last is shorter.
            mlp_chunk=layout.mlp_chunk and min(layout.mlp_chunk, 11),
            offload=dataclasses.replace(layout.offload, unified_memory=False, **shares),
        )
        counts = (4, 8, 2) if "stage" in axes else (1,)
        for microbatches, groups in itertools.product(counts, {spec.sequence_groups, 1}):
            yield dataclasses.replace(spec, microbatches=microbatches, sequence_groups=groups)

    def interrupted(self, axes: tuple[str, ...], plain: Run, vocab_size: int) -> Run:
        """A whole run of a few steps on these axes, in the run's own precision and with its own optimizer."""
        run = self.with_axes(plain, axes)
        # The microbatches of a pipeline are what its schedule asks for.
        accumulation = 2 if self.accumulates and "stage" not in axes else run.layout.microbatches
        run = dataclasses.replace(
            run,
            num_steps=STEPS,
            layout=dataclasses.replace(run.layout, microbatches=accumulation),
            precision=self.run.precision,
            adapter=run.adapter
            and dataclasses.replace(run.adapter, base_dtype=getattr(self.run.adapter, "base_dtype", None)),
            model=self.model(vocab_size),
            optimizer=dataclasses.replace(self.run.optimizer, warmup_steps=1),
            checkpoint=CheckpointSpec(every_steps=None),
            metrics=MetricsSpec(log_every_steps=1),
            # Sums of bits change no number, and take half as long to compile as the step.
            integrity=IntegritySpec(checksums=False, recompute_every_steps=None),
            alerts=AlertsSpec(),
        )
        if isinstance(run.objective, Distillation):
            # No teacher has spoken of text that is cut for short rows, and what is stored has no state.
            run = dataclasses.replace(run, objective=ObjectiveSpec(run.objective.mean))
        validate(run)
        return run


def axes_in_use(mesh: MeshSpec) -> tuple[str, ...]:
    """Axes of a run's mesh with more than one device; `data=auto` is one, for it takes all devices."""
    return tuple(axis for axis in AXES if getattr(mesh, axis) == "auto" or getattr(mesh, axis) > 1)


def small_data(data: PackedText, *, seq_len: int, rows: int) -> PackedText:
    """The data in short rows, read in this process; pairs that are longer than a row are left out."""
    sources = {
        name: source if source.rejected_field is None else dataclasses.replace(source, on_too_long="drop")
        for name, source in data.sources.items()
    }
    return dataclasses.replace(
        data,
        sources=sources,
        seq_len=seq_len,
        global_batch=rows,
        engine="inline",
        lookahead_steps=1,
    )
