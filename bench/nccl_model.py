"""NCCL's own model of all-reduce against published nccl-tests tables, 1 to 32 hosts of 8 x H100.

Nothing runs, and nothing was fitted: constants are NCCL's, the latency of AWS EFA is what its plugin tells
NCCL. `nccl_tables.json` beside this file has the tables with their sources, and what was left out.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jtrain.bench import Options, Row, row
from jtrain.plan.fabric.fabric import Network, make_fabric
from jtrain.plan.fabric.nccl_model import nccl_group, timed
from jtrain_kernels.device import DEVICES

TABLES = Path(__file__).with_name("nccl_tables.json")


@dataclasses.dataclass(frozen=True)
class Measured:
    """One published time of an all-reduce over `hosts` hosts of 8 x H100."""

    hosts: int
    network: Network
    array_bytes: int
    us: float

    @property
    def predicted_us(self) -> float:
        """Time of the algorithm and protocol that NCCL's model chooses, by that model."""
        group = nccl_group(make_fabric(DEVICES["h100"], 8 * self.hosts, self.network))
        assert group is not None
        return timed(group, "all-reduce", self.array_bytes)[0].nccl_us

    @property
    def error(self) -> float:
        """Predicted by published time, less 1."""
        return self.predicted_us / self.us - 1


def published() -> list[tuple[str, list[Measured]]]:
    """The tables, each with its name."""
    document: dict[str, Any] = json.loads(TABLES.read_text())
    found = []
    for table in document["tables"]:
        hosts, network = table["hosts"], Network(**document["networks"][table["network"]])
        ranks = 8 * hosts
        times = dict(table.get("us", ()))
        for size, rate in table.get("bus_gb_per_s", ()):
            times[size] = size / (1000 * rate) * 2 * (ranks - 1) / ranks
        what = f"{hosts} x 8 H100, {table['network']}, {len(times)} sizes, {table['source']}"
        found.append((what, [Measured(hosts, network, size, us) for size, us in times.items()]))
    return found


def run(args: Options) -> Iterator[Row]:
    """A row per table, then all sizes of all tables together."""
    del args
    tables = published()
    for what, rows in tables:
        yield row(f"{what}: mean error of times", _mean(rows), "%")
    everything = [one for _, rows in tables for one in rows]
    yield row(f"all {len(everything)} times: mean error", _mean(everything), "%", bar="<= 15")
    worst = max(everything, key=lambda one: abs(one.error))
    yield row(
        f"largest error, {worst.hosts} hosts, {worst.array_bytes:,} bytes: predicted", worst.predicted_us, "us",
        baseline=worst.us,
    )  # fmt: skip


def _mean(rows: list[Measured]) -> float:
    """Mean of the errors without their signs, in percent."""
    return 100 * sum(abs(one.error) for one in rows) / len(rows)
