"""One run as data: `Run` has a field per component, and a config file makes a `fdl.Config[Run]` of it.

The order is that of the command line: the base function, its fiddlers, then `--set`. What comes out prints as one
`path: type = value` line per leaf, which is also what a workdir remembers of the run that made it.
"""

import contextlib
import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import fiddle as fdl

from jtrain import leaves
from jtrain.checkpoint import CheckpointSpec
from jtrain.data import PackedText
from jtrain.layout import LayoutSpec, OffloadSpec, check_batch, make_layout
from jtrain.mesh import BATCH_AXES, MeshSpec, shard_size
from jtrain.metrics import MetricsSpec
from jtrain.model.param import map_params
from jtrain.model.residuals import offloaded_names
from jtrain.model.stream import check_scanned
from jtrain.model.transformer import SAVEABLE, Transformer
from jtrain.optim import AdamW, Muon, check_layout
from jtrain.optim import build as build_optimizer
from jtrain.profile.spec import ProfileSpec
from jtrain.step import check_offload
from jtrain_kernels import registry


@dataclasses.dataclass(frozen=True)
class EvalSpec:
    """When to evaluate on the held-out split; `data.eval_fraction` and `data.eval_batches` say on how much.

    every_steps: train steps between evaluations; None evaluates never.
    """

    every_steps: int | None = 100

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.every_steps < 1:
            raise ValueError(f"eval.every_steps={self.every_steps} must be at least 1, or None to evaluate never.")


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that a run is. `num_steps` updates from the weights that `seed` draws; the schedule reads it too."""

    seed: int
    num_steps: int
    mesh: MeshSpec
    layout: LayoutSpec
    model: Transformer
    optimizer: AdamW | Muon
    data: PackedText
    checkpoint: CheckpointSpec = dataclasses.field(default_factory=CheckpointSpec)
    eval: EvalSpec = dataclasses.field(default_factory=EvalSpec)
    metrics: MetricsSpec = dataclasses.field(default_factory=MetricsSpec)
    profile: ProfileSpec = dataclasses.field(default_factory=ProfileSpec)

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"num_steps={self.num_steps} must be at least 1.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must be in [0, 2**32).")


ADDED = {"model.moe": "None", "optimizer.master_dtype": "'none'", "optimizer.param_rounding": "'nearest'"}
"""Fields that older runs did not have -> as text, the value that does what was done then."""

MAY_CHANGE_ON_RESUME = {
    "mesh.": "a layout is not a model",
    "layout.": "a layout is not a model",
    "model.scan_layers": "how it compiles",
    "model.loss_chunk_tokens": "how it compiles",
    "model.attention_chunk": "how it compiles",
    "checkpoint.": "what a run leaves behind, not what it computes",
    "eval.": "what a run leaves behind, not what it computes",
    "data.eval_batches": "what a run leaves behind, not what it computes",
    "data.mixture": "the log says what changed, from which step",
    "data.sources.": "the log says what changed; a source whose documents changed is refused by the data state",
    "data.on_bad_record": "the way on past a document that cannot be read",
    "data.epochs": "where the data ends, not what it is",
    "data.shuffle_window_bytes": "sources keep the window they began with",
    "data.engine": "how the data is read, not what it is",
    "data.max_loaders": "how the data is read, not what it is",
    "data.shadows": "how the data is read, not what it is",
    "data.read_timeout_s": "how the data is read, not what it is",
    "data.prepared": "how the data is read, not what it is",
    "data.cache_dir": "how the data is read, not what it is",
    "data.lookahead_steps": "how the data is read, not what it is",
    "data.context_order": "where positions lie, not what they are",
    "metrics.": "what a run leaves behind, not what it computes",
    "profile.": "what a run leaves behind, not what it computes",
}
"""Prefix of a path -> why a rerun in the same workdir may change it. Everything else makes it another run; `num_steps`
too, because the schedule reads it."""


def load(name: str, fiddlers: Sequence[str] = (), sets: Sequence[str] = ()) -> fdl.Config[Run]:
    """The config that `--config=name --with fiddler ... --set path=value ...` means.

    Args:
      name: a file in configs/ (the checkout's, else the installed one), `path/to/file.py[:function]` or
        `module:function`.
      fiddlers: functions of the same file, applied in order.
      sets: `path=literal`; a word that is no literal is a string.

    Raises:
      ValueError: no such config, fiddler or path, with the nearest names there are; or a value of the wrong type.
    """
    module, function = _find(name)
    config = _call(module, function, "base function", 0)
    if not isinstance(config, fdl.Config) or fdl.get_callable(config) is not Run:
        raise ValueError(
            f"--config={name}: {function}() must return a fdl.Config(Run, ...), not {type(config).__name__}."
        )
    leaves.expand(config)
    for fiddler in fiddlers:
        _call(module, fiddler, "fiddler", 1, config)
        leaves.expand(config)
    leaves.check_types(config)
    for text in sets:
        leaves.set_path(config, text)
    return config


def read(config_text: str) -> fdl.Config[Run]:
    """The config of a workdir or a checkpoint, from the text kept there.

    Raises:
      ValueError: as `jtrain.leaves.read`.
    """
    return leaves.read(Run, config_text)


def mesh_size(config: fdl.Config[Run]) -> int:
    """Devices of a config's mesh."""
    return _built(config.mesh).size


def for_devices(config: fdl.Config[Run], count: int) -> list[str]:
    """Changes the mesh of a config to `count` devices, if it is of another number; returns what was changed.

    What is not `data` stays, `replica` becomes part of `data`, and about as many sequences are computed at a time.

    Raises:
      ValueError: the other axes do not divide `count`, or `count` devices do not divide the batch.
    """
    was: MeshSpec = _built(config.mesh)
    layout: LayoutSpec = _built(config.layout)
    if was.size == count:
        return []
    others = was.size // was.replica // was.data
    if count % others:
        axes = " * ".join(f"mesh.{axis}={size}" for axis, size in was.shape.items() if size > 1 and axis != "data")
        raise ValueError(
            f"{count} devices are not a multiple of {axes} = {others}. Use a multiple of {others}, or --set them to 1."
        )
    mesh = dataclasses.replace(was, replica=1, data=count // others)
    batch = config.data.global_batch
    rows = shard_size("data.global_batch", batch, mesh.shape, BATCH_AXES)
    at_a_time = max(1, batch // (was.replica * was.data * was.expert) // layout.microbatches)
    parts = next(n for n in range(1, rows + 1) if rows % n == 0 and rows // n <= at_a_time)
    changes = {"mesh.replica": 1, "mesh.data": mesh.data, "layout.microbatches": parts}
    before = {"mesh.replica": was.replica, "mesh.data": was.data, "layout.microbatches": layout.microbatches}
    config.mesh.replica, config.mesh.data, config.layout.microbatches = 1, mesh.data, parts
    return [f"{path}={value} (the config: {before[path]})" for path, value in changes.items() if before[path] != value]


def set_values(config: fdl.Config[Run], values: Mapping[str, object]) -> None:
    """Sets fields of a loaded config by their paths."""
    for path, value in values.items():
        owner: Any = config
        *parents, last = path.split(".")
        for name in parents:
            owner = getattr(owner, name)
        setattr(owner, last, value)


def build(config: fdl.Config[Run]) -> Run:
    """Makes every component, and checks those that must fit each other.

    Raises:
      ValueError: a component refuses its fields, or `validate` does.
    """
    if unset := [leaf.path for leaf in leaves.leaves(config) if leaf.text == leaves.NOT_SET]:
        raise ValueError(f"{', '.join(unset)}: no value. Set it in the config, or by --set {unset[0]}=VALUE.")
    run: Run = _built(config)
    validate(run)
    return run


def _built(component: Any) -> Any:
    """A component of its config, or what it said against that."""
    try:
        return fdl.build(component)
    except ValueError as error:  # fiddle appends all the component's arguments to what the component said
        message = str(error).partition("\n\nFiddle context:")[0]
        raise ValueError(message).with_traceback(error.__traceback__) from None


def validate(run: Run) -> None:
    """Checks what needs more than one component to see.

    Raises:
      ValueError: names the fields, the numbers and the way out.
    """
    offload = run.layout.offload
    if {offload.params, offload.activations} - {"none", 0}:
        check_scanned(run.model.scan_layers)
    if "as_needed" in (offload.optimizer, offload.params, offload.activations):
        offload = OffloadSpec()  # how much it is depends on the devices
    # Heads, widths and vocabulary over the mesh; names of activations out of what is kept.
    infos = run.model.param_infos()
    spec, order = dataclasses.replace(run.layout, offload=offload), run.data.context_order
    layout = make_layout(spec, run.mesh, infos, context_order=order)
    offloaded_names(layout)
    check_offload(run.layout, run.optimizer)
    registry.check(dict(run.layout.kernels))
    check_layout(run.optimizer, layout)
    build_optimizer(run.optimizer, num_steps=run.num_steps, params=map_params(lambda info: info, infos))
    check_batch(run.layout, run.mesh, global_batch=run.data.global_batch, seq_len=run.data.seq_len)
    if unknown := [name for name in run.layout.remat_save if name not in SAVEABLE]:
        raise ValueError(
            f"layout.remat_save names {', '.join(unknown)}, which no layer computes. There are: {', '.join(SAVEABLE)}."
        )
    if run.eval.every_steps is not None and not run.data.eval_fraction:
        raise ValueError(
            f"eval.every_steps={run.eval.every_steps} evaluates on held-out documents, but data.eval_fraction=0 holds "
            "none out. Set eval.every_steps=None, or data.eval_fraction above 0."
        )
    run.profile.check_length(run.num_steps)


def check_vocabulary(model: Transformer, vocab_size: int) -> None:
    """Refuses a model that cannot embed every id; apart from `validate`, because it needs the tokenizer's file.

    Raises:
      ValueError: both sizes.
    """
    if vocab_size > model.vocab_size:
        raise ValueError(
            f"data.tokenizer makes {vocab_size} different ids, but model.vocab_size={model.vocab_size}. "
            f"Set model.vocab_size={vocab_size} or more, or another data.tokenizer."
        )


def differences(there: str, here: str) -> list[str]:
    """What makes two flat texts two runs: `path: a there, b here`, without what MAY_CHANGE_ON_RESUME allows.

    A field that an older version did not have is a difference, but for those of ADDED.
    """
    old, new = leaves.parse(there), leaves.parse(here)
    old = {path: text for path, text in ADDED.items() if path in new} | old
    return [
        f"{path}: {old.get(path, 'absent')} there, {new.get(path, 'absent')} here"
        for path in dict.fromkeys([*old, *new])
        if old.get(path) != new.get(path) and not path.startswith(tuple(MAY_CHANGE_ON_RESUME))
    ]


def check_same_run(workdir: Path, config_text: str) -> None:
    """Refuses a workdir whose config.txt is that of another run.

    Raises:
      ValueError: with every differing path and both its values.
    """
    file = workdir / "config.txt"
    if not file.exists():
        return
    if lines := differences(file.read_text(), config_text):
        listed = "".join(f"\n  {line}" for line in lines)
        raise ValueError(
            f"{workdir} holds another run:{listed}\nSet --workdir to a new folder, or run with the config in {file}."
        )


def folders() -> list[Path]:
    """Where a config's name is looked up: this folder's configs/, the checkout's, then what a wheel carries."""
    package = Path(__file__).parent
    return [Path.cwd() / "configs", package.parent / "configs", package / "_configs"]


def _find(name: str) -> tuple[types.ModuleType, str]:
    """The module of a config, and the name of its base function."""
    file, py, function = name.rpartition(".py")
    if py and function[:1] in ("", ":"):
        path = Path(file + py)
        if not path.is_file():
            raise ValueError(f"--config={name}: there is no file {path.absolute()}.")
        return _load_file(path), function[1:] or path.stem
    module, colon, function = name.partition(":")
    if colon:
        try:
            return importlib.import_module(module), function
        except ModuleNotFoundError as error:
            raise ValueError(f"--config={name}: no module {module} ({error}).") from error
    here = [folder for folder in folders() if folder.is_dir()]
    for folder in here:
        if (path := folder / f"{name}.py").is_file():
            return _load_file(path), name
    names = sorted({path.stem for folder in here for path in folder.glob("*.py")})
    raise ValueError(
        f"--config={name}: no such config. {_did_you_mean(name, names)}There are: {', '.join(names)}. "
        "A config is also path/to/file.py[:function] or module:function."
    )


def _did_you_mean(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names)
    return f"Did you mean {', '.join(near)}? " if near else ""


def _load_file(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"jtrain_config_{path.stem}", path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    with _located(path):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _located(path: Path) -> Iterator[None]:
    """Whatever a config file raises, as a ValueError that says where in the file: it is the user's to mend."""
    try:
        yield
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
        if isinstance(error, SyntaxError):
            lines = [error.lineno]
        where = f"{path}:{lines[-1]}" if lines else f"{path}"
        raise ValueError(f"{where}: {type(error).__name__}: {error}") from error


def _call(module: types.ModuleType, name: str, what: str, num_arguments: int, *arguments: Any) -> Any:
    """Calls the module's base function or fiddler `name`."""
    assert module.__file__ is not None, module
    found = {
        key: value
        for key, value in vars(module).items()
        if inspect.isfunction(value)
        and not key.startswith("_")
        and value.__module__ == module.__name__
        and len(inspect.signature(value).parameters) == num_arguments
    }
    if name not in found:
        raise ValueError(
            f"{module.__file__} has no {what} {name}. {_did_you_mean(name, list(found))}"
            f"It has: {', '.join(found) or 'none'}."
        )
    with _located(Path(module.__file__)):
        return found[name](*arguments)
