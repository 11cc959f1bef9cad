"""The survey's table III: a 12B fine-tune on 16 GPUs over 10 GbE and over InfiniBand, predicted.

Published: 39.8 s and 4.45 s a step (H. Zhu, Network and storage benchmarks for LLM training on the cloud,
  2025). The
source gives the machine (2 hosts of 8 H100; one adapter of 10 Gbit/s, or eight of 400), the model (Gemma 3
12B) and the strategy (FSDP, full shards again after the forward pass, gathers and reductions in bfloat16,
activation checkpointing, 4 sequences per GPU). It does not give the length of the sequences: its scripts cut
them at 1,024 or 8,192 tokens and pad them. `SEQ_LEN` is the one assumption; it decides the step over
InfiniBand, and a tenth of that over 10 GbE.

Whether collectives are flat rings or hierarchical is not given either. A flat ring sends 15/16 of every array
through the hosts' adapters, a hierarchical collective the half that the other host lacks. The source shows
one reduce-scatter of a layer's 0.45 GB over 10 GbE: 258 ms. That is 7 Gbit/s if it was hierarchical, and 13
Gbit/s if it was a flat ring, which an adapter of 10 Gbit/s cannot do: the stated configuration is
hierarchical. The published seconds of a step are used for nothing but the errors.
"""

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

from jtrain.layout.layout import LayoutSpec, make_layout
from jtrain.layout.mesh import MeshSpec
from jtrain.layout.precision import PrecisionSpec
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW
from jtrain.plan.estimate.machine import make_machine
from jtrain.plan.estimate.memory import memory
from jtrain.plan.estimate.step_time import step_time
from jtrain.plan.job import Job
from jtrain.report.number_formats import gib
from jtrain.report.table import Table, numbers, words

PUBLISHED_S = {"10 GbE": 39.8, "400G InfiniBand": 4.45}
"""Seconds of a step, by network."""

HOST_GBIT_PER_S = {"10 GbE": 10.0, "400G InfiniBand": 8 * 400.0}
"""Gbit/s of all adapters of one host."""

DEVICE, HOSTS, PER_HOST = "h100", 2, 8
SEQUENCES, SEQ_LEN = 4, 6144
"""Sequences per GPU and step, and tokens of each."""

OTHER_LENGTHS = (1024, 4096, 8192)

_GPUS = HOSTS * PER_HOST
_CROSSES = {"flat": (_GPUS - 1) / _GPUS, "hierarchical": (HOSTS - 1) / HOSTS}
"""Share of an array that a collective sends through a host's adapters, each way."""

type ReduceDtype = Literal["bfloat16", "float32"]
"""Number format in which gradients are summed."""

type Crossing = Literal["flat", "hierarchical"]
"""One collective over all devices, or one in each host and then one between hosts."""


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One way to run the fine-tune; the default is the stated one."""

    zero_stage: Literal[1, 2, 3] = 3
    reductions: ReduceDtype = "bfloat16"
    collectives: Crossing = "hierarchical"
    seq_len: int = SEQ_LEN


STATED = Configuration()


def configurations() -> list[Configuration]:
    """The stated configuration first, then the other strategies, then other lengths."""
    dtypes: tuple[ReduceDtype, ...] = ("bfloat16", "float32")
    shapes: tuple[Crossing, ...] = ("hierarchical", "flat")
    stages: tuple[Literal[1, 2, 3], ...] = (3, 2, 1)
    strategies = [
        Configuration(stage, dtype, shape) for stage in stages for dtype in dtypes for shape in shapes
    ]
    # The stated configuration stands first in the table.
    assert strategies[0] == STATED
    return strategies + [dataclasses.replace(STATED, seq_len=length) for length in OTHER_LENGTHS]


@cache
def model() -> Transformer:
    """Gemma 3 12B without its vision encoder; all layers attend to the whole sequence."""
    return Transformer(
        num_layers=48, d_model=3840, num_heads=16, num_kv_heads=8, head_dim=256, d_ff=15360, vocab_size=262_208,
        tie_embeddings=True,
    )  # fmt: skip


def job_of(configuration: Configuration, host_gbit_per_s: float) -> Job:
    """The job of a configuration over a network.

    A collective that sends a smaller share through the adapters than a flat ring is planned as a flat ring
    over a network that is faster by as much.

    Args:
      host_gbit_per_s: of all adapters of one host.
    """
    # Above 1 for hierarchical collectives: 15/16 by 1/2.
    faster = _CROSSES["flat"] / _CROSSES[configuration.collectives]
    # Gbit/s of a host become bytes/s of one device.
    machine = make_machine(DEVICE, _GPUS, network_bytes_per_s=host_gbit_per_s * 1e9 / 8 / PER_HOST * faster)
    layout = make_layout(
        LayoutSpec(zero_stage=configuration.zero_stage, remat="full"),
        MeshSpec(data=_GPUS),
        model().param_infos(),
        precision=PrecisionSpec(reduce_dtype=configuration.reductions),
    )
    return Job(model(), layout, AdamW(peak_lr=1e-4), SEQUENCES * _GPUS, configuration.seq_len, machine)


def row_of(configuration: Configuration) -> dict[str, Any]:
    """Bytes per device and predicted seconds of a configuration, with the errors against the source."""
    jobs = {name: job_of(configuration, speed) for name, speed in HOST_GBIT_PER_S.items()}
    plans = {name: memory(job) for name, job in jobs.items()}
    took = {name: step_time(job, plans[name]).step_s for name, job in jobs.items()}
    # The network changes no bytes, so both plans have the same.
    [device_bytes] = {plan.total_bytes for plan in plans.values()}
    return {
        **dataclasses.asdict(configuration),
        "stated": configuration == STATED,
        "device_bytes": device_bytes,
        "step_s": took,
        # Relative to the published step, positive where the prediction is slower.
        "error": {name: seconds / PUBLISHED_S[name] - 1 for name, seconds in took.items()},
    }


def table_3() -> list[dict[str, Any]]:
    """Rows of table III: the stated configuration first."""
    return [row_of(configuration) for configuration in configurations()]


def render_table_3(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows as a table."""
    published = ", ".join(f"{seconds:g} s" for seconds in PUBLISHED_S.values())
    by_network = [
        head for name, seconds in PUBLISHED_S.items() for head in (f"{name}, s", f"by {seconds:g} s")
    ]
    table = Table(
        f"III. A 12B fine-tune on {HOSTS} hosts of {PER_HOST} x {DEVICE}, predicted, over one adapter of 10 "
        f"Gbit/s a host and over eight of 400: published {published}. The first row is the configuration as "
        "the source gives it, with the length of its sequences assumed; the others say how far a step "
        "depends on it",
        words("strategy", "reductions", "collectives", "tokens") + numbers("GiB", *by_network),
    )
    # A row that does not fit is kept, and marked.
    hbm_bytes = make_machine(DEVICE, 1).hbm_bytes
    for row in rows:
        cells = [gib(row["device_bytes"]) + ("" if row["device_bytes"] <= hbm_bytes else " (over)")]
        for name in PUBLISHED_S:
            cells += [f"{row['step_s'][name]:.2f}", f"{row['error'][name]:+.0%}"]
        tokens = f"{SEQUENCES} x {row['seq_len']:,}"
        names = f"ZeRO-{row['zero_stage']}", row["reductions"], row["collectives"], tokens
        table.add(*names, *cells, bold=row["stated"])
    return table
