"""The plan's seconds per step against thirteen steps that others have published.

Nothing runs. Every row is planned in one setting, which is not always that of the source: ZeRO-3 over all
devices unless axes are given, one microbatch unless given, and layers that keep queries, keys, values and
attention's output. The constants of `jtrain.plan.estimate.matmul_time` and `jtrain.plan.estimate.step_time`
were fitted to these rows.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jtrain.bench import Options, Row, row
from jtrain.layout.layout import LayoutSpec, OffloadSpec, make_layout
from jtrain.layout.mesh import MeshSpec
from jtrain.layout.precision import PrecisionSpec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW
from jtrain.plan.estimate.machine import make_machine
from jtrain.plan.estimate.memory import memory
from jtrain.plan.estimate.step_time import step_time
from jtrain.plan.job import Job

type ModelFields = Mapping[str, Any]


def _llama(layers: int, d_model: int, heads: int, d_ff: int) -> ModelFields:
    shape = dict(num_layers=layers, d_model=d_model, num_heads=heads, num_kv_heads=8, head_dim=128, d_ff=d_ff)
    return shape | dict(vocab_size=128_256)


LLAMA_8B, LLAMA_70B = _llama(32, 4096, 32, 14_336), _llama(80, 8192, 64, 28_672)
LLAMA_405B = _llama(126, 16_384, 128, 53_248)
MIXTRAL_8X7B: ModelFields = {**LLAMA_8B, "vocab_size": 32_000, "moe": dict(num_experts=8, top_k=2)}
QWEN3_235B: ModelFields = {
    **_llama(94, 4096, 64, 1536), "num_kv_heads": 4, "vocab_size": 151_936, "qk_norm": True,
    "moe": dict(num_experts=128, top_k=8),
}  # fmt: skip
QWEN_1_5B: ModelFields = {
    **_llama(28, 1536, 12, 8960), "num_kv_heads": 2, "vocab_size": 151_936, "tie_embeddings": True,
}  # fmt: skip
QWEN_14B: ModelFields = {**_llama(48, 5120, 40, 13_824), "vocab_size": 152_064}

FP8: ModelFields = dict(matmul_dtype="fp8_delayed")
BF16_STATE: ModelFields = dict(param_dtype="bfloat16")


@dataclasses.dataclass(frozen=True)
class Published:
    """One published step.

    batch: sequences per step, and tokens of each. axes: of the mesh. published_s: seconds of a step.
    """

    title: str
    model: ModelFields
    device: str
    axes: ModelFields
    batch: tuple[int, int]
    published_s: float
    source: str
    precision: ModelFields = dataclasses.field(default_factory=dict)
    microbatches: int = 1
    offloads: bool = False


PUBLISHED = (
    Published(
        # A chip of tpu7x is two devices.
        "1: Llama 3.1 70B, 64 chips", LLAMA_70B, "tpu7x", dict(data=128), (256, 8192), 12.20, "tpu-recipes, Ironwood"
    ),
    Published(
        "2: the same in fp8", LLAMA_70B, "tpu7x", dict(data=128), (256, 8192), 7.93, "tpu-recipes, Ironwood", FP8
    ),
    Published(
        "3: the same, 256 chips, 131,072 tokens", LLAMA_70B, "tpu7x", dict(data=64, context=8), (64, 131_072), 34.02,
        "tpu-recipes, Ironwood",
    ),
    Published(
        "4: Qwen3 235B-A22B, 256 chips", QWEN3_235B, "tpu7x", dict(data=64, expert=8), (8192, 4096), 30.87,
        "tpu-recipes, Ironwood",
    ),
    Published("5: Llama 3.1 8B", LLAMA_8B, "v6e", dict(data=8), (24, 8192), 3.443, "tpu-recipes, log"),
    Published("6: Llama 3.1 405B", LLAMA_405B, "v5p", dict(data=512), (1024, 8192), 131.47, "tpu-recipes, log"),
    Published(
        "7: Mixtral 8x7B, 4 sequences a device assumed", MIXTRAL_8X7B, "v5p", dict(data=256), (1024, 4096), 5.63,
        "MaxText, performance tiers",
    ),
    Published("8: Llama 3.1 70B", LLAMA_70B, "h200", dict(data=256), (512, 8192), 15.516, "gpu-recipes, log, MaxText"),
    Published("9: Llama 3.1 8B, 500 W", LLAMA_8B, "h100", dict(data=8), (16, 8192), 2.457, "torchtitan, compiled"),
    Published("10: the same in fp8", LLAMA_8B, "h100", dict(data=8), (16, 8192), 1.920, "torchtitan, compiled", FP8),
    Published("11: Llama 3.1 8B", LLAMA_8B, "b200", dict(data=4), (128, 2048), 2.990, "torchtitan"),
    Published(
        "12: Qwen2.5 1.5B, bf16 state", QWEN_1_5B, "h100", dict(data=1), (512, 1024), 8.901, "llmq", BF16_STATE, 32
    ),
    Published(
        "13: Qwen2.5 14B, bf16 state, optimizer on the host", QWEN_14B, "h100", dict(data=1), (512, 1024), 82.83,
        "llmq", BF16_STATE, 32, True,
    ),
)  # fmt: skip
"""Published steps, in the order of the list that they were taken from."""

SAVED_ACTIVATIONS = ("attention_q", "attention_k", "attention_v", "attention")


def planned_job(step: Published) -> Job:
    """The job of a published step in the one setting."""
    fields: dict[str, Any] = dict(step.model)
    if "moe" in fields:
        fields["moe"] = MoESpec(**fields["moe"])
    model = Transformer(**fields)
    mesh = MeshSpec(**step.axes)
    spec = LayoutSpec(
        # A single device has nothing to shard.
        zero_stage=3 if mesh.shape["data"] > 1 else 0,
        microbatches=step.microbatches,
        remat="named",
        remat_save=SAVED_ACTIVATIONS,
        offload=OffloadSpec(optimizer=1.0) if step.offloads else OffloadSpec(),
    )
    rounding: Any = {}
    if step.precision.get("param_dtype") == "bfloat16":
        # Parameters in bfloat16 need stochastic rounding, and the source stores its moments in 16 bits too.
        rounding = dict(moment_dtype="bfloat16_sr", param_rounding="stochastic")
    layout = make_layout(spec, mesh, model.param_infos(), precision=PrecisionSpec(**step.precision))
    # Host memory is not what limits these steps: 2 TB hold any offloaded state.
    machine = make_machine(step.device, mesh.size, host_memory_bytes=2 * 10**12)
    # The learning rate changes no seconds.
    return Job(model, layout, AdamW(peak_lr=1e-4, **rounding), *step.batch, machine)


def predicted_s(step: Published) -> float:
    """Seconds of a published step by the plan."""
    job = planned_job(step)
    return step_time(job, memory(job)).step_s


def run(args: Options) -> list[Row]:
    """A row per published step, then the mean and the largest error."""
    del args
    rows: list[Row] = []
    errors: list[float] = []
    for step in PUBLISHED:
        step_row = row(
            f"{step.title}, {step.device}, {step.source}: planned",
            predicted_s(step),
            "s",
            baseline=step.published_s,
        )
        assert step_row["ratio"] is not None
        errors.append(100 * abs(step_row["ratio"] - 1))
        rows.append(step_row)
    rows.append(row("mean error", sum(errors) / len(errors), "%", bar="<= 10"))
    rows.append(row("largest error", max(errors), "%", bar="<= 25"))
    return rows
