from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jtrain.errors import FileError
from jtrain.runtime.run_files import full_disk_named, versions, write_run_files


def test_a_workdir_that_cannot_be_written_to_names_the_option(tmp_path: Path) -> None:
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("data",))
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "run.json.tmp").symlink_to("/dev/full")
    for folder, why in (
        ("file", "File exists"),
        ("file/run", "Not a directory"),
        ("full", "No space left on device"),
    ):
        with pytest.raises(
            FileError, match=rf"--workdir .*{folder} cannot be written to \({why}\)\. .*set --workdir"
        ):
            write_run_files(tmp_path / folder, "seed: int = 0\n", mesh, num_processes=1, plan="")
    with pytest.raises(FileError, match=r"--workdir /proc/nowhere cannot be written to \(No such file"):
        write_run_files(Path("/proc/nowhere"), "", mesh, num_processes=1, plan="")
    write_run_files(tmp_path / "other", "seed: int = 0\n", mesh, num_processes=1, plan="")
    assert (tmp_path / "other" / "config.txt").read_text() == "seed: int = 0\n"


def test_a_disk_that_fills_up_during_a_run_names_the_workdir(tmp_path: Path) -> None:
    with (
        pytest.raises(
            FileError, match=rf"--workdir {tmp_path} cannot be written to \(No space left on device\)"
        ),
        full_disk_named(tmp_path),
        open("/dev/full", "wb", buffering=0) as file,
    ):
        file.write(b"x")


def test_other_errors_of_a_run_are_not_of_its_disk(tmp_path: Path) -> None:
    for error in (OSError(5, "Input/output error"), FileError("the data is gone"), ValueError("a bug")):
        with pytest.raises(type(error)) as found, full_disk_named(tmp_path):
            raise error
        assert found.value is error


def test_what_is_not_installed_has_no_version() -> None:
    """A checkout on a machine with little more than JAX runs without an error: jtrain itself is not installed
    there.
    """
    assert versions(["numpy", "no-such-distribution"]) == {
        "numpy": np.__version__,
        "no-such-distribution": None,
    }
