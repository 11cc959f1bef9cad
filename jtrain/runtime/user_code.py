"""Code of the user, named in a config: Python files, and functions as `module:name` or
`path/to/file.py:name`.
"""

import contextlib
import hashlib
import importlib
import importlib.util
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jtrain.errors import FileError, UserError, did_you_mean

_PREFIX = "jtrain_config_"
"""Start of the names of modules that are files of the user."""

_loaded: dict[tuple[Path, str], types.ModuleType] = {}
"""Module that was loaded last of each file and source."""


def load_function(setting: str, name: str) -> tuple[Callable[..., Any], types.ModuleType]:
    """Returns the function that a setting names, and its module.

    Args:
      setting: config path of the setting, for messages.
      name: `module:name` or `path/to/file.py:name`.

    Raises:
      FileError: there is no such file.
      UserError: the name has another form, its module cannot be loaded, or has no such function.
    """
    label = f"{setting}={name!r}"
    # From the right: a path may hold colons, a function's name does not.
    module_name, _, function = name.rpartition(":")
    if not module_name or not function:
        raise UserError(f"{label} must be 'module:name' or 'path/to/file.py:name'.")
    file = Path(module_name).expanduser() if module_name.endswith(".py") else None
    if file is not None and not file.is_file():
        raise FileError(f"{label}: there is no file {file.absolute()}.")
    try:
        module = importlib.import_module(module_name) if file is None else load_python_file(file)
    except (ImportError, UserError) as error:
        # `load_python_file` wraps every error; an import that failed inside has its own way out.
        cause = error.__cause__ if isinstance(error, UserError) else error
        if not isinstance(cause, ImportError):
            raise
        way_out = (
            "Set the path of its file, ending in .py" if file is None else "Install it, or mend the file"
        )
        raise UserError(f"{label}: {_why_not_imported(cause, way_out)}") from error
    attribute: Any = getattr(module, function, None)
    if not callable(attribute):
        # Only what the module defines itself: its imports would hide the function that was meant.
        own_names = [
            key
            for key, value in vars(module).items()
            if getattr(value, "__module__", None) == module.__name__
        ]
        hint = did_you_mean(function, vars(module))
        raise UserError(
            f"{label}: {module_name} has no function {function!r}. {hint}It has: "
            f"{', '.join(own_names) or 'none'}."
        )
    return attribute, module


def load_class(setting: str, name: str) -> type:
    """Returns the class that a setting names; one of a file that was loaded already, and has not changed, is
    the same class again.

    Args:
      setting, name: as in `load_function`.

    Raises:
      FileError, UserError: as `load_function`; or the name is that of something else.
    """
    module_name, _, attribute = name.rpartition(":")
    file = Path(module_name).expanduser()
    loaded_module = _loaded.get((file.absolute(), source_hash(module_name))) if file.is_file() else None
    named_class: Any = getattr(loaded_module, attribute, None) or load_function(setting, name)[0]
    if not isinstance(named_class, type):
        raise UserError(f"{setting}={name!r} is a {type(named_class).__name__}, and must be a class.")
    return named_class


def class_name(kind: type) -> str:
    """Returns the name by which `load_class` finds a class: `path/to/file.py:Name`, relative to the working
    directory where the file is below it, or `module:Name`.

    Raises:
      UserError: the class is not at the top of its file.
    """
    # A class inside a function or another class, or of a script: no import finds it.
    if "." in kind.__qualname__ or kind.__module__ == "__main__":
        raise UserError(
            f"{kind.__module__}.{kind.__qualname__} has no name that another process finds it by. Define it "
            "at the top of a file."
        )
    if not kind.__module__.startswith(_PREFIX):
        return f"{kind.__module__}:{kind.__name__}"
    path = Path(str(sys.modules[kind.__module__].__file__)).absolute()
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{kind.__name__}"


def source_hash(module_name: str) -> str:
    """Returns a hash of the source that a name of `class_name` begins with: a file, or a module."""
    path = Path(module_name).expanduser()
    if not module_name.endswith(".py"):
        path = Path(str(importlib.import_module(module_name).__file__))
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()


def _why_not_imported(error: ImportError, way_out: str) -> str:
    if (error.name or "").partition(".")[0] == "jax":
        return (
            "its module imports jax, directly or indirectly, and the processes that plan the data do without "
            "jax. Put the function into a file of its own that does not need jax."
        )
    if isinstance(error, ModuleNotFoundError):
        return f"there is no module {error.name!r}. {way_out}."
    return f"its module cannot be imported ({error}). {way_out}."


def load_python_file(path: Path) -> types.ModuleType:
    """Loads a Python file outside the package; an exception in it becomes a UserError with file and line."""
    # Each load runs the file anew, under a name of its own: it may have changed.
    name = f"{_PREFIX}{path.stem}_{len(_loaded)}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    with located(path):
        # Before the file runs: the hash is of the source that is executed.
        digest = source_hash(str(path))
        # A class finds its file by the name of its module.
        sys.modules[name] = module
        spec.loader.exec_module(module)
    _loaded[path.absolute(), digest] = module
    return module


@contextlib.contextmanager
def located(path: Path) -> Iterator[None]:
    """Turns any exception from a user's file into a UserError with file and line, because the user can fix
    it.
    """
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        # Frames of the user's file alone: the last one is the line that they can mend.
        lines = [frame.lineno for frame in frames if Path(frame.filename).absolute() == path.absolute()]
        # A syntax error has no frame in the file: it was never run.
        if isinstance(error, SyntaxError):
            lines = [error.lineno]
        location = f"{path}:{lines[-1]}" if lines else f"{path}"
        raise UserError(f"{location}: {type(error).__name__}: {error}") from error
