"""A run that goes on with other data or in another precision: refused, and said where `--allow-change`
permits it.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jtrain.config import tree
from jtrain.config.load import load_config
from jtrain.config.run import build_run
from jtrain.errors import UserError
from jtrain.telemetry import metrics
from jtrain.train import attempt

ROOT = Path(__file__).parents[2]

SETS = (
    "num_steps=6",
    "data.path='text/*.txt'",
    "data.cache_dir=cache",
    "checkpoint.every_steps=3",
    "eval.every_steps=None",
    "data.eval_fraction=0",
    "model.num_layers=2",
    "model.d_model=32",
    "model.d_ff=32",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.head_dim=16",
    "data.seq_len=32",
    "data.global_batch=8",
    "metrics.tensorboard=False",
    "profile.clocks=none",
)


def launch(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Runs the same command in a folder; `more` are further arguments."""
    command = [sys.executable, "-m", "jtrain.launch", "--config=tiny", "--with", "debug", "--workdir", "run"]
    command += [part for text in SETS for part in ("--set", text)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    return subprocess.run(
        [*command, *more],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths, "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def train(folder: Path, *sets: str) -> int:
    """Trains in this process, on its eight devices, as the command does elsewhere."""
    config = load_config("tiny", ["debug"], [*SETS, "mesh.data=8", "data.engine=inline", *sets])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return attempt.train(build_run(config), workdir=Path("run"), config_text=tree.flat(config))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a run of six steps and its texts, of whose checkpoints that of step 3 is left."""
    folder = tmp_path_factory.mktemp("template")
    (folder / "text").mkdir()
    for number in range(10, 22):
        (folder / "text" / f"{number}.txt").write_text(f"The text of document {number}. " * 20)
    assert train(folder, "precision.compute_dtype=float32") == 0
    shutil.rmtree(folder / "run" / "checkpoints" / "6")
    return folder


@pytest.fixture
def folder(template: Path, tmp_path: Path) -> Path:
    """Returns a copy of the template for one test."""
    return shutil.copytree(template, tmp_path / "copy")


def steps(file: Path) -> dict[int, dict[str, object]]:
    return {line["step"]: line for line in metrics.read(file) if "loss_nats" in line}


@pytest.mark.slow
def test_weights_go_on_with_other_data_where_that_is_said(folder: Path) -> None:
    """A file that sorts before those that were read changes their order; the option is harmless once it was
    used.
    """
    float32 = ("--set", "precision.compute_dtype=float32")
    before = steps(folder / "run" / metrics.FILE)
    assert sorted(before) == [1, 2, 3, 4, 5, 6]
    (folder / "text" / "00.txt").write_text("One more document. " * 40)
    refused = launch(folder, *float32)
    assert refused.returncode == 2
    assert "add --allow-change data" in refused.stderr
    assert "Traceback" not in refused.stderr
    done = launch(folder, *float32, "--allow-change", "data")
    assert done.returncode == 0, done.stderr
    assert "resumed from step 3" in done.stdout
    assert "the data begins anew at step 3, as --allow-change data permits" in done.stdout
    after = steps(folder / "run" / metrics.FILE)
    assert after[4]["batch_hash"] != before[4]["batch_hash"]
    again = launch(folder, *float32, "--allow-change", "data")
    assert again.returncode == 0, again.stderr
    assert "resumed from step 6" in again.stdout
    assert "the data begins anew" not in again.stdout, "a restart script has the option in each attempt"
    assert "precision.compute_dtype: " in (folder / "run" / "config.txt").read_text()


@pytest.mark.slow
def test_another_precision_is_refused_and_said_where_it_is_allowed(folder: Path) -> None:
    """The refusal names the option; with it the change is printed, and kept in config.txt and in the next
    checkpoint.
    """
    with pytest.raises(UserError, match=r"'float32' there, 'bfloat16' here(?s:.*)--allow-change precision"):
        train(folder, "precision.compute_dtype=bfloat16")
    allowed = launch(folder, "--set", "precision.compute_dtype=bfloat16", "--allow-change", "precision")
    assert allowed.returncode == 0, allowed.stderr
    assert "changed from step 3 on, as --allow-change permits: precision.compute_dtype" in allowed.stdout
    remark = "# changed at step 3: precision.compute_dtype: 'float32' there, 'bfloat16' here\n"
    for file in (folder / "run" / "config.txt", folder / "run" / "checkpoints" / "6" / "config.txt"):
        assert file.read_text().endswith(remark), file
