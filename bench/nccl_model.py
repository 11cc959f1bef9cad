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
class PublishedTime:
    """One published time of an all-reduce over `hosts` hosts of 8 x H100."""

    hosts: int
    network: Network
    array_bytes: int
    us: float

    @property
    def predicted_us(self) -> float:
        """Time of the algorithm and protocol that NCCL's model chooses, by that model."""
        # Whole hosts: NCCL then uses NVLink inside and the network between them.
        group = nccl_group(make_fabric(DEVICES["h100"], 8 * self.hosts, self.network))
        assert group is not None
        return timed(group, "all-reduce", self.array_bytes)[0].nccl_us

    @property
    def error(self) -> float:
        """Predicted by published time, less 1."""
        return self.predicted_us / self.us - 1


def published_tables() -> list[tuple[str, list[PublishedTime]]]:
    """The tables, each with its name."""
    document: dict[str, Any] = json.loads(TABLES.read_text())
    tables = []
    for table in document["tables"]:
        hosts, network = table["hosts"], Network(**document["networks"][table["network"]])
        ranks = 8 * hosts
        # Tables give either times or bus bandwidths.
        times = dict(table.get("us", ()))
        for size, rate in table.get("bus_gb_per_s", ()):
            # nccl-tests: bus bandwidth = size / time * 2 (n - 1) / n for an all-reduce of n ranks.
            times[size] = size / (1000 * rate) * 2 * (ranks - 1) / ranks
        label = f"{hosts} x 8 H100, {table['network']}, {len(times)} sizes, {table['source']}"
        tables.append((label, [PublishedTime(hosts, network, size, us) for size, us in times.items()]))
    return tables


def run(args: Options) -> Iterator[Row]:
    """A row per table, then all sizes of all tables together."""
    del args
    tables = published_tables()
    for label, rows in tables:
        yield row(f"{label}: mean error of times", _mean(rows), "%")
    everything = [time for _, rows in tables for time in rows]
    yield row(f"all {len(everything)} times: mean error", _mean(everything), "%", bar="<= 15")
    farthest = max(everything, key=lambda time: abs(time.error))
    label = f"largest error, {farthest.hosts} hosts, {farthest.array_bytes:,} bytes: predicted"
    # The worst size is named: a mean could hide a wrong choice of algorithm.
    yield row(label, farthest.predicted_us, "us", baseline=farthest.us)


def _mean(rows: list[PublishedTime]) -> float:
    """Mean of the errors without their signs, in percent."""
    return 100 * sum(abs(time.error) for time in rows) / len(rows)
