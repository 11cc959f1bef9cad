"""llama8b over tensor=8 and a mixture over expert=4, compiled for 8 absent chips: bytes sent beside a matmul.

    python -m jtrain.bench overlap [--device v5p]

The plain program sends all-gathers and reduce-scatters over `tensor` before and after a layer's matmuls. The overlapped
one (`layout.tensor_overlap`) sends permutes between pieces of the matmuls, also with FP8 matmuls if the chip has them.
A byte is hidden if it belongs to a pair of start and done with a matmul in between, in the program as the chip's own
compiler scheduled it; loops are counted. Nothing runs, so this does not measure speed: a permute may still take longer
than the matmul beside it.

The last rows of H200 are those of a mixture of experts, qwen3_30b_a3b as it ships: rows of tokens sent to their experts
and back, forward and backward.
"""

import argparse
import dataclasses
import os
from typing import TYPE_CHECKING

from jtrain.bench import Row, row
from jtrain.plan import AOT_ENVIRONMENT

if TYPE_CHECKING:
    from jtrain.plan.compile.compiled_step import CompiledStep

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
"""Settings. With one sequence the unembedding's all-gather would be a tenth of all bytes, with four a 30th."""

FORMS = (
    ("plain", ("layout.tensor_overlap=False",), None),
    ("overlapped", ("layout.tensor_overlap=True",), ">= 0.9"),
    ("in 8 bits", ("layout.tensor_overlap=True", "precision.matmul_dtype=fp8_delayed"), ">= 0.9"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--device", action="append", choices=tuple(TOPOLOGIES), help="only of this device")
    os.environ.update(AOT_ENVIRONMENT)  # jax reads it when it is imported, which no import above does


def run(args: argparse.Namespace) -> list[Row]:
    """Rows of each device: plain, overlapped, and overlapped in 8 bits.

    Raises:
      UserError: a compiler is not installed.
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
        if device == "h200":  # the mixture as it ships needs more memory than a v5p has
            rows += exchange_rows(device)
    return rows


def exchange_rows(device: str) -> list[Row]:
    """Rows of the expert exchange of qwen3_30b_a3b, all ragged all-to-alls of a step."""
    program = compiled_step(device, "qwen3_30b_a3b", ())
    (sent,) = (t for t in program.traffic if t.kind == "ragged-all-to-all")
    what = f"{device}, expert exchange"
    return [
        row(f"qwen3_30b_a3b, 8 x {device}, expert exchange: sent per device and step", sent.wire_bytes / 1e9, "GB"),
        row(f"{what}: share of it asynchronous", sent.async_bytes / sent.array_bytes, ""),
        row(f"{what}: share of it beside a matmul", sent.hidden_bytes / sent.array_bytes, "", bar=">= 0.6"),
        row(f"{what}: temporaries", program.temp_bytes / 1e9, "GB"),
    ]


@dataclasses.dataclass(frozen=True)
class Sent:
    """Bytes that one device sends in a step: all, those in pairs of start and done, and those beside a matmul."""

    wire_bytes: int
    async_bytes: int
    hidden_bytes: int
    temp_bytes: int


def compiled(device: str, sets: tuple[str, ...]) -> Sent:
    """Bytes of the step of llama8b as the device's compiler scheduled it.

    Raises:
      UserError: the compiler is not installed.
    """
    from jtrain.hlo import traffic

    program = compiled_step(device, "llama8b", sets)
    sent = traffic.overlap(program.traffic)
    return Sent(sent.wire_bytes, sent.async_bytes, sent.hidden_bytes, program.temp_bytes)


def compiled_step(device: str, config: str, sets: tuple[str, ...]) -> "CompiledStep":
    """The step of a config, compiled for eight of the device.

    Raises:
      UserError: the compiler is not installed.
    """
    from jtrain.config.load import load_config
    from jtrain.config.run import build_run
    from jtrain.plan.compile.compiled_step import compile_step, topology_devices
    from jtrain.plan.from_run import make_optimizer, plan_job

    built = build_run(load_config(config, sets=sets))
    return compile_step(plan_job(built), make_optimizer(built), devices=topology_devices(TOPOLOGIES[device]))
