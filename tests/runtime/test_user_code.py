"""Functions that a config names."""

from pathlib import Path

import pytest

from jtrain.errors import FileError, UserError
from jtrain.runtime.user_code import load_function


def test_a_function_is_found_by_its_module_or_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_for_user_code.py").write_text("def twice(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("mine_for_user_code:twice", f"{tmp_path}/mine_for_user_code.py:twice"):
        function, module = load_function("callbacks", name)
        assert function(21) == 42
        assert Path(str(module.__file__)).name == "mine_for_user_code.py"


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("twice", UserError, r"callbacks='twice' must be 'module:name' or 'path/to/file\.py:name'"),
        (
            "no_such_module_here:twice",
            UserError,
            r"there is no module 'no_such_module_here'\. Set the path",
        ),
        ("other.py:twice", FileError, r"there is no file .*other\.py"),
        (
            "mine.py:twise",
            UserError,
            r"mine\.py has no function 'twise'\. Did you mean twice\? It has: twice\.",
        ),
        ("broken.py:twice", UserError, r"broken\.py:1: ZeroDivisionError: division by zero"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: type[Exception], message: str
) -> None:
    (tmp_path / "mine.py").write_text("def twice(x):\n    return 2 * x\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        load_function("callbacks", name)
