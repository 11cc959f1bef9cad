"""Settings with which a job takes less memory on the same devices, each of them checked.

Candidates come in the order of how little they change: more microbatches, recomputation, sharding, host
memory, a smaller batch, smaller formats of the state (which change the losses), and at last all of it
together.
"""

import dataclasses
import itertools
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from jtrain.layout.layout import Layout, LayoutSpec
from jtrain.layout.mesh import BATCH_AXES
from jtrain.optim import Muon, check_layout
from jtrain.plan.estimate.memory import memory
from jtrain.plan.job import Job
from jtrain.plan.search import resolve_as_needed
from jtrain.plan.search_task import SearchTask
from jtrain.step.layout_choices import frugal, layout_settings, open_shares, with_remat, with_shares

GIB = 2**30

MAX_LINES = 4
"""Settings that a message lists."""

type StateFormats = tuple[tuple[str, str], ...]
"""Config paths of the optimizer or of `precision`, with other values."""

# From the smallest change of the losses to the largest.
_INT8: StateFormats = (("optimizer.moment_dtype", "int8"),)
_BF16: StateFormats = (("precision.param_dtype", "bfloat16"), ("optimizer.param_rounding", "stochastic"))
_SUMS: StateFormats = (("precision.grad_accum_dtype", "bfloat16"),)


@dataclasses.dataclass(frozen=True)
class FittingSettings:
    """Settings of a job that fits, by config path, and the bytes that it takes on a device.

    on_host: True if what does not fit lies in host memory.
    """

    settings: dict[str, object]
    needed_bytes: int
    on_host: bool = False


def set_options(settings: Iterable[tuple[str, object]]) -> str:
    """The `--set` options that select these values."""
    return " ".join(f"--set {shell_word(f'{path}={value}')}" for path, value in settings)


def shell_word(text: str) -> str:
    """`text` as a word of a shell: in double quotes where it has single ones, which `shlex.quote` would nest."""
    # What a shell reads inside double quotes.
    return shlex.quote(text) if "'" not in text or set(text) & set('"$`\\!') else f'"{text}"'


def settings_of(layout: Layout, global_batch: int) -> dict[str, object]:
    """Config path -> value of what this module, or a search, changes of a job without its formats."""
    axes = {f"mesh.{axis}": size for axis, size in layout.mesh.shape.items()}
    return axes | layout_settings(layout.spec) | {"data.global_batch": global_batch}


def as_text(settings: Mapping[str, object]) -> dict[str, str]:
    """Values as a config prints them."""
    return {path: repr(value) for path, value in settings.items()}


def changed_options(settings: Mapping[str, object], config_values: Mapping[str, str]) -> str:
    """The `--set` options of the settings whose values differ from the config's, or are not in it."""
    return set_options(
        (path, value) for path, value in settings.items() if config_values.get(path) != repr(value)
    )


def option_lines(candidates: Iterable[FittingSettings], config_values: Mapping[str, str]) -> list[str]:
    """Up to `MAX_LINES` lines of settings, without those that the config has already."""
    lines: dict[str, str] = {}
    for fitting in candidates:
        if text := changed_options(fitting.settings, config_values):
            down_to = "down to " if fitting.on_host else ""
            lines.setdefault(text, f"  {text}  ({down_to}{fitting.needed_bytes / GIB:.1f} GiB)")
        # Each further candidate costs an estimate of the step's memory.
        if len(lines) == MAX_LINES:
            break
    return list(lines.values())


def smaller_states(job: Job) -> list[StateFormats]:
    """Formats of moments, parameters and gradient sums that take less memory, the smallest change first."""
    optimizer, precision = job.optimizer, job.layout.precision
    # None is offered for Muon, although its matrices take the same formats.
    if isinstance(optimizer, Muon):
        return []
    moments = _INT8 if optimizer.moment_dtype != "int8" else ()
    # Beside a master copy, stochastic rounding is refused.
    params = _BF16 if precision.param_dtype != "bfloat16" and optimizer.master_dtype == "none" else ()
    sums = _SUMS if precision.grad_accum_dtype != "bfloat16" else ()
    combinations = (moments, sums, params, moments + params, moments + params + sums)
    return list(dict.fromkeys(state for state in combinations if state))


def with_state(job: Job, state: StateFormats) -> Job:
    """The same job with other formats of parameters, moments and sums.

    Raises:
      UserError: its layout cannot have them.
    """
    if not state:
        return job
    values: dict[str, dict[str, Any]] = {"optimizer": {}, "precision": {}}
    for path, value in state:
        # Paths have two parts, such as `precision.param_dtype`.
        component, _, field = path.partition(".")
        values[component][field] = value
    precision = dataclasses.replace(job.layout.precision, **values["precision"])
    # Lays the job out anew, because formats are part of the layout.
    optimizer = dataclasses.replace(job.optimizer, **values["optimizer"])
    layout = dataclasses.replace(job.layout, precision=precision)
    return dataclasses.replace(job, optimizer=optimizer, layout=layout).relaid(layout.spec, layout.mesh)


def fitting_settings(
    job: Job, *, limit: int, share: Literal["as_needed"] | float = "as_needed"
) -> Iterator[FittingSettings]:
    """Yields settings of the same devices that need at most `limit` bytes on each, the smallest change first.

    Host memory is offered if the machine's is known.

    Args:
      share: share of the optimizer's state and of the parameters to offer for host memory.
    """
    for spec, global_batch, state in _candidates(job, share):
        # `as_needed` shares are 0 for now; `_resolved` finds them.
        plain = with_shares(spec, spec, dict.fromkeys(open_shares(spec), 0.0))
        try:
            changed = with_state(job, state).relaid(plain, job.layout.mesh, global_batch=global_batch)
            check_layout(changed.optimizer, changed.layout)
            resolved = _resolved(changed, spec, limit)
            plan = memory(changed.relaid(resolved, job.layout.mesh))
        except ValueError:
            continue  # does not split evenly, or host memory is too small
        if plan.total_bytes <= limit and (not plan.host_bytes or _host_holds(job, plan.host_bytes)):
            layout = dataclasses.replace(changed.layout, spec=spec)
            on_host = spec.offload != job.layout.spec.offload
            yield FittingSettings(settings_of(layout, global_batch) | dict(state), plan.total_bytes, on_host)


def _candidates(job: Job, share: Any) -> Iterator[tuple[LayoutSpec, int, StateFormats]]:
    """Yields options of the layout, sequences per step, and formats of the state."""
    spec, mesh, batch = job.layout.spec, job.layout.mesh, job.global_batch
    shards = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    stages = [stage for stage in (0, 1, 2, 3) if stage >= spec.zero_stage]
    # The config's remat, then full recomputation.
    remats = list(dict.fromkeys((spec, with_remat(spec, ()))))
    # As the config has it, and one sequence per device at a time.
    microbatch_counts = sorted({spec.microbatches, max(1, batch // shards)})
    hosts = [spec.offload]
    if _offloads(job):
        hosts += [dataclasses.replace(spec.offload, optimizer=share)]
        # Only a loop over layers fetches parameters layer by layer.
        if job.model.scan_layers:
            hosts += [dataclasses.replace(spec.offload, optimizer=share, params=share)]
            hosts += [dataclasses.replace(spec.offload, optimizer=share, params=share, gradients=share)]
    for offload, stage, base, microbatches in itertools.product(hosts, stages, remats, microbatch_counts):
        yield (
            dataclasses.replace(base, zero_stage=stage, microbatches=microbatches, offload=offload),
            batch,
            (),
        )
    frugal_spec = frugal(spec, mesh)
    single_microbatch = dataclasses.replace(frugal_spec, microbatches=1)
    # One sequence per device is the smallest batch of this mesh.
    if shards < batch:
        yield single_microbatch, shards, ()
    for base in (spec, dataclasses.replace(frugal_spec, microbatches=microbatch_counts[-1])):
        for state in smaller_states(job):
            yield base, batch, state
    for state, offload in itertools.product(smaller_states(job)[-1:], hosts):
        yield dataclasses.replace(single_microbatch, offload=offload), shards, state


def _offloads(job: Job) -> bool:
    """True if optimizer state can be kept in host memory, whose size and link must be known."""
    machine = job.machine
    if machine is None or machine.host_memory_bytes is None or isinstance(job.optimizer, Muon):
        return False
    # A CPU's memory is the host's, so nothing is gained there.
    linked = job.platform != "cpu" and machine.device.host.link_bytes_per_s is not None
    return linked and not job.layout.spec.offload.unified_memory


def _resolved(job: Job, spec: LayoutSpec, limit: int) -> LayoutSpec:
    """The options with every `as_needed` share resolved, as a run with `limit` bytes resolves them.

    Raises:
      UserError: the run does not fit even with all of them on the host.
    """
    if not open_shares(spec):
        return spec
    assert job.machine is not None
    # A machine with `limit` bytes makes the search resolve shares for it.
    machine = dataclasses.replace(
        job.machine, device=dataclasses.replace(job.machine.device, hbm_bytes=limit)
    )
    return resolve_as_needed(SearchTask(dataclasses.replace(job, machine=machine), spec), job.layout.mesh)


def _host_holds(job: Job, host_bytes: int) -> bool:
    host_capacity = None if job.machine is None else job.machine.host_bytes_per_device
    return host_capacity is None or host_bytes <= host_capacity
