"""Time of one collective over a fabric: on the terminal, as JSON, and as a launch script's variables."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from jtrain.plan.fabric.collective_time import CollectiveAlgorithm, collective_algorithms
from jtrain.plan.fabric.fabric import Fabric
from jtrain.plan.fabric.hashing import effective_queue_pairs
from jtrain.plan.fabric.launch_variables import choice_lines, network_lines
from jtrain.plan.fabric.nccl_constants import NCCL_VERSION
from jtrain.plan.fabric.nccl_model import Group, TimedEstimate, bus_bandwidth, nccl_group, timed
from jtrain.plan.fabric.spine import (
    SETTINGS,
    CollectiveKind,
    Incast,
    SpineTraffic,
    advised_queue_pairs,
    incast,
    senders_to_one,
    spine_traffic,
)
from jtrain.plan.sizes import show_bytes
from jtrain.report.number_formats import milliseconds
from jtrain.report.page import PageBlock, Title
from jtrain.report.table import Table, numbers, words
from jtrain.report.terminal import print_blocks


@dataclasses.dataclass(frozen=True)
class NetworkSheet:
    """One collective over one fabric.

    array_bytes: the whole array; of an all-to-all, one device's operand.
    messages: NCCL's messages on one connection; more queue pairs than these carry nothing.
    group: the devices as NCCL sees them; None where NCCL is not the library.
    """

    fabric: Fabric
    kind: CollectiveKind
    array_bytes: int
    traffic: SpineTraffic
    messages: int
    group: Group | None

    def share(self, queue_pairs: int = 1) -> float:
        """Fraction of the adapters' line rate that the network carries."""
        return self.fabric.network.efficiency / self.traffic.slowdown(min(queue_pairs, self.messages))

    def rows(self, queue_pairs: int = 1) -> list[TimedEstimate]:
        """NCCL's algorithms and protocols, its choice first; empty where it has no model."""
        # NCCL has no model of sends and receives.
        if self.group is None or self.kind == "all-to-all":
            return []
        return timed(self.group, self.kind, self.array_bytes, share=self.share(queue_pairs))

    def algorithms(self, queue_pairs: int = 1) -> list[CollectiveAlgorithm]:
        """Algorithms level by level, fastest first."""
        return collective_algorithms(self.fabric, self.kind, self.array_bytes, share=self.share(queue_pairs))

    def us(self, queue_pairs: int = 1) -> float:
        """Microseconds of the collective: of NCCL's choice, or of the fastest way where NCCL has no model."""
        rows = self.rows(queue_pairs)
        # The first row is NCCL's choice, which need not be the fastest.
        return rows[0].network_us if rows else self.algorithms(queue_pairs)[0].us

    @functools.cached_property
    def queue_pairs(self) -> int | None:
        """Queue pairs per connection to set; None if no hash is involved."""
        # Routing by load spreads one flow as well as many.
        if not self.traffic.hashed or not self.traffic.flows:
            return None
        return advised_queue_pairs(self.traffic, limit=self.messages)

    @property
    def incast(self) -> Incast:
        """Senders to one adapter at the same time, and what waits for it."""
        # With one queue pair: more of them add flows, not senders.
        rows = self.rows()
        senders = senders_to_one(
            self.kind, rows[0].estimate.algorithm if rows else "Ring", self.fabric.domains
        )
        # Of an all-to-all a domain's GPUs send over the adapter on the receiver's rail; a tree's child sends
        # its part.
        parts = self.fabric.domains if self.kind == "all-to-all" else self.fabric.domain
        return incast(senders, self.array_bytes / parts, self.fabric.network.buffer_bytes)


def time_collective(
    fabric: Fabric, kind: CollectiveKind, array_bytes: int, *, scattered: bool
) -> NetworkSheet:
    """Times a collective; `scattered` as in `spine_traffic`."""
    group = nccl_group(fabric)
    # NCCL's channels are spread over the adapters of a domain.
    connections = 1
    if group is not None and fabric.domains > 1 and kind != "all-to-all":
        connections = max(1, group.channels // fabric.domain)
    traffic = spine_traffic(fabric, kind, connections=connections, scattered=scattered)
    # On one connection: an all-to-all has one to each device.
    sent = array_bytes / fabric.count if kind == "all-to-all" else _sent_by_adapter(fabric, kind, array_bytes)
    # Asked with the most queue pairs compared, so the result is the messages, up to that many.
    messages = effective_queue_pairs(SETTINGS[-1], sent, connections)
    return NetworkSheet(fabric, kind, array_bytes, traffic, messages, group)


def _sent_by_adapter(fabric: Fabric, kind: CollectiveKind, array_bytes: int) -> float:
    """Bytes that one adapter sends in a ring over all devices."""
    passes = 2 if kind == "all-reduce" else 1
    return passes * (fabric.count - 1) / fabric.count * array_bytes / fabric.domain


def title(sheet: NetworkSheet) -> str:
    """One line: what is sent over which devices."""
    return f"{sheet.kind} of {show_bytes(sheet.array_bytes)} over {sheet.fabric}"


def describe(sheet: NetworkSheet) -> list[str]:
    """Lines about the fabric and what its spine leaves."""
    fabric, network, traffic = sheet.fabric, sheet.fabric.network, sheet.traffic
    lines = [
        f"{fabric.hosts} hosts; links join {fabric.domain} devices"
        + _rate(fabric.link_bytes_per_s, fabric.domain > 1)
    ]
    # Without a network there is no spine to describe.
    if fabric.domains == 1:
        return lines
    lines.append(
        f"network: {fabric.adapter_bytes_per_s * 8e-9:g} Gbit/s per device, {network.efficiency:.0%} of it "
        f"reached; rails: {fabric.rails}, {network.hosts_per_leaf} hosts per leaf, {fabric.uplinks} uplinks "
        f"of {fabric.uplink_bytes_per_s * 8e-9:.4g} Gbit/s, {network.routing} routing"
    )
    if not traffic.flows:
        lines.append("spine: nothing crosses it, all hosts are under one leaf of each rail")
        return lines
    spread = (
        "by load; each" if not traffic.hashed else "by a hash; with 1 queue pair per connection the fullest"
    )
    lines.append(
        f"spine: {traffic.flows} flows of a leaf over {traffic.links} uplinks, spread {spread} carries "
        f"{traffic.max_load():.2f} flows, and adapters get {sheet.share():.0%} of their rate"
    )
    return lines


def _rate(bytes_per_s: float, known: bool) -> str:
    return f" with {bytes_per_s / 1e9:g} GB/s each" if known else ""


def incast_line(sheet: NetworkSheet) -> str:
    """One sentence about receivers: how many send to one, and what a switch must hold."""
    backlog = sheet.incast
    # One sender cannot send faster than the port takes.
    if backlog.senders < 2:
        return "incast: none, one adapter sends to one"
    text = (
        f"incast: {backlog.senders} senders to one adapter: {show_bytes(backlog.backlog_bytes)} would wait "
        "in the switch; receivers admit a window of 4 MiB each (NCCL_BUFFSIZE), so "
        f"{show_bytes(backlog.admitted_bytes)} at most"
    )
    # Without the size of the buffer nothing can overflow it.
    if backlog.window_bytes is None:
        return f"{text}; network.buffer_mb says what a port holds"
    buffer = show_bytes(sheet.fabric.network.buffer_bytes or 0)
    if not backlog.overflows:
        return f"{text}, which a port's {buffer} hold"
    return (
        f"{text}, more than a port's {buffer}: it pauses or drops. A window of "
        f"{show_bytes(backlog.window_bytes)} fits"
    )


def print_sheet(sheet: NetworkSheet) -> None:
    """Prints the fabric, NCCL's table and choice, the levels, and the variables."""
    blocks: list[PageBlock] = [Title(title(sheet)), *describe(sheet)]
    if rows := sheet.rows():
        blocks += [*_nccl(sheet, rows)]
    elif sheet.kind == "all-to-all" and sheet.group is not None:
        blocks.append("\nNCCL has no model of an all-to-all: it is sends and receives")
    levels = Table("", words("way", "phase", "over") + numbers("us", "ms in all"))
    for algorithm in sheet.algorithms():
        for index, phase in enumerate(algorithm.phases):
            # Name and total stand only in the first row of an algorithm.
            name, total = (algorithm.name, milliseconds(algorithm.us)) if not index else ("", "")
            levels.add(name, phase.operation, phase.level, f"{phase.us:,.1f}", total)
    blocks += ["\nany library, level by level", levels]
    if sheet.fabric.domains > 1:
        blocks.append(incast_line(sheet))
    # One queue pair is NCCL's own setting.
    if sheet.queue_pairs is not None and sheet.queue_pairs > 1:
        blocks.append(
            f"with {sheet.queue_pairs} queue pairs per connection: "
            f"{milliseconds(sheet.us(sheet.queue_pairs))} ms in place of {milliseconds(sheet.us())}; `jtrain "
            "plan ecmp` has the table"
        )
    print_blocks(blocks)
    # Not through `print_blocks`, which would wrap lines of the script.
    print(shell_text(sheet), end="")


def _nccl(sheet: NetworkSheet, rows: list[TimedEstimate]) -> Iterator[PageBlock]:
    """NCCL's algorithms and protocols by its own model, and its choice."""
    assert sheet.group is not None
    node = sheet.group.node
    searched = {"ring": node.ring(), "tree": node.tree()}
    # NVLS channels are of interest only where NCCL may choose them.
    if any(row.estimate.algorithm.startswith("NVLS") for row in rows):
        searched["NVLS"] = node.nvls()
    channels = ", ".join(
        f"{name} {channels_found.count} x {channels_found.gb_per_s:g}"
        for name, channels_found in searched.items()
    )
    yield f"\nNCCL {NCCL_VERSION}'s own model, channels in GB/s: {channels}"
    names = ("latency us", "GB/s", "NCCL's us", "us here", "bus GB/s here")
    table = Table("", words("algorithm", "protocol") + numbers(*names))
    for row in rows:
        # By the time on this network, not by NCCL's own.
        bus = bus_bandwidth(sheet.kind, sheet.fabric.count, sheet.array_bytes, row.network_us)
        figures = row.estimate.latency_us, row.estimate.bandwidth, row.nccl_us, row.network_us, bus
        table.add(row.estimate.algorithm, row.estimate.protocol, *(f"{number:,.1f}" for number in figures))
    yield table
    # Rows are sorted by NCCL's estimate.
    best = rows[0]
    yield (
        f"NCCL chooses {best.estimate.algorithm} with {best.estimate.protocol}: {milliseconds(best.nccl_us)} "
        f"ms by its model, {milliseconds(best.network_us)} ms on this network"
    )


def shell_text(sheet: NetworkSheet) -> str:
    """NCCL's variables for this collective and network, as a shell script to be sourced."""
    rows = sheet.rows()
    lines = [f"# {title(sheet)}"]
    if rows:
        # There are rows only for collectives that NCCL models.
        assert sheet.kind != "all-to-all"
        lines += choice_lines(sheet.kind, rows[0].estimate, show_bytes(sheet.array_bytes))
    if sheet.group is not None:
        lines += network_lines(sheet.fabric.network, sheet.queue_pairs)
    # The title alone: say so, because an empty script looks like a failure.
    if len(lines) == 1:
        lines.append("# No variables of NCCL follow from it.")
    return "\n".join(lines) + "\n"


def to_json(sheet: NetworkSheet) -> dict[str, Any]:
    """The figures of the sheet; microseconds, bytes and bytes per second."""
    backlog = sheet.incast
    return {
        "device": sheet.fabric.device.name,
        "count": sheet.fabric.count,
        "collective": sheet.kind,
        "bytes": sheet.array_bytes,
        "us": sheet.us(),
        "nccl_version": NCCL_VERSION,
        "nccl": [
            {
                "algorithm": row.estimate.algorithm,
                "protocol": row.estimate.protocol,
                "latency_us": row.estimate.latency_us,
                "gb_per_s": row.estimate.bandwidth,
                "nccl_us": row.nccl_us,
                "us": row.network_us,
                "bus_gb_per_s": bus_bandwidth(
                    sheet.kind, sheet.fabric.count, sheet.array_bytes, row.network_us
                ),
            }
            for row in sheet.rows()
        ],
        "ways": [
            {
                "name": algorithm.name,
                "us": algorithm.us,
                "phases": [
                    {
                        # Keys of the file's format.
                        "what": phase.operation,
                        "where": phase.level,
                        "latency_us": phase.latency_us,
                        "sent_bytes": phase.sent_bytes,
                        "bytes_per_s": phase.bytes_per_s,
                        "us": phase.us,
                    }
                    for phase in algorithm.phases
                ],
            }
            for algorithm in sheet.algorithms()
        ],
        "spine": dataclasses.asdict(sheet.traffic) | {"share": sheet.share()},
        "queue_pairs": sheet.queue_pairs,
        "incast": dataclasses.asdict(backlog),
        "shell": shell_text(sheet).splitlines(),
    }
