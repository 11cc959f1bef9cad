"""A training run whose folder gains files between two starts: real processes, batches compared by their
hashes.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jtrain.telemetry import metrics
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
ENVIRON = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
SETS = (
    "num_steps=12",
    "data.path='text'",
    "data.cache_dir=cache",
    "data.eval_fraction=0.2",
    "data.seq_len=32",
    "data.global_batch=4",
    "checkpoint.every_steps=4",
    "checkpoint.keep_last=9",
    "eval.every_steps=4",
    "model.num_layers=2",
    "model.d_model=32",
    "model.d_ff=32",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.head_dim=16",
    "metrics.tensorboard=False",
    "profile.clocks=none",
)


def add_file(folder: Path, number: int) -> None:
    (folder / "text").mkdir(exist_ok=True)
    lines = [json.dumps({"text": f"{number} {i} " + "abcdefgh" * (number + i)}) + "\n" for i in range(20)]
    (folder / "text" / f"{number}.jsonl").write_text("".join(lines))


def command(devices: int, workdir: str) -> list[str]:
    given = [part for text in (*SETS, f"mesh.data={devices}") for part in ("--set", text)]
    return [
        sys.executable,
        "-m",
        "jtrain.launch",
        "--config=tiny",
        "--with",
        "debug",
        "--workdir",
        workdir,
        *given,
    ]


def finished(folders: list[Path], *, workdir: str, devices: int) -> list[tuple[int, str]]:
    """Runs a process in each folder, which share the run; returns their exit codes and what they printed."""
    environ = ENVIRON | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices // len(folders)}"}
    if len(folders) > 1:
        environ["JTRAIN_COORDINATOR"] = f"localhost:{free_port()}"
        environ["JTRAIN_NUM_PROCESSES"] = str(len(folders))
    processes = [
        subprocess.Popen(
            command(devices, workdir),
            cwd=folder,
            env=environ | ({"JTRAIN_PROCESS_ID": str(number)} if len(folders) > 1 else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, folder in enumerate(folders)
    ]
    said = [process.communicate(timeout=240)[0] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]


def trained(folder: Path, *, from_step: int, devices: int = 1, processes: int = 1) -> str:
    """Trains to the end, from a checkpoint as if the run had been killed after it; returns what was
    printed.
    """
    for step in (4, 8, 12):
        if step > from_step:
            shutil.rmtree(folder / "run" / "checkpoints" / str(step), ignore_errors=True)
    done = finished([folder] * processes, workdir="run", devices=devices)
    assert [code for code, _ in done] == [0] * processes, done
    return done[0][1]


@pytest.mark.slow
def test_processes_that_see_other_files_do_not_start(tmp_path: Path) -> None:
    """A file that arrives while the hosts start: without the check they would train on different plans until
    a save.
    """
    folders = [tmp_path / "0", tmp_path / "1"]
    for files, folder in zip((2, 3), folders, strict=True):
        folder.mkdir()
        for number in range(files):
            add_file(folder, number)
    for code, said in finished(folders, workdir=str(tmp_path / "run"), devices=2):
        assert code == 2, said
        assert (
            "the processes of this run find different files at data.path='text'. Give every host the same"
            in said
        )


def hashes(folder: Path) -> dict[int, str]:
    return {
        line["step"]: line["batch_hash"]
        for line in metrics.read(folder / "run" / metrics.FILE)
        if "loss_nats" in line
    }


def evaluated(folder: Path) -> dict[int, int]:
    return {
        line["step"]: line["eval_tokens"]
        for line in metrics.read(folder / "run" / metrics.FILE)
        if "eval_tokens" in line
    }


@pytest.mark.slow
def test_a_run_goes_on_with_files_that_it_has_gained(tmp_path: Path) -> None:
    for number in range(3):
        add_file(tmp_path, number)
    assert "gained" not in trained(tmp_path, from_step=0)
    alone, tokens = hashes(tmp_path), evaluated(tmp_path)

    add_file(tmp_path, 3)
    said = trained(tmp_path, from_step=4)
    assert "step 4: data has gained 1 file (20 documents, " in said
    assert "step 4: data has gained 1 file" in (tmp_path / "run" / "data.log").read_text()
    joined = hashes(tmp_path)
    assert {step for step in alone if alone[step] != joined[step]} == set(range(5, 13))
    assert evaluated(tmp_path) == tokens, "the same held-out documents"

    said = trained(tmp_path, from_step=8, devices=2, processes=2)
    assert "gained" not in said
    assert hashes(tmp_path) == joined, "killed, and resumed as two processes that share the reading"

    add_file(tmp_path, 4)
    assert "step 8: data has gained 1 file" in trained(tmp_path, from_step=8, devices=2)
    assert {step for step in joined if joined[step] != hashes(tmp_path)[step]} == set(range(9, 13))
