"""The survey's tables, by jtrain's closed forms: devices per model, savings per strategy, networks.

Table I compares the smallest number of devices that train a model with the survey's 40 bytes per parameter.
Table II compares strategies on eight devices: the memory that each saves and the time that it costs for the
same 7B model, and the largest model that it makes possible. Table III is in `interconnect_table.py`.
"""

import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import Any

from jtrain.layout.layout import LayoutSpec, OffloadSpec, make_layout
from jtrain.layout.mesh import MeshSpec
from jtrain.layout.precision import PrecisionSpec
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW
from jtrain.plan.estimate.machine import make_machine
from jtrain.plan.job import Job
from jtrain.plan.report.interconnect_table import render_table_3, table_3
from jtrain.plan.report.plan_sheet import survey_bytes
from jtrain.plan.search_task import Point, SearchTask, evaluate
from jtrain.report.number_formats import gib
from jtrain.report.table import Table, numbers, words
from jtrain.report.terminal import print_blocks

SEQ_LEN = 4096
"""Tokens of a sequence; each device computes one sequence at a time."""

CAPACITIES = {"80 GB": "h100", "141 GB": "h200"}
"""Memory of a device -> name of the device."""

DEVICES = 8

HOST_BYTES = 2 * 10**12
"""Memory of a host of eight GPUs: a DGX H100's 2 TB."""

ADAM = AdamW(peak_lr=1e-4)
PLAIN = LayoutSpec(zero_stage=0)
DATA = MeshSpec(data=DEVICES)
ALL_STAGES = LayoutSpec(zero_stage=3, remat="full")
PARAMS_BF16 = PrecisionSpec(param_dtype="bfloat16")


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One way to save memory, on eight devices."""

    name: str
    spec: LayoutSpec
    optimizer: AdamW = ADAM
    mesh: MeshSpec = DATA
    precision: PrecisionSpec = PrecisionSpec()  # noqa: RUF009, frozen


STRATEGIES = (
    Strategy("data parallel", PLAIN),
    Strategy("ZeRO-1", LayoutSpec(zero_stage=1)),
    Strategy("ZeRO-2", LayoutSpec(zero_stage=2)),
    Strategy("ZeRO-3", LayoutSpec(zero_stage=3)),
    Strategy("tensor parallel", PLAIN, mesh=MeshSpec(tensor=DEVICES)),
    Strategy("remat: attention kept", LayoutSpec(remat="named", remat_save=("attention",))),
    Strategy("remat: full", LayoutSpec(remat="full")),
    Strategy("offload: optimizer", LayoutSpec(offload=OffloadSpec(optimizer=1.0))),
    Strategy("offload: params", LayoutSpec(offload=OffloadSpec(params=1.0))),
    Strategy("offload: activations", LayoutSpec(offload=OffloadSpec(activations=1.0))),
    Strategy("bf16 moments", PLAIN, dataclasses.replace(ADAM, moment_dtype="bfloat16_sr")),
    Strategy("8-bit moments", PLAIN, dataclasses.replace(ADAM, moment_dtype="int8")),
    Strategy(
        "bf16 params, 8-bit moments",
        PLAIN,
        dataclasses.replace(ADAM, moment_dtype="int8", param_rounding="stochastic"),
        precision=PARAMS_BF16,
    ),
    Strategy("ZeRO-3, full remat", ALL_STAGES),
    Strategy(
        "ZeRO-3, full remat, offload: optimizer",
        dataclasses.replace(ALL_STAGES, offload=OffloadSpec(optimizer=1.0)),
    ),
    Strategy(
        "the same, all three, bf16, 8 bits",
        dataclasses.replace(ALL_STAGES, offload=OffloadSpec(optimizer=1.0, params=1.0, activations=1.0)),
        dataclasses.replace(ADAM, moment_dtype="int8", param_rounding="stochastic"),
        precision=PARAMS_BF16,
    ),
)

_SHAPES: dict[str, dict[str, Any]] = {
    "1B": dict(
        num_layers=16, d_model=2048, num_heads=32, num_kv_heads=8, head_dim=64, d_ff=8192, vocab_size=32000
    ),
    "7B": dict(
        num_layers=32, d_model=4096, num_heads=32, num_kv_heads=32, head_dim=128, d_ff=11008, vocab_size=32000
    ),
    "13B": dict(
        num_layers=40, d_model=5120, num_heads=40, num_kv_heads=40, head_dim=128, d_ff=13824, vocab_size=32000
    ),
    "70B": dict(
        num_layers=80, d_model=8192, num_heads=64, num_kv_heads=8, head_dim=128, d_ff=28672, vocab_size=32000
    ),
    "175B": dict(
        num_layers=96,
        d_model=12288,
        num_heads=96,
        num_kv_heads=96,
        head_dim=128,
        d_ff=32768,
        vocab_size=50304,
    ),
}
"""The survey's models: Llama 3.2 1B, Llama 2 7B, 13B and 70B, and GPT-3 with a SwiGLU of as many
parameters."""


@cache
def model_of(name: str) -> Transformer:
    """The model of one of the survey's sizes."""
    return Transformer(**_SHAPES[name])


def size_of(model: Transformer) -> int:
    """Number of parameters."""
    return sum(info.size for info in model.param_infos())


def point_of(
    model: Transformer, strategy: Strategy, device: str, *, count: int = DEVICES, timed: bool = False
) -> Point:
    """Estimates one step of one sequence per device under a strategy."""
    machine = make_machine(device, count, host_memory_bytes=HOST_BYTES)
    # One sequence per data-parallel device; tensor parallelism has one for all.
    rows = strategy.mesh.batch_shards
    layout = make_layout(strategy.spec, strategy.mesh, model.param_infos(), precision=strategy.precision)
    job = Job(model, layout, strategy.optimizer, rows, SEQ_LEN, machine)
    return evaluate(SearchTask(job, strategy.spec), strategy.spec, strategy.mesh, timed=timed)


def fewest_devices(model: Transformer, device: str) -> int:
    """The smallest power of two of devices that train a model with ZeRO-3 and full remat."""
    hbm_bytes = make_machine(device, 1).hbm_bytes
    # Up to 8,192 devices.
    for k in range(14):
        # ZeRO-3 splits the model's dimension evenly, so larger powers fail too.
        if model.d_model % 2**k:
            break
        # One device has nothing to shard with.
        stage = 3 if k else 0
        strategy = Strategy("", dataclasses.replace(ALL_STAGES, zero_stage=stage), mesh=MeshSpec(data=2**k))
        if point_of(model, strategy, device, count=2**k).plan.total_bytes <= hbm_bytes:
            return 2**k
    raise AssertionError(f"{model.d_model} fits no number of devices")


@cache
def family() -> tuple[dict[str, Any], ...]:
    """Llama shapes of 10 million to 3 trillion parameters, a few percent apart; width <= 128 x layers."""
    return tuple(_shapes())


def _shapes() -> Iterator[dict[str, Any]]:
    # Multiples of 512 split over eight devices and into heads of 64.
    for width in range(512, 30_720, 512):
        next_width = width + 512
        # As deep as the next width's shallowest model is large, so that sizes leave no gap.
        # Size goes with layers * width^2, so the next width's shallowest model has next_width^3 / 128.
        first, last = width // 128, max(width // 128, next_width**3 // width**2 // 128)
        for layers in range(first, last + 1):
            yield dict(
                num_layers=layers,
                d_model=width,
                num_heads=width // 64,
                num_kv_heads=width // 64,
                head_dim=64,
                # SwiGLU's usual 8/3 of the width, in multiples of 128.
                d_ff=width * 8 // 3 // 128 * 128,
                vocab_size=32000,
            )


def largest_model(strategy: Strategy, device: str) -> int:
    """Parameters of the family's largest model that fits eight devices and a host of 2 TB; 0 if none."""
    machine = make_machine(device, DEVICES, host_memory_bytes=HOST_BYTES)
    host_capacity = machine.host_bytes_per_device
    assert host_capacity is not None

    def fit(index: int) -> bool:
        plan = point_of(Transformer(**family()[index]), strategy, device).plan
        return plan.total_bytes <= machine.hbm_bytes and plan.host_bytes <= host_capacity

    # Bisection below needs a model that fits.
    if not fit(0):
        return 0
    # The family is sorted by size, up to a few percent.
    low, high = 0, len(family())
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit(middle) else (low, middle)
    return size_of(Transformer(**family()[low]))


def table_1() -> list[dict[str, Any]]:
    """Rows of table I, per model: bytes by the survey's rule, fewest devices by the closed forms."""
    rows: list[dict[str, Any]] = []
    for name in _SHAPES:
        model = model_of(name)
        params = size_of(model)
        row: dict[str, Any] = {
            "model": name,
            "parameters": params,
            "survey_bytes": survey_bytes(params),
            # Rounded up.
            "survey_devices_of_80_gb": -(-survey_bytes(params) // (80 * 10**9)),
        }
        for memory_, device in CAPACITIES.items():
            row[f"devices_of_{memory_.replace(' ', '_').lower()}"] = fewest_devices(model, device)
        rows.append(row)
    return rows


def table_2(device: str = "h100") -> list[dict[str, Any]]:
    """Rows of table II, per strategy: memory saved, time and largest model, for the 7B on eight devices."""
    rows: list[dict[str, Any]] = []
    base: Point | None = None
    for strategy in STRATEGIES:
        point = point_of(model_of("7B"), strategy, device, timed=True)
        # The first strategy, data parallelism, is what the others are compared with.
        base = base or point
        rows.append(
            {
                "strategy": strategy.name,
                "device_bytes": point.plan.total_bytes,
                "host_bytes": point.plan.host_bytes,
                "saved": 1 - point.plan.total_bytes / base.plan.total_bytes,
                # Seconds per token, because tensor parallelism computes one sequence with all devices.
                "time": _tokens_per_s(base) / _tokens_per_s(point),
                "largest": {name: largest_model(strategy, kind) for name, kind in CAPACITIES.items()},
            }
        )
    return rows


def _tokens_per_s(point: Point) -> float:
    assert point.timed is not None
    return point.timed.tokens_per_s


def print_tables() -> dict[str, Any]:
    """Prints the tables; returns them as JSON has them."""
    first, second, third = table_1(), table_2(), table_3()
    print_blocks([_devices_table(first), _strategies_table(second), render_table_3(third)])
    return {"table_1": first, "table_2": second, "table_3": third}


def _devices_table(rows: list[dict[str, Any]]) -> Table:
    names = ("parameters", "survey: 40 B each, GB", "devices of 80 GB", "jtrain: of 80 GB", "of 141 GB")
    table = Table(
        "I. Devices that train a model: by the survey's rule; by jtrain's closed forms (float32 Adam, "
        f"ZeRO-3, full remat, a sequence of {SEQ_LEN} tokens per device, powers of two)",
        words("model") + numbers(*names),
    )
    for row in rows:
        table.add(
            row["model"],
            f"{row['parameters'] / 1e9:,.2f}B",
            f"{row['survey_bytes'] / 1e9:,.0f}",
            # By the survey's rule, then by ours.
            *(str(row[f"{rule}devices_of_80_gb"]) for rule in ("survey_", "")),
            str(row["devices_of_141_gb"]),
        )
    return table


def _strategies_table(rows: list[dict[str, Any]]) -> Table:
    names = ("GiB", "host GiB", "saved", "time", *(f"largest: {name}" for name in CAPACITIES))
    table = Table(
        f"II. What a strategy saves and costs of the 7B on {DEVICES} x h100, a sequence of {SEQ_LEN} tokens "
        f"each; the largest model on {DEVICES} devices of a host with 2 TB. Times are predicted, per token",
        words("strategy") + numbers(*names),
    )
    for row in rows:
        table.add(
            row["strategy"],
            gib(row["device_bytes"]),
            gib(row["host_bytes"]),
            f"{row['saved']:.0%}",
            f"{row['time']:.2f}x",
            *(f"{row['largest'][name] / 1e9:,.1f}B" for name in CAPACITIES),
        )
    return table
