"""Config loading: makes a `fdl.Config[Run]` of `--config NAME --with FIDDLER --set PATH=VALUE`."""

import dataclasses
import importlib
import inspect
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fiddle as fdl

from jtrain.config import fiddlers as shared
from jtrain.config import tree
from jtrain.config.run import Run, build_component
from jtrain.errors import UserError, did_you_mean
from jtrain.layout.batch_split import split_batch
from jtrain.layout.layout import LayoutSpec
from jtrain.layout.mesh import BATCH_AXES, MeshSpec, shard_size
from jtrain.runtime.user_code import load_python_file, located


def load_config(name: str, fiddlers: Sequence[str] = (), sets: Sequence[str] = ()) -> fdl.Config[Run]:
    """Loads the config that `--config=name --with fiddler ... --set path=value ...` describes.

    Args:
      name: a file in configs/ (see `folders`), `path/to/file.py[:function]` or `module:function`.
      fiddlers: functions of the same file, or of `jtrain.config.fiddlers`, applied in order.
      sets: `path=literal` each; text that is not a Python literal is taken as a string.

    Raises:
      UserError: the config, fiddler or path does not exist (the message suggests similar names), or a value
        has the wrong type.
    """
    module, function = _find(name)
    config = _call(module, function, "base function", 0)
    if not isinstance(config, fdl.Config) or fdl.get_callable(config) is not Run:
        raise UserError(
            f"--config={name}: {function}() must return a fdl.Config(Run, ...), not {type(config).__name__}."
        )
    # Before a fiddler or --set names a path: nested dataclasses get a path of their own.
    tree.expand(config)
    mesh = config.__arguments__.get("mesh")
    # A config that does not mention `data` leaves it to the devices; one that sets 1 means 1.
    if isinstance(mesh, fdl.Config) and "data" not in mesh.__arguments__:
        mesh.data = "auto"
    for fiddler in fiddlers:
        _call(module, fiddler, "fiddler", 1, config)
        # Again: a fiddler may have put a component in.
        tree.expand(config)
    # Before `--set`, so that a message names the config's own value.
    tree.convert_types(config)
    for text in sets:
        tree.set_path(config, text)
    return config


def mesh_size(config: fdl.Config[Run]) -> int:
    """Number of devices in a config's mesh; with `mesh.data=auto` the fewest that it can have."""
    return build_component(config.mesh).resolve_data(1).size


def choose_microbatches(config: fdl.Config[Run]) -> list[str]:
    """Sets `layout.microbatches` as `layout.microbatch_tokens` asks; the mesh is known. Returns a line if it
    changed.
    """
    layout: LayoutSpec = build_component(config.layout)
    data = config.data
    split = split_batch(
        layout, build_component(config.mesh), global_batch=data.global_batch, seq_len=data.seq_len
    )
    if split == layout:
        return []
    config.layout.microbatches = split.microbatches
    return [
        f"layout.microbatches={split.microbatches}: a device computes at most "
        f"layout.microbatch_tokens={layout.microbatch_tokens} at a time"
    ]


def for_devices(config: fdl.Config[Run], count: int) -> list[str]:
    """Changes a config's mesh to `count` devices, if it has another number; returns one line per changed
    field.

    Where the config has `mesh.data=auto`, only that is set. Elsewhere `data` takes up the difference and
    absorbs `replica`, the other axes keep their sizes, and `layout.microbatches` is chosen so that a device
    computes at most as many sequences at a time as before. Then `layout.microbatch_tokens` is kept to.

    Raises:
      UserError: `count` is not a multiple of the other axes, or the batch does not split over `count`
        devices.
    """
    # In this order: the number of microbatches depends on the mesh.
    return [*_with_mesh_of(config, count), *choose_microbatches(config)]


def _with_mesh_of(config: fdl.Config[Run], count: int) -> list[str]:
    mesh_spec: MeshSpec = build_component(config.mesh)
    layout: LayoutSpec = build_component(config.layout)
    one_data_mesh = mesh_spec.resolve_data(1)
    is_auto = mesh_spec != one_data_mesh
    if not is_auto and one_data_mesh.size == count:
        return []
    other_devices = one_data_mesh.size
    if not is_auto:
        # `data` also absorbs `replica`; with `auto`, `replica` keeps its size and `data` is 1 here.
        other_devices //= one_data_mesh.replica * one_data_mesh.shape["data"]
    if count % other_devices:
        sizes = {axis: size for axis, size in one_data_mesh.shape.items() if size > 1 and axis != "data"}
        axes = " * ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
        raise UserError(
            f"{count} devices are not a multiple of {axes} = {other_devices}. Use --count "
            f"{max(count - count % other_devices, other_devices)}, or "
            f"{' '.join(f'--set mesh.{axis}=1' for axis in sizes)}."
        )
    if is_auto:
        config.mesh.data = count // other_devices
        return [f"mesh.data={count // other_devices} (the config: auto)"]
    mesh = dataclasses.replace(one_data_mesh, replica=1, data=count // other_devices)
    # The batch stays: losses must not change with the devices.
    batch = config.data.global_batch
    rows = shard_size("data.global_batch", batch, mesh.shape, BATCH_AXES)
    sequences_at_a_time = max(1, batch // one_data_mesh.batch_shards // layout.microbatches)
    # The smallest number of microbatches, so that a device gets no more sequences at once than before.
    microbatches = next(
        num_parts
        for num_parts in range(1, rows + 1)
        if rows % num_parts == 0 and rows // num_parts <= sequences_at_a_time
    )
    changes = {"mesh.replica": 1, "mesh.data": count // other_devices, "layout.microbatches": microbatches}
    old_values = {
        "mesh.replica": one_data_mesh.replica,
        "mesh.data": one_data_mesh.shape["data"],
        "layout.microbatches": layout.microbatches,
    }
    config.mesh.replica, config.mesh.data, config.layout.microbatches = (
        1,
        count // other_devices,
        microbatches,
    )
    return [
        f"{path}={value} (the config: {old_values[path]})"
        for path, value in changes.items()
        if old_values[path] != value
    ]


def set_values(config: fdl.Config[Run], values: Mapping[str, object]) -> None:
    """Sets fields of a loaded config; `values` maps paths to values."""
    for path, value in values.items():
        owner: Any = config
        *parents, last = path.split(".")
        for name in parents:
            owner = getattr(owner, name)
        setattr(owner, last, value)


def folders() -> list[Path]:
    """Folders searched for a config's name, in order: ./configs, the checkout's configs/, the configs in the
    wheel.
    """
    package = Path(__file__).parents[1]
    return [Path.cwd() / "configs", package.parent / "configs", package / "_configs"]


def _find(name: str) -> tuple[types.ModuleType, str]:
    """Loads a config's module; returns it with the name of its base function."""
    # A file before a module: `a.py:f` holds a colon as well.
    file, py, function = name.rpartition(".py")
    if py and function[:1] in ("", ":"):
        path = Path(file + py)
        if not path.is_file():
            raise UserError(f"--config={name}: there is no file {path.absolute()}.")
        return load_python_file(path), function[1:] or path.stem
    module, colon, function = name.partition(":")
    if colon:
        try:
            return importlib.import_module(module), function
        except ModuleNotFoundError as error:
            raise UserError(f"--config={name}: no module {module} ({error}).") from error
    # The first folder that has it wins, as with a PATH.
    existing_folders = [folder for folder in folders() if folder.is_dir()]
    for folder in existing_folders:
        if (path := folder / f"{name}.py").is_file():
            return load_python_file(path), name
    names = sorted({path.stem for folder in existing_folders for path in folder.glob("*.py")})
    raise UserError(
        f"--config={name}: no such config. {did_you_mean(name, names)}There are: {', '.join(names)}. "
        "A config is also path/to/file.py[:function] or module:function."
    )


def _call(module: types.ModuleType, name: str, role: str, num_arguments: int, *arguments: Any) -> Any:
    """Calls the base function or fiddler `name` of a module."""
    assert module.__file__ is not None, module
    # Functions of this module alone, not what it imports, and only those that take so many arguments.
    functions = {
        key: value
        for key, value in vars(module).items()
        if inspect.isfunction(value)
        and not key.startswith("_")
        and value.__module__ == module.__name__
        and len(inspect.signature(value).parameters) == num_arguments
    }
    if role == "fiddler":
        # A config's own fiddler of the same name comes first.
        functions |= {
            fiddler.__name__: fiddler
            for fiddler in (
                shared.debug,
                shared.small,
                shared.lora,
                shared.dpo,
                shared.distill,
                shared.stream,
                shared.profile,
            )
            if fiddler.__name__ not in functions
        }
    if name not in functions:
        # Without a function's name a file's base function is the one called like the file.
        is_config = role == "base function" and len(functions) > 0
        way_out = f" Give --config={Path(module.__file__).name}:{next(iter(functions))}." if is_config else ""
        raise UserError(
            f"{module.__file__} has no {role} {name}. {did_you_mean(name, functions)}It has: "
            f"{', '.join(functions) or 'none'}.{way_out}"
        )
    with located(Path(module.__file__)):
        return functions[name](*arguments)
