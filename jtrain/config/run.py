"""One run as data: `Run` has a field per component, and a config file returns a `fdl.Config[Run]`.

The base function makes the config, fiddlers change it, then `--set` does, as on the command line. The result
prints as one `path: type = value` line per field; the workdir keeps this text to recognise its run.
"""

import dataclasses
import inspect
from typing import Any

import fiddle as fdl
import numpy as np
from jaxtyping import Int64

from jtrain.checkpoint import CheckpointSpec
from jtrain.config import tree
from jtrain.config.integrity_spec import IntegritySpec
from jtrain.config.weight_stream_spec import WeightStreamSpec
from jtrain.data import PackedText, Source
from jtrain.data.constructor.context_order import context_order
from jtrain.data.sources.source import HELD_OUT_PREFIX, field_of, is_source_name
from jtrain.errors import UserError
from jtrain.layout.batch_split import check_batch
from jtrain.layout.dims import AdapterDropout, ParamInfo
from jtrain.layout.layout import Kernels, Layout, LayoutSpec, OffloadSpec, make_layout
from jtrain.layout.mesh import MeshSpec
from jtrain.layout.offload_spec import OFFLOADABLE
from jtrain.layout.precision import PrecisionSpec
from jtrain.model.adapters.lora import LoRA
from jtrain.model.layer_scan import check_scanned
from jtrain.model.param import map_params
from jtrain.model.saved_activations import offloaded_names, saveable
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Muon, Optimizer, check_layout
from jtrain.optim import build as build_optimizer
from jtrain.optim.optimizer import check_offload
from jtrain.pipeline.spec import PipelineSpec
from jtrain.profile.spec import ProfileSpec
from jtrain.step.guard import GuardSpec
from jtrain.step.layout_choices import check_layers
from jtrain.step.objective import DPO, Distillation, ObjectiveSpec
from jtrain.step.pipeline_ticks import counts_of
from jtrain.step.xla_options import Deterministic
from jtrain.supervise.spec import SuperviseSpec
from jtrain.telemetry.alerts import AlertsSpec
from jtrain.telemetry.metrics import MetricsSpec
from jtrain_kernels import registry


@dataclasses.dataclass(frozen=True)
class EvalSpec:
    """When and on what to evaluate: the split of `data.eval_fraction`, and further sets of text.

    every_steps: train steps between evaluations; None disables evaluation.
    sets: held-out sets by name. Each is a source of its own, wholly held out: it may have no file of a
      training source. An evaluation reads at most `data.eval_batches` batches of each set.
    first: True to evaluate the weights of step 0 as well, which a fine-tuned model is compared with.
    answers: turns of held-out samples of each set that the model answers at each evaluation, with the most
      likely tokens; generations.jsonl in the workdir keeps them, and `eval_exact` is the share that equals
      the sample's.
    prompts: fixed prompts that it answers as well: what a user says if the data has chats, otherwise the
      beginning of a document.
    answer_tokens: most tokens of an answer.
    """

    every_steps: int | None = 100
    sets: dict[str, Source] = dataclasses.field(default_factory=dict)
    first: bool = False
    answers: int = 0
    prompts: tuple[str, ...] = ()
    answer_tokens: int = 128

    def __post_init__(self) -> None:
        for name, minimum in (("answers", 0), ("answer_tokens", 1)):
            if (value := getattr(self, name)) < minimum:
                raise UserError(f"eval.{name}={value} must be at least {minimum}. Set eval.{name}.")
        if self.every_steps is not None and self.every_steps < 1:
            raise UserError(
                f"eval.every_steps={self.every_steps} must be at least 1, or None to disable evaluation."
            )
        for name, source in self.sets.items():
            if not is_source_name(name):
                raise UserError(
                    f"eval.sets: {name!r} is not a valid name. Use letters, digits, _ and -, no digit first."
                )
            source.check(f"{HELD_OUT_PREFIX}{name}")
            if source.weight != 1:
                raise UserError(
                    f"eval.sets.{name}.weight={source.weight}: a held-out set is in no mixture. Remove the "
                    "weight."
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One training run: `num_steps` updates of the weights drawn from `seed`.

    seed: of the initial weights and of the order of the data.
    num_steps: length of the run, and of the learning-rate schedule.
    deterministic: `on` has XLA give every sum on GPUs one order, so that steps repeat bit for bit; `off` lets
      them add in any order; `auto` leaves XLA's default, or what XLA_FLAGS says.
    kernels: implementations of ops that replace the registry's choice: (("attention", "cudnn"),).
    adapter: trains matrices of low rank beside those of `model`, which are frozen; None trains all of it.
    weight_stream: sends the weights to readers while the run trains; None for nobody.
    callbacks: objects that watch the loop (jtrain/train/callbacks.py): `module:name` or
      `path/to/file.py:name`.
    """

    seed: int
    num_steps: int
    deterministic: Deterministic = "auto"
    mesh: MeshSpec
    layout: LayoutSpec
    pipeline: PipelineSpec = dataclasses.field(default_factory=PipelineSpec)
    precision: PrecisionSpec = dataclasses.field(default_factory=PrecisionSpec)
    kernels: Kernels = ()
    model: Transformer
    adapter: LoRA | None = None
    optimizer: AdamW | Muon
    objective: ObjectiveSpec | DPO | Distillation = dataclasses.field(default_factory=ObjectiveSpec)
    data: PackedText
    checkpoint: CheckpointSpec = dataclasses.field(default_factory=CheckpointSpec)
    guard: GuardSpec = dataclasses.field(default_factory=GuardSpec)
    eval: EvalSpec = dataclasses.field(default_factory=EvalSpec)
    metrics: MetricsSpec = dataclasses.field(default_factory=MetricsSpec)
    profile: ProfileSpec = dataclasses.field(default_factory=ProfileSpec)
    integrity: IntegritySpec = dataclasses.field(default_factory=IntegritySpec)
    supervise: SuperviseSpec = dataclasses.field(default_factory=SuperviseSpec)
    alerts: AlertsSpec = dataclasses.field(default_factory=AlertsSpec)
    weight_stream: WeightStreamSpec | None = None
    callbacks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise UserError(f"num_steps={self.num_steps} must be at least 1.")
        if self.deterministic not in ("auto", "on", "off"):
            raise UserError(f"deterministic={self.deterministic!r} must be auto, on or off.")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed={self.seed} must be in [0, 2**32).")
        if len(dict(self.kernels)) < len(self.kernels):
            raise UserError(f"kernels={self.kernels!r} names an op twice. Keep one implementation for each.")

    def param_infos(self) -> tuple[ParamInfo, ...]:
        """Every parameter of the run, sorted by path: the model's, and those of its adapter.

        Raises:
          UserError: a target of the adapter matches nothing.
        """
        infos = self.model.param_infos()
        return infos if self.adapter is None else self.adapter.infos(infos)

    def context_order(self) -> Int64[np.ndarray, " L"]:
        """Place in a row's text of each column of a batch."""
        return context_order(self.data.seq_len, self.mesh.context, self.data.context_order)

    @property
    def components_of_layout(self) -> dict[str, Any]:
        """Arguments of `make_layout` that are not layouts themselves."""
        return dict(
            context_order=self.data.context_order,
            precision=self.precision,
            kernels=self.kernels,
            pipeline=self.pipeline,
            adapter_scale=None if self.adapter is None else self.adapter.scale,
            adapter_dropout=AdapterDropout(self.adapter.dropout, self.seed)
            if self.adapter is not None and self.adapter.dropout
            else None,
        )


def build_run(config: fdl.Config[Run]) -> Run:
    """Builds every component and checks that they fit each other.

    Raises:
      UserError: a field has no value, or a component or `validate` refuses one.
    """
    # Before fiddle builds: its own message names neither the path nor the way out.
    if unset := [leaf.path for leaf in tree.leaves(config) if leaf.text == tree.NOT_SET]:
        raise UserError(
            f"{', '.join(unset)}: no value. Set it in the config, or with --set {unset[0]}=VALUE."
        )
    run: Run = build_component(config)
    validate(run)
    return run


def build_component(component: Any) -> Any:
    """Builds a component; its refusal is raised as a UserError without fiddle's context."""
    try:
        return fdl.build(component)
    except ValueError as error:  # fiddle appends all arguments to the component's message
        message = str(error).partition("\n\nFiddle context:")[0]
        raise UserError(message).with_traceback(error.__traceback__) from None


def run_layout(run: Run) -> Layout:
    """Returns the layout of a run: sharding, memory and dtype of every array.

    Raises:
      UserError: as `make_layout`.
    """
    return make_layout(run.layout, run.mesh, run.param_infos(), **run.components_of_layout)


def build_run_optimizer(run: Run) -> Optimizer:
    """Returns the optimizer of a run, bound to its number of steps and its parameters."""
    params = map_params(lambda info: info, run.param_infos())
    return build_optimizer(run.optimizer, num_steps=run.num_steps, params=params)


def validate(run: Run) -> None:
    """Checks that the components of a run fit each other.

    Raises:
      UserError: two components do not fit; names the fields, their values and the way out.
    """
    # Whatever does not fit one device along `data` fits none:
    # `resolve_mesh` checks again with the number it chooses.
    run = dataclasses.replace(run, mesh=run.mesh.resolve_data(1))
    offload = run.layout.offload
    # A scan is what moves layers between host and device one at a time.
    if {offload.params, offload.activations, offload.gradients} - {"none", 0}:
        check_scanned(run.model.scan_layers)
    if "as_needed" in (getattr(offload, name) for name in OFFLOADABLE):
        offload = OffloadSpec()  # the share depends on the devices
    # Checks that heads, widths and vocabulary split over the mesh,
    # and that offloaded activations are among the saved.
    layout = run_layout(dataclasses.replace(run, layout=dataclasses.replace(run.layout, offload=offload)))
    check_layers(run.model, run.layout, run.mesh)
    offloaded_names(layout)
    check_offload(run.layout, run.optimizer)
    registry.check(dict(run.kernels))
    check_layout(run.optimizer, layout)
    # Built and thrown away: it checks its own fields.
    build_run_optimizer(run)
    check_batch(run.layout, run.mesh, global_batch=run.data.global_batch, seq_len=run.data.seq_len)
    if layout.pipeline is not None:
        counts_of(layout)  # refuses numbers that the schedule cannot have
    if unknown := [name for name in run.layout.remat_save if name not in saveable(layout)]:
        raise UserError(
            f"layout.remat_save names {', '.join(unknown)}, which no layer computes. There are: "
            f"{', '.join(saveable(layout))}."
        )
    if run.eval.every_steps is not None and not run.data.eval_fraction and not run.eval.sets:
        raise UserError(
            f"eval.every_steps={run.eval.every_steps} evaluates on held-out documents, but "
            "data.eval_fraction=0 holds none out and eval.sets is empty. Set eval.every_steps=None, "
            "data.eval_fraction above 0, or eval.sets."
        )
    check_preferences(run)
    check_distillation(run)
    check_weight_stream(run)
    run.profile.check_length(run.num_steps)


def check_distillation(run: Run) -> None:
    """Refuses a teacher that cannot be found for what a row holds, or that has more to say than there are
    tokens.
    """
    objective = run.objective
    if not isinstance(objective, Distillation):
        return
    if objective.top_k > run.model.vocab_size:
        raise UserError(
            f"objective.top_k={objective.top_k} tokens of model.vocab_size={run.model.vocab_size}. Set "
            f"objective.top_k to at most {run.model.vocab_size}."
        )
    parameters = inspect.signature(run.model.cross_entropy).parameters
    if "soft" not in parameters and not any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        raise UserError(
            f"objective=Distillation(...) gives {type(run.model).__name__}.cross_entropy what a teacher "
            "says as `soft`, and it has no such argument. Add it (docs/own_parts.md), or leave objective as "
            "it is."
        )
    has_samples = any(source.mask is not None for source in run.data.named_sources.values())
    if run.data.packing_of(has_samples=has_samples) == "concat":
        raise UserError(
            "objective=Distillation(...) finds what the teacher said by the tokens of a whole sample or "
            "piece of text, and data.packing='concat' cuts them at row ends, elsewhere in each epoch. Set "
            "data.packing=best_fit."
        )


def check_preferences(run: Run) -> None:
    """Refuses preference pairs without a loss of pairs, the loss without pairs, and what the loss cannot
    have.
    """
    objective = run.objective
    sources = [(field_of(name), source) for name, source in run.data.named_sources.items()]
    sources += [(f"{HELD_OUT_PREFIX}{name}", source) for name, source in run.eval.sets.items()]
    for field, source in sources:
        is_paired = source.rejected_field is not None
        if is_paired and not isinstance(objective, DPO):
            raise UserError(
                f"{field}.rejected_field={source.rejected_field!r} has preference pairs, whose loss is "
                f"objective=DPO(...). Add --with dpo. Without {field}.rejected_field the better answers "
                "alone would be learned."
            )
        if not is_paired and isinstance(objective, DPO):
            raise UserError(
                f"objective=DPO(...) compares two answers, and {field} has one. Set {field}.rejected_field, "
                "and prompt_field or messages_field with it."
            )
    if not isinstance(objective, DPO):
        return
    if run.adapter is not None and run.adapter.dropout:
        raise UserError(
            f"adapter.dropout={run.adapter.dropout} with objective=DPO(...): the two log-probabilities of a "
            "pair, and those of the reference, would be of different random models. Set adapter.dropout=0.0."
        )
    if objective.reference == "adapter_off" and run.adapter is None:
        raise UserError(
            "objective.reference=adapter_off is the model without its adapter, and the run has none. Set "
            "adapter (--with lora), or objective.reference=none."
        )
    if objective.reference == "adapter_off" and run.adapter is not None and run.adapter.train:
        raise UserError(
            f"objective.reference=adapter_off with adapter.train={run.adapter.train!r}: without its adapter "
            "the model would not be what it was, as these parameters move. Set adapter.train=(), or "
            "objective.reference=none."
        )
    if run.model.z_loss:
        raise UserError(
            f"model.z_loss={run.model.z_loss} with objective=DPO(...): pairs are compared by their "
            "log-probabilities alone. Set model.z_loss=0.0."
        )
    if (dtype := run.precision.matmul_dtype) != "compute":
        raise UserError(
            f"precision.matmul_dtype={dtype} with objective=DPO(...): log-probabilities that are compared "
            "are of one number format. Set precision.matmul_dtype=compute."
        )


def check_weight_stream(run: Run) -> None:
    """Refuses a stream of an adapter where there is none, or where more is trained than a folder of peft
    holds.
    """
    if run.weight_stream is None or not run.weight_stream.only_adapter:
        return
    if run.adapter is None or run.adapter.train:
        trained = "adapter=None" if run.adapter is None else f"adapter.train={run.adapter.train!r}"
        raise UserError(
            f"weight_stream.only_adapter=True sends A and B of an adapter and nothing else, but {trained}. "
            "Set weight_stream.only_adapter=False, which sends the model."
        )


def check_vocabulary(model: Transformer, vocab_size: int, *, field: str = "data.tokenizer") -> None:
    """Refuses a model that cannot embed every id; not part of `validate`, because it needs the tokenizer's
    file.

    Raises:
      UserError: the tokenizer has more ids than the model; names both sizes.
    """
    if vocab_size > model.vocab_size:
        raise UserError(
            f"{field} makes {vocab_size} different ids, but model.vocab_size={model.vocab_size}. "
            f"Set model.vocab_size={vocab_size} or more, or another {field}."
        )
