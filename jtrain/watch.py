"""What a run costs while it runs: times every step, keeps the ledger of wall time, opens trace windows.

The loop says what happens; here is what it took. A step costs some microseconds of this, a logged line about a
millisecond: `python -m jtrain.bench profile_overhead`.
"""

import contextlib
import dataclasses
import math
import time
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jtrain.config import Run
from jtrain.data import Fed
from jtrain.layout import Layout
from jtrain.mesh import BATCH_AXES
from jtrain.metrics import Metrics, TrainLine
from jtrain.plan.collectives import collectives
from jtrain.plan.flops import flops_per_token, mfu
from jtrain.plan.memory import memory
from jtrain.profile import goodput, light
from jtrain.profile.clocks import spec_mhz
from jtrain.profile.sampler import Sampler
from jtrain.profile.trace import compiled_text
from jtrain.profile.windows import FOLDER, Windows
from jtrain_kernels import device

MODULE = "jit_train_step"
"""What jax calls the compiled train step."""


@dataclasses.dataclass
class Interval:
    """What happened since the last logged line, evaluations, saves and the profiler's own work left out."""

    since_s: float
    since_ns: int
    steps: int = 0
    tokens: int = 0
    wait_ms: float = 0.0
    device_s: float = 0.0
    outside_s: float = 0.0


class Watch:
    """Watches one attempt. Entered early, since SIGUSR1 ends a process that does not listen; `begin` when steps do.

    Args:
      started_s: when the attempt began, in seconds since the epoch.
      source_names: of the data, as its counts name them.
    """

    def __init__(
        self, run: Run, layout: Layout, mesh: Mesh, workdir: Path, *, started_s: float, source_names: tuple[str, ...]
    ) -> None:
        self._run = run
        self._layout = layout
        self._mesh = mesh
        self._workdir = workdir
        self._started_s = started_s
        self._source_names = source_names
        self._flops = flops_per_token(run.model, seq_len=run.data.seq_len)
        self._spec = device.from_device(mesh.devices.flat[0])
        self._data_ranks = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
        processes = dict(process=jax.process_index(), num_processes=jax.process_count())
        self._windows = Windows(workdir, run.profile, **processes)
        self._times = light.StepTimes()
        self._entered = contextlib.ExitStack()
        self._compiled_before_s = 0.0
        self._ledger: goodput.Ledger | None = None
        self._compiling = True

    def __enter__(self) -> "Watch":
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._windows)
            stack.enter_context(light.CompileSeconds(self._compiled))
            local = self._mesh.local_devices
            self._sampler = Sampler(
                self._workdir / FOLDER / "samples",
                source=self._run.profile.clocks,
                platform=local[0].platform,
                devices=[device.local_hardware_id or 0 for device in local],
            )
            stack.enter_context(self._sampler)
            self._entered = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        try:
            self._entered.close()
        finally:
            if self._ledger is not None:
                self._ledger.close()

    def begin(self, start_step: int, metrics: Metrics, train_step: Any) -> None:
        """The state after `start_step` is there, and steps of `train_step` follow, if any are left."""
        self._metrics = metrics
        self._compilations = light.Compilations(train_step, ("state", "batch"))
        writes = jax.process_index() == 0 and start_step < self._run.num_steps
        self._ledger = goodput.Ledger(self._workdir, start_step=start_step, started_s=self._started_s, writes=writes)
        self._ledger.move(self._compiled_before_s, "compile")
        self._writes = writes
        note = "" if self._run.profile.clocks == "none" else self._sampler.note
        self._say([said for said in (note, self._windows.missed(start_step)) if said])
        self._last_s = self._dispatched_s = time.perf_counter()
        self._interval = Interval(self._last_s, time.time_ns())
        self._outside_s = 0.0

    @property
    def window_requested(self) -> bool:
        """Whether SIGUSR1 has asked this process for a window."""
        return self._windows.requested

    def step(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Around one step: dispatch, what the host does meanwhile, and in a window the wait for it."""
        return self._windows.step(step)

    def dispatch(self, *arguments: Any) -> Any:
        """Calls the train step; says if that compiled it anew, and which argument was to blame."""
        assert self._ledger is not None
        if self._compilations.count == 0:
            self._ledger.training()
            with self._ledger.during("compile"):
                returned, _ = self._compilations(*arguments)
        else:
            with self.device_wait():  # where their queue is full, calling waits for room
                returned, again = self._compilations(*arguments)
            if again is not None:
                self._metrics.say(f"the train step was {again}")
        self._dispatched_s = time.perf_counter()
        return returned

    @contextlib.contextmanager
    def device_wait(self) -> Iterator[None]:
        """Around what waits for the devices, or through them for other processes."""
        before_s = time.perf_counter()
        yield
        self._interval.device_s += time.perf_counter() - before_s

    def wait_in_window(self, results: Mapping[str, jax.Array]) -> None:
        """In a window the host waits for each step, so that its span in the trace is whole."""
        if self._windows.is_open:
            with self.device_wait():
                jax.block_until_ready(results)

    def data_waited(self, wait_ms: float, running: Mapping[str, Any]) -> None:
        """The host has waited so long for a batch, while the devices had the step of the results `running` to do.

        What counts in the ledger is the time in which they had nothing: none if they still run, else what came after
        the end of that step, which is taken to last as long as the median one.
        """
        assert self._ledger is not None
        if wait_ms < 1.0 or not running["loss_nats"].is_ready():
            return
        percentiles = self._times.percentiles()
        step_s = percentiles[0] if percentiles else 0.0
        stalled_s = min(1e-3 * wait_ms, time.perf_counter() - self._dispatched_s - step_s)
        if stalled_s > 0:
            self._ledger.move(stalled_s, "data_wait")

    @contextlib.contextmanager
    def outside(self, category: goodput.Category) -> Iterator[None]:
        """Around what is no training: its time is kept out of the step time."""
        assert self._ledger is not None
        before_s = time.perf_counter()
        name = "evaluate" if category == "evaluation" else category
        with self._ledger.during(category), jax.profiler.TraceAnnotation(f"jtrain:{name}"):
            yield
        self._outside_s += time.perf_counter() - before_s

    def step_done(self, step: int, values: Mapping[str, Any], fed: Fed, *, hash_hex: str) -> None:
        """The results of `step` have come; logs them if it is their turn."""
        interval, now_s = self._interval, time.perf_counter()
        if not self._compiling:
            self._times.add(now_s - self._last_s - self._outside_s)
        interval.steps += 1
        interval.tokens += int(values["tokens"])
        interval.wait_ms += fed.wait_ms
        interval.outside_s += self._outside_s
        self._last_s, self._outside_s = now_s, 0.0
        logged = self._run.metrics.is_logged(step, self._run.num_steps)
        if logged:
            self._log(step, values, fed, hash_hex, now_s)
        self._account(step, logged=logged)
        if logged or self._compiling:  # the step's compilation is no step time
            self._interval = Interval(now_s, time.time_ns())
        self._compiling = False

    def _log(self, step: int, values: Mapping[str, Any], fed: Fed, hash_hex: str, now_s: float) -> None:
        interval, run, stats = self._interval, self._run, fed.stats
        seconds = now_s - interval.since_s - interval.outside_s
        positions_per_s = interval.steps * run.data.global_batch * run.data.seq_len / seconds
        self._metrics.train(
            TrainLine(
                step=step,
                loss_nats=float(values["loss_nats"]),
                grad_norm=float(values["grad_norm"]),
                learning_rate=float(values["learning_rate"]),
                tokens=int(values["tokens"]),
                tokens_per_s=interval.tokens / seconds,
                step_time_ms=1e3 * seconds / interval.steps,
                data_wait_ms=interval.wait_ms / interval.steps,
                batch_hash=hash_hex,
                mfu=mfu(
                    self._flops,
                    tokens_per_s=positions_per_s,
                    num_devices=self._mesh.devices.size,
                    peak_flops=self._peak_flops(),
                ),
                device_memory_peak_gib=_memory_peak_gib(self._mesh),
                data_fill=stats.fill,
                data_cost_spread=stats.spread(self._data_ranks),
                data_drift=stats.drift,
                data_skipped=stats.skipped,
                data_tokens=stats.tokens(self._source_names),
                data_queue={loader.name: loader.queued for loader in stats.loaders},
                data_memory_mib={loader.name: loader.memory_bytes / 2**20 for loader in stats.loaders},
                **self._light(seconds / interval.steps),
            )
        )

    def _light(self, step_s: float) -> dict[str, Any]:
        """The fields of a line that say how the machine did."""
        interval = self._interval
        percentiles_s = self._times.percentiles() or (step_s,) * len(light.PERCENTILES)
        means = self._sampler.means(interval.since_ns, time.time_ns())
        own_s = max(0.0, step_s - interval.device_s / interval.steps)
        known = light.everywhere([own_s, *means.sm_mhz, *means.power_w, *means.energy_j])
        mhz, power_w, energy_j = (
            [None if math.isnan(x) else float(x) for x in part.ravel()] for part in _thirds(known[:, 1:])
        )
        energy = None if None in energy_j or not energy_j else sum(x for x in energy_j if x is not None)
        return {
            "step_time_p50_ms": 1e3 * percentiles_s[0],
            "step_time_p90_ms": 1e3 * percentiles_s[1],
            "step_time_p99_ms": 1e3 * percentiles_s[2],
            "straggler_score": light.host_scores([float(own) for own in known[:, 0]], step_s)
            | light.device_scores(mhz),
            "clock_mhz": _mean(mhz),
            "power_w": _mean(power_w),
            "joules_per_token": None if energy is None else energy / max(interval.tokens, 1),
            "host_rss_mib": light.host_rss_mib(),
            "compile_count": self._compilations.count,
        }

    def _account(self, step: int, *, logged: bool) -> None:
        """What a step adds to the ledger."""
        assert self._ledger is not None
        if logged:
            self._metrics.goodput(step, self._ledger.write(step)["categories"])
        else:
            self._ledger.step_done(step)

    def after(self, step: int, results: Mapping[str, jax.Array], *, asked: bool, last: bool) -> None:
        """After `step`: opens a window, or closes it and has it read; says what came of earlier ones.

        Args:
          results: of the step, which may still run.
          asked: whether any process wants a window.
          last: no step follows.
        """
        said: list[str | None] = []
        if self._windows.closes(step, last=last):
            with self.outside("idle"):
                said.append(self._windows.close(lambda: compiled_text(MODULE), self._sampler.save))
                self._sampler.fast(False)
        if not last and self._windows.opens(step, asked=asked):
            with self.device_wait():
                jax.block_until_ready(results)  # the first step traced has the devices to itself
            with self.outside("idle"):
                self._sampler.fast(True)
                said.append(self._windows.open(step, self._facts()))
        self._say([text for text in said if text is not None] + self._windows.finished())

    def end(self) -> None:
        """All is saved: waits for the reports of windows, and says where the time went."""
        assert self._ledger is not None
        with self._ledger.during("idle"):
            self._say(self._windows.finished(wait=True))
        summary = self._ledger.close()
        if summary is not None and self._writes:
            self._metrics.say(goodput.line(summary))

    def _say(self, texts: list[str]) -> None:
        for text in texts:
            self._metrics.say(text)
        if texts and self._ledger is not None:
            self._ledger.read_shares()

    def _compiled(self, seconds: float) -> None:
        if self._ledger is None:
            self._compiled_before_s += seconds
        elif self._ledger.current != "compile":
            self._ledger.move(seconds, "compile")

    def _peak_flops(self) -> float | None:
        """Peak of one device in FLOP/s; None where it is unknown, as of a CPU."""
        return None if self._spec is None else self._spec.peak_flops(self._run.layout.compute_dtype)

    def _facts(self) -> dict[str, Any]:
        """What the reader of a trace cannot know from it; written beside it."""
        assert self._ledger is not None
        run, data, spec, clocks = self._run, self._run.data, self._spec, self._sampler.facts()
        first = self._mesh.devices.flat[0]
        sizes: dict[str, Any] = dict(global_batch=data.global_batch, seq_len=data.seq_len)
        plan = memory(run.model, self._layout, run.optimizer, **sizes, platform=first.platform)
        rows = [{"name": name, "bytes": size, "source": "plan"} for name, size in plan.classes().items()]
        in_use = (self._mesh.local_devices[0].memory_stats() or {}).get("bytes_in_use")
        if in_use is not None:
            rows.append({"name": "in use", "bytes": in_use, "source": "allocator"})
        tokens = data.global_batch * data.seq_len
        return {
            "platform": first.platform,
            "device_kind": first.device_kind,
            "num_devices": self._mesh.devices.size,
            "process": jax.process_index(),
            "num_processes": jax.process_count(),
            "tokens_per_step": tokens,
            "step_flops": self._flops.total_flops * tokens,
            "module": MODULE,
            "settings": {
                f"layout.{name}": getattr(run.layout, name)
                for name in ("zero_stage", "microbatches", "remat", "reduce_dtype")
            },
            "goodput": self._ledger.so_far(),
            "mesh": dict(self._mesh.shape),
            "peaks": {
                "flops": self._peak_flops(),
                "hbm_bytes_per_s": None if spec is None else spec.hbm_bytes_per_s,
                "ref_mhz": (spec_mhz(spec) if spec is not None else None) or clocks.get("ref_mhz"),
                "max_mhz": clocks.get("max_mhz"),
            },
            "planned": [
                {"kind": row.kind, "axes": list(row.axes), "wire_bytes": row.wire_bytes}
                for row in collectives(run.model, self._layout, **sizes)
            ],
            "memory": rows,
        }


def _thirds(values: Any) -> tuple[Any, Any, Any]:
    size = values.shape[1] // 3
    return values[:, :size], values[:, size : 2 * size], values[:, 2 * size :]


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _memory_peak_gib(mesh: Mesh) -> float | None:
    """Most bytes ever in use on any of this process's devices; None where they do not say, as on a CPU."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in mesh.local_devices]
    known = [peak for peak in peaks if peak is not None]
    return max(known) / 2**30 if known else None
