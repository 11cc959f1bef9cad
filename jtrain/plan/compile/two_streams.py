"""Two-stream model of a compiled program: which seconds of network and host link pass while the device
computes.

Walks the scheduled HLO in order, with every iteration of its loops. Nothing runs and nothing is measured.

- The compute stream runs one instruction after the other. Each takes the longer of its FLOPs at the rate of
  their dtype and of its bytes at the memory's bandwidth; launches take no time, which can only make the
  hidden share smaller.
- A transfer begins when the compute stream reaches its start (of a TPU's sparse cores: the update that hands
  over the data) and the links are free, and takes its bytes over the link's bandwidth; no latency is known,
  unless the rates have seconds of their own. At its done the compute stream waits for it. A collective that
  is not a pair of start and done is waited for at once.
- Behind a switch a device has one link each way, and all its transfers queue for it. On a torus, permutes
  between other pairs use other links, each one direction of one dimension; every other collective uses both
  directions of its dimension, and permutes wait for it. Every permute is taken for one between neighbours.
- Copies between device and host memory have a link of their own each way. Copies within the device that have
  a start and a done take no time.

A second of a transfer is hidden if the compute stream does not wait in it, for this or for another transfer.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, cast

from jtrain.errors import UserError
from jtrain.hlo.device_groups import axes_of, groups_of, whole_arrays, wire_bytes
from jtrain.hlo.flops import bytes_accessed, flops
from jtrain.hlo.memory_traffic import NO_ACCESS
from jtrain.hlo.parser import HloProgram, Instruction, begin_of, done_of, read
from jtrain.hlo.scopes import scope_mark
from jtrain.hlo.traffic import host_copy
from jtrain.plan.compile.stream_clock import (
    Action,
    ComputeTime,
    LoopRun,
    StreamClock,
    Timeline,
    Transfer,
    TransferWait,
)
from jtrain.plan.estimate.collectives import Kind
from jtrain_kernels.cost import MATMUL, MEMORY, matmul_rate
from jtrain_kernels.device import DeviceSpec

_NO_TIME = {*NO_ACCESS, "opt-barrier", "iota"}

type NetworkSeconds = Callable[[Kind, tuple[str, ...], int, int], float]
"""Seconds of a collective of a kind, over mesh axes, of a number of bytes of the whole array, by groups of a
size."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """Speeds of one device.

    flops_16, flops_8, flops_32: FLOP/s of matmuls by the bits of their operands.
    memory: bytes/s of the device's memory.
    permute, collective: bytes/s that a device sends in a permute, and in every other collective.
    host: bytes/s each way between the memories of device and host; None if it is not published.
    links: `switch` if all transfers share one link, `torus` if permutes between other pairs use other links.
    network: seconds of each collective, in place of its bytes at `collective` or `permute`.
    """

    flops_16: float
    flops_8: float
    flops_32: float
    memory: float
    collective: float
    permute: float
    host: float | None
    links: Literal["switch", "torus"]
    network: NetworkSeconds | None = None


def rates_of(device: DeviceSpec, devices: int) -> Rates:
    """Rates from the device table: published peaks times the cost model's fractions, links at their full
    bandwidth.

    Raises:
      UserError: the device has no published peaks, or its links do not join that many devices.
    """
    memory, flops = device.hbm_bytes_per_s, device.peak_bf16_flops
    if memory is None or flops is None or device.link_bytes_per_s is None or devices > device.linked:
        raise UserError(
            f"{device.name}: the two-stream model needs published peaks and links that join all {devices} "
            f"devices; the table has {flops} FLOP/s, {memory} bytes/s of memory, {device.link_bytes_per_s} "
            f"bytes/s of links that join {device.linked}. Take another device, or a mesh of at most "
            f"{device.linked}."
        )
    # A collective of a torus uses one dimension, in both directions.
    both_ways = device.link_bytes_per_s / (device.torus_dims or 1)
    return Rates(
        flops_16=MATMUL * flops,
        # Without 8-bit units such matmuls run as 16-bit ones.
        flops_8=MATMUL * (device.peak_fp8_flops or flops),
        flops_32=MATMUL * (matmul_rate(device, "float32") or flops),
        memory=MEMORY * memory,
        collective=both_ways,
        permute=both_ways if device.torus_dims is None else both_ways / 2,
        host=device.host.link_bytes_per_s,
        links="switch" if device.torus_dims is None else "torus",
    )


def two_streams(
    hlo: str,
    mesh_shape: Mapping[str, int],
    rates: Rates,
    kernels: Mapping[tuple[str, str], float] | None = None,
) -> Timeline:
    """Runs the model on a compiled program.

    Args:
      hlo: `Compiled.as_text()`.
      mesh_shape: devices along each axis of the mesh that it was compiled for, in the order of `AXES`.
      kernels: (phase, layer) as of `scope_mark` -> seconds of all kernels there whose FLOPs are not in the
        program, in one run of it; they are divided equally among the executions of these kernels.

    Raises:
      UserError: the trip count of a loop is unknown; the program copies to or from host memory, but the speed
        of that link is not published.
    """
    program = read(hlo)
    clock = StreamClock(_Program(program, mesh_shape, rates, kernels or {}).actions, rates.links)
    clock.run(program.entry)
    return clock.timeline()


class _Program:
    """Actions of every computation that is not part of a fusion, in schedule order."""

    def __init__(
        self,
        program: HloProgram,
        mesh_shape: Mapping[str, int],
        rates: Rates,
        kernels: Mapping[tuple[str, str], float],
    ) -> None:
        self.program = program
        self._mesh_shape = mesh_shape
        self._rates = rates
        self._computed: dict[str, tuple[Action, ...]] = {}
        # Counted before the walk: each execution takes an equal share of the seconds of its place.
        executions = collections.Counter[tuple[str, str]]()
        if kernels:
            for kernel, times in self._all_kernels(self.program.entry, 1):
                executions[self._mark(kernel)] += times
        self._kernel_s = {
            mark: seconds / executions[mark] for mark, seconds in kernels.items() if executions[mark]
        }

    def actions(self, name: str) -> tuple[Action, ...]:
        """Actions of one computation."""
        if name not in self._computed:
            self._computed[name] = tuple(self._actions(self.program.computations[name]))
        return self._computed[name]

    def _actions(self, body: list[Instruction]) -> Iterator[Action]:
        waits: dict[str, str] = {}  # done -> the start that it waits for
        handovers: dict[str, Transfer] = {}  # update -> the transfer that begins with it
        unfinished: list[str] = []
        for index, i in enumerate(body):
            if i.name in waits:
                yield TransferWait(waits[i.name])
            elif i.name in handovers:
                yield handovers[i.name]
            elif i.opcode == "while":
                body_match = re.search(r"body=%([\w.-]+)", i.line)
                trips = self.program.trip_count(i.line)
                if body_match is None or trips is None:
                    raise UserError(f"a loop's trip count is not in the HLO: {i.line[:200]}")
                yield LoopRun(body_match[1], trips)
            elif i.opcode in ("call", "conditional"):
                # All branches of a conditional, since the program does not say which one runs.
                yield from (LoopRun(name, 1) for name in i.called)
            elif transfer := self._transfer(i, body):
                # A TPU's sparse cores start before they have data: the transfer begins at a later update.
                begin_index = begin_of(body, index) if i.opcode.endswith("-start") else index
                if begin_index == index:
                    yield transfer
                else:
                    handovers[body[begin_index].name] = transfer
                done_index = done_of(body, index) if i.opcode.endswith("-start") else None
                # The compute stream waits at once for a collective without a pair, and for one marked
                # synchronous.
                if not i.opcode.endswith("-start") or '"is_sync":true' in i.line:
                    yield TransferWait(i.name)
                elif done_index is not None:
                    waits[body[done_index].name] = i.name
                else:
                    unfinished.append(i.name)
            elif not i.opcode.endswith(("-start", "-update", "-done")) and (seconds := self._compute_s(i)):
                yield ComputeTime(seconds)
        yield from map(TransferWait, unfinished)  # their done is in another computation

    def _collectives(self, i: Instruction) -> Iterator[Instruction]:
        """The instruction if it is a collective, else those in the computations that it calls."""
        if i.collective:
            yield i
        elif not i.opcode.endswith(("-update", "-done")):
            for inside in self.program.inside(i):
                yield from self._collectives(inside)

    def _transfer(self, i: Instruction, body: list[Instruction]) -> Transfer | None:
        if collectives := list(self._collectives(i)):
            # A fusion with several collectives is one transfer of all their bytes.
            return self._sent(i, collectives)
        if copies := list(self._host_copies(i, body)):
            if self._rates.host is None:
                reason = (
                    "the program copies to or from host memory, but the speed of that link is not published"
                )
                raise UserError(f"{reason}: {i.line[:200]}")
            (direction, _), size = copies[0], sum(size for _, size in copies)
            return Transfer(i.name, direction, i.op_name, direction, size, size / self._rates.host)
        return None

    def _host_copies(self, i: Instruction, body: list[Instruction]) -> Iterator[tuple[str, int]]:
        """Directions and bytes of the copies between device and host memory in an instruction."""
        if copy := host_copy(i, body):
            yield copy
        elif i.opcode == "fusion" or i.opcode.endswith("-start"):
            for name in i.called:
                for inside in self.program.computations[name]:
                    yield from self._host_copies(inside, self.program.computations[name])

    def _sent(self, i: Instruction, collectives: list[Instruction]) -> Transfer:
        sent_bytes, seconds, link = 0, 0.0, ""
        for collective in collectives:
            kind, groups = collective.collective, groups_of(collective, self._mesh_shape)
            group = max(map(len, groups), default=1)
            array_bytes = sum(size for _, size in whole_arrays(collective, group, self.program.types))
            size = wire_bytes(kind, array_bytes, group)
            is_permute = kind == "collective-permute"
            # Permutes between the same pairs share a link; all other collectives use all links ("").
            link = str(groups) if is_permute else ""
            sent_bytes += size
            if self._rates.network is None:
                seconds += size / (self._rates.permute if is_permute else self._rates.collective)
            else:
                seconds += self._rates.network(
                    cast(Kind, kind), axes_of(groups, self._mesh_shape), array_bytes, group
                )
        return Transfer(i.name, collectives[0].collective, collectives[0].op_name, link, sent_bytes, seconds)

    def _compute_s(self, i: Instruction) -> float:
        if i.opcode in _NO_TIME or re.search(r'custom_call_target="(AllocateBuffer|ConcatBitcast)"', i.line):
            return 0.0
        kernels = sum(self._kernel_s.get(self._mark(kernel), 0.0) for kernel in self._kernels(i))
        if kernels:  # kernels of experts leave most of their buffers unread
            return kernels + self._matmul_s(i)
        # Roofline: memory traffic and matmuls of one instruction overlap.
        moving = bytes_accessed(i, self.program) / self._rates.memory
        return max(moving, self._matmul_s(i))

    def _matmul_s(self, i: Instruction) -> float:
        """Seconds of the matmuls of an instruction, each at the rate of its first operand's dtype."""
        if i.opcode == "fusion":
            return sum(map(self._matmul_s, self.program.inside(i)))
        work = flops(i, self.program)
        if not work:
            return 0.0
        dtype = self.program.types.get(i.operands[0], "")
        if dtype.startswith("f8"):
            return work / self._rates.flops_8
        return work / (self._rates.flops_32 if dtype.startswith("f32") else self._rates.flops_16)

    def _kernels(self, i: Instruction) -> Iterator[Instruction]:
        """Custom calls in an instruction that are kernels without stated FLOPs."""
        if i.opcode == "custom-call":
            is_kernel = re.search(r'custom_call_target="[^"]*(mosaic|tpu_custom_call|triton|fmha)', i.line)
            if is_kernel and not flops(i, self.program):
                yield i
        elif i.opcode == "fusion":
            for inside in self.program.inside(i):
                yield from self._kernels(inside)

    def _all_kernels(self, name: str, times: int) -> Iterator[tuple[Instruction, int]]:
        """Kernels of a computation that runs `times` times, with their executions."""
        for i in self.program.computations[name]:
            for kernel in self._kernels(i):
                yield kernel, times
            if i.opcode in ("while", "call", "conditional"):
                # A loop of unknown trips counts once here: `_actions` refuses it.
                turns = self.program.trip_count(i.line) or 1 if i.opcode == "while" else 1
                for inside in i.called:
                    yield from self._all_kernels(inside, times * turns)

    def _mark(self, kernel: Instruction) -> tuple[str, str]:
        return scope_mark(kernel.op_name)
