"""Code of the user, named in a config: Python files, and functions as `module:name` or
`path/to/file.py:name`.
"""

import contextlib
import importlib
import importlib.util
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jtrain.errors import FileError, UserError, did_you_mean


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
    # The module is not put into sys.modules: each load runs the file anew.
    spec = importlib.util.spec_from_file_location(f"jtrain_config_{path.stem}", path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    with located(path):
        spec.loader.exec_module(module)
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
