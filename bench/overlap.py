"""llama8b over tensor=8 and a mixture over expert=4, compiled for 8 absent chips: hidden network time.

    python -m jtrain.bench overlap [--device v5p]

The plain program sends all-gathers and reduce-scatters over `tensor` before and after a layer's matmuls. In
pieces (`layout.tensor_overlap`) permutes run between pieces of the matmuls, also with FP8 matmuls if the chip
has them. In groups (`layout.sequence_groups`, for GPUs) a group of sequences is on the wire while another is
computed.

Two figures describe the same program, as the chip's own compiler scheduled it, with loops counted. A byte is
beside a matmul if a matmul is between its start and its done; a transfer may still take longer than that
matmul. A second is hidden if the compute stream of `jtrain.plan.compile.two_streams` does not wait in it: a
model of the compiled program. Nothing runs, so nothing is measured. `seconds of a step` is that model's too.

The last rows of H200 are those of a mixture of experts, qwen3_30b_a3b as it ships: rows of tokens sent to
their experts and back, forward and backward.
"""

import collections
from collections.abc import Iterator

from jtrain.bench import Options, Row, option, row
from jtrain.config.load import for_devices, load_config
from jtrain.config.run import Run, build_run, build_run_optimizer
from jtrain.hlo import traffic
from jtrain.hlo.scopes import scope_mark
from jtrain.plan.compile.compiled_step import CompiledStep, compile_step, topology_devices
from jtrain.plan.compile.two_streams import rates_of, two_streams
from jtrain.plan.from_run import plan_job
from jtrain_kernels.cost import ATTENTION, BACKWARD_FLOPS
from jtrain_kernels.device import from_name

TOPOLOGIES = {"v5p": "v5p:2x2x2", "h200": "h200:8"}
DEVICES, SEQUENCES, SEQ_LEN = 8, 4, 8192
SETTINGS = (
    "mesh.data=1",
    f"mesh.tensor={DEVICES}",
    "layout.zero_stage=0",
    "layout.remat=named",
    "layout.remat_save=('attention_q','attention_k','attention_v','attention','attention_out','mlp_gate','mlp_up')",
    "layout.microbatches=1",
    f"data.global_batch={SEQUENCES}",
    f"data.seq_len={SEQ_LEN}",
)
"""Settings. The unembedding's all-gather is a 30th of all bytes with four sequences, a tenth with one."""

IN_PIECES, IN_GROUPS = "layout.tensor_overlap=True", f"layout.sequence_groups={SEQUENCES}"
IN_8_BITS = (IN_PIECES, "precision.matmul_dtype=fp8_delayed")
FORMS: dict[str, dict[str, tuple[str, ...]]] = {
    "v5p": {"plain": (), "in pieces": (IN_PIECES,)},
    "h200": {
        "plain": (),
        "in pieces": (IN_PIECES,),
        "in pieces, 8 bits": IN_8_BITS,
        "in groups": (IN_GROUPS,),
    },
}
"""Device -> form -> its settings."""

IN_CUBLAS = {"xla_gpu_enable_triton_gemm": False}
"""Compiler options of the form in 8 bits. XLA:GPU chooses between Triton and cuBLAS on the device; for an
absent one it takes Triton, whose matmuls would be in bfloat16."""

SECONDS_BAR = {("h200", "in groups"): ">= 0.85"}
KERNEL = {"gpu": "tokamax", "tpu": "splash"}
"""Platform -> attention kernel in the compiled step, whose FLOPs its program does not state."""


OPTIONS = (option("--device", action="append", choices=tuple(TOPOLOGIES), help="only of this device"),)
ABSENT_CHIPS = True


def run(args: Options) -> Iterator[Row]:
    """Rows of each device and form as they are compiled.

    Raises:
      UserError: a compiler is not installed.
    """
    for device in args.device or TOPOLOGIES:
        for form, sets in FORMS[device].items():
            yield from compiled_rows(device, form, sets)
        if device == "h200":  # the mixture as it ships needs more memory than a v5p has
            yield from exchange_rows(device)


def mixture_run() -> Run:
    """qwen3_30b_a3b as it ships, over eight devices: data=2, expert=4, 32 microbatches."""
    config = load_config("qwen3_30b_a3b")
    # The config leaves to a start what depends on the number of devices.
    for_devices(config, DEVICES)
    return build_run(config)


def mixture_step(device: str) -> CompiledStep:
    """The step of `mixture_run`, compiled for eight of the device.

    Raises:
      UserError: the compiler is not installed.
    """
    built = mixture_run()
    return compile_step(
        plan_job(built), build_run_optimizer(built), devices=topology_devices(TOPOLOGIES[device])
    )


def exchange_rows(device: str) -> Iterator[Row]:
    """Rows of the mixture's expert exchange, all ragged all-to-alls of a step."""
    program = mixture_step(device)
    # Exactly one entry: none or several would mean another program.
    (exchange,) = (t for t in program.traffic if t.kind == "ragged-all-to-all")
    label = f"{device}, expert exchange"
    yield row(
        f"qwen3_30b_a3b, 8 x {device}, expert exchange: sent per device and step",
        exchange.wire_bytes / 1e9,
        "GB",
    )
    yield row(f"{label}: share of it asynchronous", exchange.async_bytes / exchange.array_bytes, "")
    yield row(
        f"{label}: share of it beside a matmul",
        exchange.hidden_bytes / exchange.array_bytes,
        "",
        bar=">= 0.6",
    )
    yield row(f"{label}: temporaries", program.temp_bytes / 1e9, "GB")


def compiled_rows(device: str, form: str, sets: tuple[str, ...]) -> Iterator[Row]:
    """Rows of the step of llama8b as the device's compiler scheduled it.

    Raises:
      UserError: the compiler is not installed.
    """
    built = build_run(load_config("llama8b", sets=(*SETTINGS, *sets)))
    job = plan_job(built)
    options = IN_CUBLAS if sets == IN_8_BITS else {}
    devices = topology_devices(TOPOLOGIES[device])
    program = compile_step(job, build_run_optimizer(built), devices=devices, compiler_options=options)
    network_traffic = traffic.overlap(program.traffic)
    # The rates of the plan: nothing is measured.
    rates = rates_of(from_name(device), DEVICES)
    timeline = two_streams(program.hlo, job.layout.mesh.shape, rates, attention_s(device))
    name = f"{device}, {form}"
    byte_share = network_traffic.hidden_bytes / network_traffic.wire_bytes
    bar = None if form == "plain" else ">= 0.9"
    yield row(f"llama8b, 8 x {name}: sent per device and step", network_traffic.wire_bytes / 1e9, "GB")
    yield row(
        f"{name}: share of its bytes asynchronous",
        network_traffic.async_bytes / network_traffic.wire_bytes,
        "",
    )
    yield row(
        f"{name}: share of its bytes beside a matmul",
        byte_share,
        "",
        bar=bar if form != "in groups" else None,
    )
    yield row(
        f"{name}: share of its seconds hidden", timeline.hidden_share, "", bar=SECONDS_BAR.get((device, form))
    )
    yield row(f"{name}: seconds on the wire", 1e3 * timeline.wire_s, "ms")
    yield row(f"{name}: seconds of computation", 1e3 * timeline.compute_s, "ms")
    yield row(f"{name}: seconds of a step", 1e3 * (timeline.compute_s + timeline.waiting_s), "ms")
    yield row(f"{name}: temporaries", program.temp_bytes / 1e9, "GB")
    seconds: collections.defaultdict[str, float] = collections.defaultdict(float)
    hidden: collections.defaultdict[str, float] = collections.defaultdict(float)
    # By phase and layer, to show where the rest is not hidden.
    for hop in timeline.hops:
        # The scope of an instruction names the layer whose transfer it is.
        phase, layer = scope_mark(hop.scope)
        kind = f"{phase} of {layer}" if layer.startswith("layers/") else "embedding, loss and the rest"
        seconds[kind] += hop.seconds
        hidden[kind] += hop.hidden_s
    for kind in sorted(seconds):
        yield row(
            f"{name}, {kind}: share of {1e3 * seconds[kind]:.1f} ms hidden", hidden[kind] / seconds[kind], ""
        )


def attention_s(device: str) -> dict[tuple[str, str], float]:
    """Seconds of a step's attention kernels in each phase, as the kernels' cost model has them.

    Args:
      device: name in `TOPOLOGIES`.
    """
    spec, model = from_name(device), build_run(load_config("llama8b", sets=SETTINGS)).model
    peak = spec.peak_bf16_flops
    assert peak is not None, "both devices have one"
    # Shares of the peak that the kernel reaches in either pass.
    forward, backward = ATTENTION[KERNEL[spec.platform]][model.head_dim]
    # 4: two matmuls of 2 FLOPs per multiply-add; half of the scores are masked.
    flops = model.num_layers * 4 * SEQUENCES * model.num_heads / DEVICES * SEQ_LEN**2 / 2 * model.head_dim
    return {
        ("forward", "layers/attention"): flops / (peak * forward),
        ("backward", "layers/attention"): BACKWARD_FLOPS * flops / (peak * backward),
    }
