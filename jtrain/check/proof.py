"""All lines of a check, in the order in which they are printed."""

import contextlib
import dataclasses
import functools
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.check.adapter import adapter_off_is_base
from jtrain.check.interruption import resume_is_unbroken
from jtrain.check.layouts import LayoutReference
from jtrain.check.lines import DoesNotApply
from jtrain.check.memory import CompiledPlan
from jtrain.check.packing import (
    OneDevice,
    check_positions,
    export_is_import,
    packed_is_alone,
)
from jtrain.check.pairs import first_loss_is_ln_2, loss_is_formula, with_stored_reference
from jtrain.check.records import Sample, cut_pairs, cut_rows, read_samples, with_few_ids
from jtrain.check.sampled import learned_is_sampled, targets_are_never_zero
from jtrain.check.small_run import SmallRuns, axes_in_use, small_data
from jtrain.check.stored import check_stored, with_made_up_teacher
from jtrain.config import tree
from jtrain.config.run import Run, build_run, check_vocabulary
from jtrain.data import TextDataset, open_dataset
from jtrain.errors import UserError
from jtrain.model.adapters.adapted_kernel import without_adapter
from jtrain.model.adapters.block_quantization import without_blocks
from jtrain.step.objective import DPO, Distillation
from jtrain.step_comparison.comparable_run import ComparableRun

ROWS, LONG_ROWS, LONG_COLUMNS = 16, 8, 256
"""Rows of a small batch, and of one with more columns: eight devices have two or one of them."""
TEXT_COLUMNS, SAMPLE_COLUMNS, PAIR_COLUMNS = 128, 512, 1024
"""Most columns of a small row of text, which may be cut anywhere, of whole samples, and of pairs of them."""
READ_TOKENS, READ_S = 1 << 18, 8.0
"""Tokens of the run's own rows that are read, and the seconds that it may take."""
TOGETHER = 3
"""Axes of two that eight devices have."""
BUDGET_S = 88.0
"""Seconds at whose end a compiler that has not finished is given up."""

type Proofs = Iterator[tuple[str, Callable[[], str]]]
"""Lines by name, each with the function that proves it: see `lines.take_line`."""


class RunCheck:
    """Check of one run, which needs `small_run.DEVICES` devices.

    Args:
      run_config: config of a `Run`.
      memory: plan that is compiled meanwhile.
      started_s: start of the check, by time.perf_counter().

    Raises:
      UserError: the config, or its data, is refused as a run of it would be.
    """

    def __init__(self, run_config: Any, memory: CompiledPlan, *, started_s: float) -> None:
        self.run: Run = build_run(run_config)
        self.config_text = tree.flat(run_config)
        self._memory, self._started_s = memory, started_s
        self._held: list[tuple[str, ...]] = []
        self.dataset = open_dataset(self._own_data, seed=self.run.seed)
        check_vocabulary(self.run.model, self.dataset.vocab_size)

    def proofs(self) -> Proofs:
        """Yields the lines; one that is not called for costs nothing."""
        yield "learned = sampled", self._learned
        if any(source.message_weights for source in self.run.data.named_sources.values()):
            yield "weights of messages", self._weights
        rows = self.run.data.global_batch
        yield "targets per batch > 0", lambda: targets_are_never_zero(self.read, rows=rows)
        yield "packed = alone", self._packed
        if isinstance(self.run.objective, DPO):
            yield "first loss = ln 2", lambda: first_loss_is_ln_2(self.reference, self.run.objective)
            yield "loss of pairs = formula", lambda: loss_is_formula(self.reference, self.run.objective)
        yield from self._layouts()
        yield "accumulation = one batch", self._accumulation
        yield "export = import", self._export
        yield "adapter off = base", self._adapter
        yield "resume = unbroken", self._resume
        yield (
            "plan = compiler",
            lambda: self._memory.proof(BUDGET_S - (time.perf_counter() - self._started_s)),
        )

    @property
    def _own_data(self) -> Any:
        """The data in rows as long as the run's, a batch or a part of a large one at a time."""
        data = self.run.data
        rows = max(1, min(data.global_batch, READ_TOKENS // 4 // data.seq_len))
        return small_data(data, seq_len=data.seq_len, rows=rows)

    @functools.cached_property
    def read(self) -> list[Sample]:
        """The first rows of the run, as many as there is time for."""
        start, samples, tokens = time.perf_counter(), list[Sample](), 0
        with contextlib.closing(read_samples(self.dataset)) as batches:
            for sample in batches:
                samples.append(sample)
                tokens += sample.arrays["token_BL"].size
                if tokens >= READ_TOKENS or time.perf_counter() - start > READ_S:
                    break
        return samples

    @functools.cached_property
    def small(self) -> SmallRuns:
        """Small runs on short rows: a multiple of 16 columns, which every axis splits."""
        max_columns, sample_columns = TEXT_COLUMNS, TEXT_COLUMNS
        if any(stream.has_samples for stream in self.dataset.streams):
            max_columns = PAIR_COLUMNS if self.run.data.has_pairs else SAMPLE_COLUMNS
            units = itertools.chain.from_iterable(sample.units for sample in self.read)
            lengths = [sum(piece.end - piece.start for piece in unit) for unit in units]
            # Three samples a row show what packing does; more would only compute longer.
            sample_columns = max(sample_columns, 3 * int(np.quantile(lengths, 0.75)))
        columns = max(16, min(self.run.data.seq_len, max_columns, sample_columns) // 16 * 16)
        rows = ROWS if columns <= LONG_COLUMNS else LONG_ROWS
        return SmallRuns(self.run, small_data(self.run.data, seq_len=columns, rows=rows))

    @functools.cached_property
    def small_dataset(self) -> TextDataset:
        """The data in short rows."""
        return open_dataset(self.small.data, seed=self.run.seed)

    @functools.cached_property
    def samples(self) -> tuple[list[Sample], int]:
        """The cut batch, the batch as the data plane made it, and the size of their vocabulary."""
        with contextlib.closing(read_samples(self.small_dataset)) as batches:
            batch = next((s for s in itertools.islice(batches, 20) if s.num_targets), None)
        if batch is None:
            raise UserError(
                f"no target in 20 batches of rows of {self.small.data.seq_len} tokens: every sample is "
                "longer."
            )
        cut = cut_pairs if self.run.data.has_pairs else cut_rows
        return with_few_ids([cut(batch, seed=self.run.seed), batch])

    @functools.cached_property
    def plain(self) -> Run:
        """The small run on one device."""
        return self.small.plain(self.samples[1])

    @functools.cached_property
    def reference(self) -> LayoutReference:
        """Updates of one device, on the cut batch and then on the other one."""
        samples, comparable = self.samples[0], ComparableRun(self.plain)
        if isinstance(self.run.objective, DPO) and self.run.objective.reference == "stored":
            samples = with_stored_reference(comparable, samples)
        if isinstance(self.plain.objective, Distillation):
            samples = with_made_up_teacher(self.plain.objective, self.plain.model.vocab_size, samples)
        return LayoutReference(comparable, samples)

    @functools.cached_property
    def device(self) -> OneDevice:
        """The small model on one device."""
        params = without_blocks(without_adapter(self.reference.first_state.params))
        return OneDevice(self.plain.model, params)

    def _weights(self) -> str:
        raise DoesNotApply("message_weights=True: all lines compare targets that weigh alike")

    def _learned(self) -> str:
        return learned_is_sampled(self.dataset, self.read) + check_stored(
            self.run.objective, self.read, vocab_size=self.run.model.vocab_size
        )

    def _packed(self) -> str:
        # First: it computes nothing.
        for sample in self.samples[0]:
            check_positions(sample)
        results = self.reference.results
        assert results.nats_BL is not None
        samples = self.samples[0]
        return packed_is_alone(self.device, samples, self.run.objective, results.losses[0], results.nats_BL)

    def _layouts(self) -> Proofs:
        """A line for as many axes in use together as there are devices for, and one for each axis."""
        # Of the run: its small form is of records that are read, which may be what fails.
        axes = axes_in_use(self.run.mesh)
        groups = [group for group in dict.fromkeys([axes[:TOGETHER], axes[-TOGETHER:]]) if len(group) > 1]
        groups += [(axis,) for axis in axes] or [()]
        for group in groups:
            name = " x ".join(group) if len(group) != 1 else f"mesh.{group[0]}"
            yield f"{name or 'layout'} = one device", functools.partial(self._layout, group)

    def _layout(self, axes: tuple[str, ...]) -> str:
        # An axis was compared with the others that the run has beside it; alone it shows which one is wrong.
        for held_axes in self._held:
            if set(axes) < set(held_axes):
                return f"2 updates, as part of {' x '.join(held_axes)}"
        text = self.reference.compare(self.small.with_axes(self.plain, axes))
        self._held.append(axes)
        return text

    def _accumulation(self) -> str:
        if not self.small.accumulates:
            raise DoesNotApply("the batch is computed at once (layout.microbatches=1)")
        layout = dataclasses.replace(self.plain.layout, microbatches=4)
        # An evaluation has the rows of a microbatch at a time, whose nats no other row changes.
        return self.reference.compare(dataclasses.replace(self.plain, layout=layout))

    def _export(self) -> str:
        last = self.samples[1] - 1
        end_id = min(self.small_dataset.tokenizer.end_id, last)
        return export_is_import(self.device, self.samples[0][1], begin_id=end_id, end_id=end_id)

    def _adapter(self) -> str:
        if self.run.adapter is None:
            raise DoesNotApply("the run has no adapter")
        infos = self.plain.param_infos()
        assert self.plain.adapter is not None
        return adapter_off_is_base(
            *(self.reference, infos, self.device, self.samples[0][0]),
            freezes_all=not self.run.adapter.train,
            scale=self.plain.adapter.scale,
        )

    def _resume(self) -> str:
        # The ids of the tokenizer, of which a model may have more.
        vocab_size = min(self.run.model.vocab_size, -(-self.small_dataset.vocab_size // 16) * 16)
        run = self.small.interrupted(axes_in_use(self.run.mesh)[-TOGETHER:], self.plain, vocab_size)
        with tempfile.TemporaryDirectory() as scratch:
            return resume_is_unbroken(run, self.config_text, Path(scratch))
