"""Callback that opens and closes trace windows between steps, and samples clocks all the time."""

import contextlib
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jtrain.config.run import Run
from jtrain.plan.estimate.collectives import collectives
from jtrain.plan.estimate.flops import flops_per_token
from jtrain.plan.estimate.memory import memory
from jtrain.profile.analysis.pipeline_trace import facts_of
from jtrain.profile.capture.device_peaks import DevicePeaks
from jtrain.profile.capture.trace import compiled_text
from jtrain.profile.capture.windows import Windows
from jtrain.profile.clocks.sampler import Sampler
from jtrain.profile.trace_dir import FOLDER
from jtrain.step.pipeline_ticks import relative_costs, ticks_of
from jtrain.train.callbacks import Callback, DispatchedStep, LoopPhase, RunContext
from jtrain.train.goodput_ledger import GoodputLedger

MODULE = "jit_train_step"
"""Name that jax gives to the compiled train step."""


class TraceWindows(Callback):
    """Traces the steps of `profile.steps`, and five steps after each SIGUSR1.

    It is entered early: before that, SIGUSR1 is ignored or ends the process. A window opens and closes
    between steps, so evaluations and saves are outside of every step's span.

    Args:
      goodput: supplies the seconds so far for the facts beside a trace, and reads new breakdowns.
      cache: the user's cache, which keeps measured peaks; None measures none.
    """

    def __init__(self, run: Run, workdir: Path, goodput: GoodputLedger, cache: Path | None) -> None:
        self._run = run
        self._cache = cache
        self._workdir = workdir
        self._goodput = goodput
        self._windows = Windows(
            workdir, run.profile, process=jax.process_index(), num_processes=jax.process_count()
        )
        local = jax.local_devices()
        self.sampler = Sampler(
            workdir / FOLDER / "samples",
            source=run.profile.clocks,
            platform=local[0].platform,
            devices=[device.local_hardware_id or 0 for device in local],
        )
        self._entered = contextlib.ExitStack()
        self._last: DispatchedStep | None = None

    def __enter__(self) -> "TraceWindows":
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._windows)
            stack.enter_context(self.sampler)
            self._entered = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self._entered.close()

    @property
    def requested(self) -> bool:
        return self._windows.requested

    def on_start(self, context: RunContext) -> None:
        self._context = context
        self.peaks = DevicePeaks(
            self._run.precision.compute_dtype, context.mesh, self._cache, context.metrics.say
        )
        note = "" if self._run.profile.clocks == "none" else self.sampler.note
        for text in (note, self._windows.missed_message(context.start_step)):
            if text:
                context.metrics.say(text)

    @contextlib.contextmanager
    def during(self, phase: LoopPhase, step: int, arguments: tuple[Any, ...]) -> Iterator[None]:
        if phase != "step":
            yield
            return
        # Before the step's own phase: a window opens and closes between two steps.
        self._between_steps(step - 1)
        with self._windows.step(step):
            yield

    def on_step(self, dispatched: DispatchedStep) -> None:
        self._last = dispatched
        if self._windows.is_open:  # wait for each traced step, so that its span in the trace is complete
            with self._context.during("device_wait", dispatched.step):
                jax.block_until_ready(dispatched.metrics)

    def on_end(self) -> None:
        if self._last is not None:
            # The last step of the run may be one of a window that is still open.
            self._close(self._last.step, last=True)
        with self._context.during("profile", 0 if self._last is None else self._last.step):
            self._say(self._windows.collect_reports(wait=True))

    def _between_steps(self, step: int) -> None:
        """After `step`, closes a window and starts its analysis, opens one, and reports finished analyses."""
        self._close(step, last=False)
        # `requested` of the last step: all processes know it, and open together.
        if self._last is not None and self._windows.decide_to_open(step, is_requested=self._last.requested):
            with self._context.during("device_wait", step):
                # Wait, so that no earlier step overlaps the first traced one.
                jax.block_until_ready(self._last.metrics)
            with self._context.during("profile", step):
                # No step is in flight now.
                self.peaks.measure()
                self.sampler.fast(True)
                self._say([self._windows.open(step, self._facts())])
        self._say(self._windows.collect_reports())

    def _close(self, step: int, *, last: bool) -> None:
        if self._windows.should_close(step, last=last):
            with self._context.during("profile", step):
                self._say([self._windows.close(lambda: compiled_text(MODULE), self.sampler.save)])
                self.sampler.fast(False)

    def _say(self, texts: Sequence[str | None]) -> None:
        messages = [text for text in texts if text]
        for text in messages:
            self._context.metrics.say(text)
        if messages:
            # A finished analysis has written a new breakdown: the ledger reads its shares.
            self._goodput.ledger.read_shares()

    def _facts(self) -> dict[str, Any]:
        """Returns the facts that a trace lacks and its analysis needs; they are written beside it."""
        run, job, mesh = self._run, self._context.job, self._context.mesh
        clocks, first = self.sampler.facts(), mesh.devices.flat[0]
        plan = memory(job)
        rows = [{"name": name, "bytes": size, "source": "plan"} for name, size in plan.classes().items()]
        # The allocator's own number, where the device gives one: the plan's rows are computed.
        in_use = (mesh.local_devices[0].memory_stats() or {}).get("bytes_in_use")
        if in_use is not None:
            rows.append({"name": "in use", "bytes": in_use, "source": "allocator"})
        tokens = job.tokens
        settings = {
            f"layout.{name}": getattr(run.layout, name) for name in ("zero_stage", "microbatches", "remat")
        }
        return {
            "platform": first.platform,
            "device_kind": first.device_kind,
            "num_devices": mesh.devices.size,
            "process": jax.process_index(),
            "num_processes": jax.process_count(),
            "tokens_per_step": tokens,
            "step_flops": flops_per_token(
                run.model, seq_len=run.data.seq_len, infos=run.param_infos()
            ).total_flops
            * tokens,
            "module": MODULE,
            "settings": settings | {"precision.reduce_dtype": run.precision.reduce_dtype},
            "goodput": self._goodput.ledger.so_far(),
            "mesh": dict(mesh.shape),
            # Where each device of this process, in the order of a trace, stands in the mesh.
            "partitions": [
                mesh.devices.flatten().tolist().index(device)
                for device in sorted(mesh.local_devices, key=lambda device: device.id)
            ],
            "peaks": self.peaks.facts()
            | {
                "ref_mhz": self.peaks.published_mhz or clocks.get("ref_mhz"),
                "max_mhz": clocks.get("max_mhz"),
            },
            "planned": [
                {"kind": row.kind, "axes": list(row.axes), "wire_bytes": row.wire_bytes}
                for row in collectives(job)
            ],
            "memory": rows,
            "pipeline": self._pipeline(),
        }

    def _pipeline(self) -> dict[str, Any] | None:
        layout, mesh = self._context.job.layout, self._context.mesh
        if layout.pipeline is None:
            return None
        local_devices = sorted(mesh.local_devices, key=lambda device: device.id)
        workers = [
            int(np.argwhere(mesh.devices == device)[0][mesh.axis_names.index("stage")])
            for device in local_devices
        ]
        return facts_of(ticks_of(layout), relative_costs(layout), workers)
