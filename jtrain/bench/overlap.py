"""llama8b over tensor=8, compiled for 8 chips that are not here: how many bytes of collectives are beside a matmul.

    python -m jtrain.bench overlap [--device v5p]

Plain, what travels over `tensor` is all-gathers and reduce-scatters before and after a layer's matmuls; overlapped
(`layout.tensor_overlap`), permutes between their pieces; and those again with matmuls in 8 bits, where the chip has
them. A byte is hidden if it is in a pair of start and done with a
matmul in between, in the program as the chip's own compiler scheduled it; loops are counted. Nothing runs, so this says
nothing of speed: a permute may still be longer than what it is beside.
"""

import argparse
import dataclasses
import os

from jtrain.bench import Row, row
from jtrain.plan import AOT_ENVIRONMENT

TOPOLOGIES = {"v5p": "v5p:2x2x2", "h200": "h200:8"}
SETTINGS = (
    "mesh.data=1",
    "mesh.tensor=8",
    "layout.zero_stage=0",
    "layout.remat=named",
    "layout.remat_save=('attention_q','attention_k','attention_v','attention','attention_out','mlp_gate','mlp_up')",
    "layout.microbatches=1",
    "data.global_batch=4",
    "data.seq_len=8192",
)
"""One sequence at a time would leave the unembedding's all-gather a tenth of all bytes; four leave it a thirtieth."""

FORMS = (
    ("plain", ("layout.tensor_overlap=False",), None),
    ("overlapped", ("layout.tensor_overlap=True",), ">= 0.9"),
    ("in 8 bits", ("layout.tensor_overlap=True", "layout.matmul_dtype=fp8_delayed"), ">= 0.9"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--device", action="append", choices=tuple(TOPOLOGIES), help="only of this device")
    os.environ.update(AOT_ENVIRONMENT)  # jax reads it when it is imported, which no import above does


def run(args: argparse.Namespace) -> list[Row]:
    """Rows of each device: plain, overlapped, and overlapped in 8 bits.

    Raises:
      ValueError: a compiler is not installed.
    """
    from jtrain_kernels.device import from_name

    rows: list[Row] = []
    for device in args.device or TOPOLOGIES:
        what = f"llama8b, tensor=8, 4 x 8192 tokens, 8 x {device}"
        for name, layout, bar in FORMS:
            if name == "in 8 bits" and from_name(device).peak_fp8_flops is None:
                continue
            sent = compiled(device, (*SETTINGS, *layout))
            rows += [
                row(f"{what}, {name}: sent per device and step", sent.wire_bytes / 1e9, "GB"),
                row(f"{device}, {name}: share of it asynchronous", sent.async_bytes / sent.wire_bytes, ""),
                row(f"{device}, {name}: share of it beside a matmul", sent.hidden_bytes / sent.wire_bytes, "", bar=bar),
                row(f"{device}, {name}: temporaries", sent.temp_bytes / 1e9, "GB"),
            ]
    return rows


@dataclasses.dataclass(frozen=True)
class Sent:
    """What one device sends in a step: bytes on the wire, those in pairs of start and done, those beside a matmul."""

    wire_bytes: int
    async_bytes: int
    hidden_bytes: int
    temp_bytes: int


def compiled(device: str, sets: tuple[str, ...]) -> Sent:
    """The step of llama8b as the device's compiler scheduled it.

    Raises:
      ValueError: the compiler is not installed.
    """
    from jtrain import config, loop
    from jtrain.layout import make_layout
    from jtrain.plan import hlo
    from jtrain.plan.aot import compile_step, topology_devices

    built = config.build(config.load("llama8b", sets=sets))
    program = compile_step(
        built.model,
        make_layout(built.layout, built.mesh, built.model.param_infos()),
        loop.make_optimizer(built),
        global_batch=built.data.global_batch,
        seq_len=built.data.seq_len,
        devices=topology_devices(TOPOLOGIES[device]),
    )
    sent = hlo.overlap(program.traffic)
    return Sent(sent.wire_bytes, sent.async_bytes, sent.hidden_bytes, program.temp_bytes)
