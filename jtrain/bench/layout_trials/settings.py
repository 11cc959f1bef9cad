"""The space of settings: every option that is a layout or a precision, and the parts of a step."""

import dataclasses
import functools
import math
from typing import Any

from jtrain.bench.layout_trials import descriptions
from jtrain.bench.layout_trials.adversarial_batch import COLUMNS, ROWS
from jtrain.bench.layout_trials.descriptions import Description
from jtrain.bench.layout_trials.float64 import Descent
from jtrain.bench.layout_trials.float64_model import Model
from jtrain.bench.layout_trials.one_device_layers import on_one_device
from jtrain.config.run import EvalSpec, Run, validate
from jtrain.data import PackedText
from jtrain.errors import UserError
from jtrain.layout.dims import ParamInfo
from jtrain.layout.layout import LayoutSpec, OffloadSpec
from jtrain.layout.mesh import AXES, MeshSpec
from jtrain.layout.precision import PrecisionSpec
from jtrain.model.attention import AttentionSpec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Muon
from jtrain.pipeline.spec import PipelineSpec

# 8 devices: three axes of size 2, or two of sizes 2 and 4.
DEVICES = 8
NUM_STEPS = 20
"""Length of the schedule; a trial makes only its first steps."""
VOCABULARY = descriptions.SIZES["vocab_size"]
REJECTED = 2
"""Number of the step, from 1, whose update `step.rejects` leaves out."""

type Setting = dict[str, Any]
"""Value of every factor by its path, and of `DESCRIPTION` where the model is `described`."""

DESCRIBED = "described"
"""Model that is a description by chance."""
DESCRIPTION = "model.description"

FACTORS: dict[str, tuple[Any, ...]] = {
    # Powers of two, at most half of the devices, so that an axis always leaves room for another.
    "mesh.replica": (1, 2),
    "mesh.stage": (1, 2, 4),
    "mesh.data": (1, 2, 4),
    "mesh.expert": (1, 2, 4),
    "mesh.context": (1, 2, 4),
    "mesh.tensor": (1, 2, 4),
    "layout.zero_stage": (0, 1, 2, 3),
    "layout.microbatches": (1, 2, 4, 8),
    # Sets of saved names beside the two extremes.
    "layout.remat": (
        "none",
        "full",
        "attention",
        "attention_out+mlp_up",
        "attention_q+attention_k+attention_v",
    ),
    "layout.tensor_overlap": (False, True),
    "layout.sequence_groups": (1, 2),
    # Of a device's positions, some of which are left over.
    "layout.mlp_chunk": (None, 3),
    "layout.context_attention": ("ring", "ulysses"),
    # A fraction moves that part of the bytes to the host, none and all are the ends.
    "layout.offload.optimizer": ("none", 0.5, 1.0),
    "layout.offload.params": ("none", 0.5, 1.0),
    "layout.offload.activations": ("none", 0.5, 1.0),
    "layout.offload.gradients": ("none", 0.5, 1.0),
    "layout.offload.update": ("device", "host"),
    "data.context_order": ("zigzag", "contiguous"),
    "pipeline.schedule": ("1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "dualpipev"),
    "pipeline.chunks": (1, 2),
    "pipeline.gather": ("tick", "step"),
    "precision.param_dtype": ("float32", "bfloat16"),
    "precision.compute_dtype": ("float32", "bfloat16"),
    "precision.reduce_dtype": ("float32", "bfloat16"),
    "precision.grad_accum_dtype": ("float32", "bfloat16"),
    "precision.matmul_dtype": ("compute", "fp8_current", "fp8_delayed"),
    "optimizer": ("AdamW", "Muon"),
    "optimizer.moment_dtype": ("float32", "bfloat16", "bfloat16_sr", "int8"),
    "optimizer.master_dtype": ("none", "float32"),
    "optimizer.param_rounding": ("nearest", "stochastic"),
    "model": ("llama", "qwen3", "moe", "moe, shared expert", DESCRIBED),
    "model.scan_layers": (True, False),
    # More tokens than a batch has (one chunk), fewer, and the size that the library chooses.
    "model.loss_chunk_tokens": (1024, 16, "auto"),
    "model.attention_chunk": (512, 4),
    "kernels": ("chosen", "permutes"),
    # Not options of a config: ways in which the step itself can be built or run.
    "step.pieces of experts": ("one", "several"),
    "step.rejects": (False, True),
    "step.checksums": (False, True),
    "step.evaluates": (False, True),
    "step.first weights": ("given", "drawn"),
}
"""Values of each factor; the first is the default. Factors of `step` are no options of a config."""

OF_A_REFERENCE = ("optimizer", "model", DESCRIPTION, "step.rejects")
"""Factors that change the numbers of a run in float32; so do those whose path begins with these:"""
OF_A_PRECISION = ("precision.", "optimizer.")

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": dict(num_layers=8, num_kv_heads=2, d_ff=64, z_loss=1e-4),
    "qwen3": dict(num_layers=5, num_kv_heads=4, d_ff=64, qk_norm=True, tie_embeddings=True),
    "moe": dict(
        num_layers=5,
        num_kv_heads=1,
        d_ff=16,
        tie_embeddings=True,
        moe=MoESpec(num_experts=4, top_k=2, normalize_top_k=False, balance_loss=1e-2),
    ),
    "moe, shared expert": dict(
        num_layers=8,
        num_kv_heads=2,
        d_ff=16,
        z_loss=1e-4,
        moe=MoESpec(num_experts=8, top_k=2, shared_experts=1, balance_loss=1e-2, router_z_loss=1e-3),
    ),
}
"""Models of flat fields, with heads that `tensor` splits, shares between devices, or cannot split."""

PERMUTES = tuple(
    (op, "permute")
    for op in (
        "all_gather_matmul",
        "matmul_reduce_scatter",
        "all_gather_matmul_fp8",
        "matmul_reduce_scatter_fp8",
    )
)


def defaults() -> Setting:
    """One device in float32, nothing else."""
    return {path: values[0] for path, values in FACTORS.items()} | {DESCRIPTION: None}


def changed_factors(setting: Setting) -> Setting:
    """The factors that are not at their default."""
    return {path: value for path, value in setting.items() if value != FACTORS.get(path, (None,))[0]}


def is_float32(setting: Setting) -> bool:
    """True if all arithmetic of the gradients is float32."""
    return not any(path.startswith("precision.") for path in changed_factors(setting))


def is_exact(setting: Setting) -> bool:
    """True if the optimizer's state is float32 as well."""
    # Rounded moments and parameters make later steps differ by more than the order of sums.
    state = ("optimizer.moment_dtype", "optimizer.master_dtype", "optimizer.param_rounding")
    return is_float32(setting) and not any(path in state for path in changed_factors(setting))


def one_device(setting: Setting, *, precision: bool) -> Setting:
    """The same run on one device in one piece; in float32, or with `precision` in the setting's own."""
    # Layout factors are left at their defaults: one device, one piece.
    keep = [path for path in setting if path in OF_A_REFERENCE]
    if precision:
        keep += [path for path in setting if path.startswith(OF_A_PRECISION)]
    extra: Setting = {"step.first weights": "drawn"}
    if precision and not is_float32(setting):
        # In float32, float64 is the measure of an evaluation.
        extra["step.evaluates"] = setting["step.evaluates"]
    return defaults() | extra | {path: setting[path] for path in keep}


_LISTED: dict[int, tuple[ParamInfo, ...]] = {}
"""Parameters by model: a draw of settings asks for them thousands of times. `make_model` keeps all models
alive."""


@dataclasses.dataclass(frozen=True)
class _DrawnVector(ParamInfo):
    """Scale or bias that does not begin at one or zero, where some mistakes would change nothing."""

    @property
    def is_matrix(self) -> bool:
        """False, although it is drawn."""
        return False


class _Model(Transformer):
    """A model that lists its parameters once."""

    def param_infos(self) -> tuple[ParamInfo, ...]:
        """Every parameter, sorted by path."""
        # By identity: as a key, a model would be hashed field by field each time.
        if id(self) not in _LISTED:
            _LISTED[id(self)] = super().param_infos()
        return _LISTED[id(self)]


class _DescribedModel(_Model):
    """A model whose vectors are drawn as well."""

    def param_infos(self) -> tuple[ParamInfo, ...]:
        """Every parameter, sorted by path."""
        if id(self) not in _LISTED:
            _LISTED[id(self)] = tuple(
                _DrawnVector(**vars(info) | {"init": "normal", "std": 0.5}) if info.init != "normal" else info
                for info in super().param_infos()
            )
        return _LISTED[id(self)]


def model_of(setting: Setting) -> Transformer:
    """The model of a setting; equal settings give the same object."""
    return _make_model(
        *(setting[f"model.{name}"] for name in ("scan_layers", "loss_chunk_tokens", "attention_chunk")),
        setting["model"],
        setting[DESCRIPTION] if setting["model"] == DESCRIBED else None,
    )


@functools.cache
def _make_model(
    scan_layers: bool, chunk: int | str, attention_chunk: int, family: str, description: Description | None
) -> Transformer:
    options: dict[str, Any] = dict(
        scan_layers=scan_layers, loss_chunk_tokens=chunk, attention_chunk=attention_chunk
    )
    if description is not None:
        return _DescribedModel(**descriptions.SIZES | options | dict(description))
    return _Model(**descriptions.SIZES | options | FAMILIES[family])


@functools.cache
def _data(order: Any) -> PackedText:
    return PackedText(path="README.md", seq_len=COLUMNS, global_batch=ROWS, context_order=order)


def make_run(setting: Setting) -> Run:
    """The config of a setting.

    Raises:
      UserError: a component refuses a value, the components do not fit, or there are more than DEVICES
        devices.
    """
    mesh = MeshSpec(**{axis: setting[f"mesh.{axis}"] for axis in AXES})
    # Refused here, since `validate` knows nothing of emulated devices.
    if mesh.size > DEVICES:
        raise UserError(f"mesh of {mesh.size} devices, but {DEVICES} are emulated.")
    options_of = {
        prefix: _below(setting, prefix)
        for prefix in ("layout.offload.", "pipeline.", "precision.", "optimizer.")
    }
    remat = setting["layout.remat"]
    # Other values of the factor are names of arrays to save, joined by `+`.
    named = remat not in ("none", "full")
    layout = LayoutSpec(
        zero_stage=setting["layout.zero_stage"],
        microbatches=setting["layout.microbatches"],
        remat="named" if named else remat,
        remat_save=tuple(remat.split("+")) if named else (),
        tensor_overlap=setting["layout.tensor_overlap"],
        sequence_groups=setting["layout.sequence_groups"],
        mlp_chunk=setting["layout.mlp_chunk"],
        context_attention=setting["layout.context_attention"],
        offload=OffloadSpec(**options_of["layout.offload."]),
    )
    optimizer: Any = dict(AdamW=AdamW, Muon=Muon)[setting["optimizer"]]
    run = Run(
        seed=0,
        num_steps=NUM_STEPS,
        mesh=mesh,
        layout=layout,
        pipeline=PipelineSpec(**options_of["pipeline."]),
        precision=PrecisionSpec(**options_of["precision."]),
        kernels=PERMUTES if setting["kernels"] == "permutes" else (),
        model=model_of(setting),
        optimizer=optimizer(peak_lr=3e-3, warmup_steps=4, **options_of["optimizer."]),
        data=_data(setting["data.context_order"]),
        eval=EvalSpec(every_steps=None),
    )
    # The same checks as a user's config gets.
    validate(run)
    return run


def _below(setting: Setting, prefix: str) -> dict[str, Any]:
    return {path.removeprefix(prefix): value for path, value in setting.items() if path.startswith(prefix)}


def refusal(setting: Setting) -> UserError | None:
    """The reason why jtrain refuses a setting, None if it takes it."""
    try:
        make_run(setting)
    except UserError as error:
        return error
    return None


def reference_of(setting: Setting) -> Model:
    """Settings of the model, for the float64 reference."""
    model = model_of(setting)
    return Model(
        model.first,
        model.period,
        model.last,
        model.norm,
        model.num_routers,
        model.norm_eps,
        model.tie_embeddings,
        model.z_loss,
        model.embedding_scale,
        model.logit_scale,
        model.embedding_norm,
        model.logit_soft_cap,
        on_one_device(model.sizes, model.norm),
    )


def min_key_heads(setting: Setting) -> int:
    """Key heads of the layer that has the fewest."""
    model = model_of(setting)
    mixers = (block.mixer for block in model.blocks if isinstance(block.mixer, AttentionSpec))
    # Without attention there are no heads, and any number of devices can split what there is.
    return min((mixer.head_sizes(model.sizes)[1] for mixer in mixers), default=DEVICES)


def descent_of(setting: Setting) -> Descent:
    """Settings of the optimizer, for the float64 reference."""
    # All other settings of the optimizer are the defaults of `Descent`, which the run above repeats.
    return Descent(muon=setting["optimizer"] == "Muon")


def count_devices(setting: Setting) -> int:
    """Number of devices of the mesh."""
    return math.prod(setting[f"mesh.{axis}"] for axis in AXES)


def as_text(setting: Setting) -> str:
    """The factors that are not at their default, in one line."""
    changed = changed_factors(setting)
    if (description := changed.pop(DESCRIPTION, None)) is not None:
        changed["model"] = f"described by {descriptions.as_text(description)}"
    return ", ".join(f"{path}={value}" for path, value in changed.items()) or "all defaults"
