"""A workdir that an older version left: tests/golden/old_run, six steps by commit 46a0ee9 with its step 3 kept."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jtrain.telemetry import metrics

ROOT = Path(__file__).parents[2]
OLD = ROOT / "tests" / "golden" / "old_run"

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
    "data.global_batch=4",
    "metrics.tensorboard=False",
    "profile.clocks=none",
)


def resumed(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """The command that made the run, in a copy of its folder; `more` are further arguments."""
    if not folder.exists():
        shutil.copytree(OLD, folder)
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


def steps(file: Path) -> dict[int, dict[str, object]]:
    return {line["step"]: line for line in metrics.read(file) if "loss_nats" in line}


def test_a_workdir_of_an_older_version_says_that_its_order_of_data_is_gone(tmp_path: Path) -> None:
    """Its batches cannot be made any more; its weights go on where that is said."""
    before = steps(OLD / "run" / metrics.FILE)
    assert sorted(before) == [1, 2, 3, 4, 5, 6]
    refused = resumed(tmp_path / "old", "--set", "precision.compute_dtype=float32")
    assert refused.returncode == 2
    assert "saved with version=2, but here it is 4" in refused.stderr
    assert "add --allow-change data" in refused.stderr
    assert "Traceback" not in refused.stderr
    done = resumed(tmp_path / "old", "--set", "precision.compute_dtype=float32", "--allow-change", "data")
    assert done.returncode == 0, done.stderr
    assert "resumed from step 3" in done.stdout
    assert "the data begins anew at step 3, as --allow-change data permits" in done.stdout
    after = steps(tmp_path / "old" / "run" / metrics.FILE)
    assert after[4]["batch_hash"] != before[4]["batch_hash"]
    again = resumed(tmp_path / "old", "--set", "precision.compute_dtype=float32", "--allow-change", "data")
    assert again.returncode == 0, again.stderr
    assert "resumed from step 6" in again.stdout
    assert "the data begins anew" not in again.stdout, "a restart script has the option in each attempt"
    assert "precision.compute_dtype: " in (tmp_path / "old" / "run" / "config.txt").read_text()


def test_another_precision_is_refused_and_said_where_it_is_allowed(tmp_path: Path) -> None:
    """Exit 2 with the option; with it the change is printed, and kept in config.txt and in the next checkpoint."""
    folder = tmp_path / "old"
    refused = resumed(folder, "--set", "precision.compute_dtype=bfloat16")
    assert refused.returncode == 2
    assert "precision.compute_dtype: 'float32' there, 'bfloat16' here" in refused.stderr
    assert "--allow-change precision" in refused.stderr
    both = ("--allow-change", "precision", "--allow-change", "data")
    allowed = resumed(folder, "--set", "precision.compute_dtype=bfloat16", *both)
    assert allowed.returncode == 0, allowed.stderr
    assert "changed from step 3 on, as --allow-change permits: precision.compute_dtype" in allowed.stdout
    remark = "# changed at step 3: precision.compute_dtype: 'float32' there, 'bfloat16' here\n"
    for file in (folder / "run" / "config.txt", folder / "run" / "checkpoints" / "6" / "config.txt"):
        assert file.read_text().endswith(remark), file


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:Thing", "no module nowhere"),
        ("mine.py:Missing", r"has no Missing. It has: Watch"),
        ("mine.py:Watch", "makes a str, but must make a jtrain.train.callbacks.Callback"),
        ("gone.py:Watch", "there is no file"),
        ("word", "must be module:name or path/to/file.py:name"),
    ],
)
def test_a_callback_that_cannot_be_made_is_refused(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name, with what there is."""
    from jtrain.errors import UserError
    from jtrain.train.callbacks import load_callbacks

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def Watch(): return 'text'\n")
    with pytest.raises(UserError, match=message):
        load_callbacks([name])
