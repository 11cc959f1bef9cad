"""All lines of a check, in the order in which they are printed."""

import contextlib
import functools
import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jtrain.check.interruption import resume_is_unbroken
from jtrain.check.layouts import Reference
from jtrain.check.lines import DoesNotApply, Line, take_line
from jtrain.check.memory import MemoryPlan
from jtrain.check.packing import OneDevice, export_is_import, packed_is_alone
from jtrain.check.records import Sample, cut_rows, read_samples, with_few_ids
from jtrain.check.sampled import learned_is_sampled, targets_are_never_zero
from jtrain.check.small_run import SmallRuns, small_data
from jtrain.config import tree
from jtrain.config.run import build_run, check_vocabulary
from jtrain.data import TextDataset, open_dataset
from jtrain.errors import UserError

ROWS = 16
"""Rows of a small batch: eight devices, or four and four microbatches, have two or one of them."""
TEXT_COLUMNS, SAMPLE_COLUMNS = 128, 512
"""Most columns of a small row of text, which may be cut anywhere, and of whole samples."""
READ_TOKENS, READ_S = 1 << 18, 8.0
"""Tokens of the run's own rows that are read, and the seconds that it may take."""
TOGETHER = 3
"""Axes of two that eight devices have."""
BUDGET_S = 88.0
"""Seconds at whose end a compiler that has not finished is given up."""


def prove(run_config: Any, memory: MemoryPlan, *, started_s: float) -> Iterator[Line]:
    """Yields the lines of a run; needs `small_run.DEVICES` devices.

    Args:
      run_config: config of a `Run`.
      started_s: start of the check, by time.perf_counter().

    Raises:
      UserError: the config, or its data, is refused as a run of it would be.
    """
    run = build_run(run_config)
    dataset = open_dataset(small_data(run.data, seq_len=run.data.seq_len, rows=_rows_read(run)), seed=run.seed)
    check_vocabulary(run.model, dataset.vocab_size)
    read = _read(dataset)
    yield take_line("learned = sampled", lambda: learned_is_sampled(dataset, read))
    yield take_line(
        "targets per batch > 0", lambda: targets_are_never_zero(read, rows=run.data.global_batch)
    )
    has_samples = any(stream.has_samples for stream in dataset.streams)
    columns = _columns(run.data.seq_len, SAMPLE_COLUMNS if has_samples else TEXT_COLUMNS)
    small = SmallRuns(run, small_data(run.data, seq_len=columns, rows=ROWS))
    small_dataset = open_dataset(small.data, seed=run.seed)
    own = next(sample for sample in itertools.islice(read_samples(small_dataset), 20) if sample.num_targets)
    [own, cut], vocab_size = with_few_ids([own, cut_rows(own, seed=run.seed)])
    plain = small.plain(vocab_size)
    # The layouts' batch is the cut one, and the batch as it is comes after it.
    reference = Reference(plain, [cut, own])
    device = OneDevice(plain.model, reference.first_state.params)
    yield take_line("packed = alone", lambda: packed_is_alone(device, [cut, own], reference.course.losses[0]))
    yield from _layout_lines(small, plain, reference)
    end_id = small_dataset.tokenizer.end_id
    ids: Any = dict(begin_id=min(end_id, vocab_size - 1), end_id=min(end_id, vocab_size - 1))
    yield take_line("export = import", lambda: export_is_import(device, own, **ids))
    yield take_line("adapter off = base", _no_adapter)
    yield take_line("resume = unbroken", lambda: _resume(small, plain, tree.flat(run_config)))
    yield take_line(
        "plan = compiler", lambda: memory.proof(BUDGET_S - (time.perf_counter() - started_s))
    )


def _rows_read(run: Any) -> int:
    """Rows that are read at a time: a batch, or a part of a large one."""
    return max(1, min(run.data.global_batch, READ_TOKENS // 4 // run.data.seq_len))


def _columns(seq_len: int, most: int) -> int:
    """Columns of a small row: a multiple of 16, which every axis splits."""
    return max(16, min(seq_len, most) // 16 * 16)


def _read(dataset: TextDataset) -> list[Sample]:
    """The first rows of the run, as many as there is time for."""
    start, samples, tokens = time.perf_counter(), list[Sample](), 0
    with contextlib.closing(read_samples(dataset)) as batches:
        for sample in batches:
            samples.append(sample)
            tokens += sample.arrays["token_BL"].size
            if tokens >= READ_TOKENS or time.perf_counter() - start > READ_S:
                break
    return samples


def _layout_lines(small: SmallRuns, plain: Any, reference: Reference) -> Iterator[Line]:
    """Yields a line for each axis in use, for all together, and for accumulation."""
    axes = small.axes
    options = _options(small)
    for axis in axes:
        run = functools.partial(small.with_axes, plain, (axis,))
        yield take_line(f"mesh.{axis} = one device", lambda run=run: reference.compare(run()))
    if not axes:
        yield take_line(
            "layout = one device without it", lambda: reference.compare(small.with_axes(plain, ()))
        )
    for some in dict.fromkeys([axes[:TOGETHER], axes[-TOGETHER:]]):
        if len(some) > 1:
            name = " x ".join(some)
            run = functools.partial(small.with_axes, plain, some)
            yield take_line(f"{name} = one device", lambda run=run: reference.compare(run()))

    def accumulation() -> str:
        if not small.accumulates:
            raise DoesNotApply(f"the batch is computed at once (layout.microbatches=1){options}")
        import dataclasses

        layout = dataclasses.replace(plain.layout, microbatches=4)
        return reference.compare(dataclasses.replace(plain, layout=layout))

    yield take_line("accumulation = one batch", accumulation)


def _options(small: SmallRuns) -> str:
    return ""


def _no_adapter() -> str:
    raise DoesNotApply("the run has no adapter")


def _resume(small: SmallRuns, plain: Any, config_text: str) -> str:
    run = small.interrupted(small.axes[-TOGETHER:], plain, small.run.model.vocab_size)
    with tempfile.TemporaryDirectory() as scratch:
        return resume_is_unbroken(run, config_text, Path(scratch))


def all_devices_are_here(count: int) -> None:
    """Raises UserError if fewer devices are emulated than the layouts need."""
    if len(jax.devices()) < count:
        raise UserError(f"{len(jax.devices())} devices are here, and the check needs {count} emulated ones.")
