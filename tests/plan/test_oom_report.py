"""A run that outgrows its memory says what lay in it and what would fit; the memory really is too small."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.processes import program

ROOT = Path(__file__).parents[2]


SMALL = (
    "model.num_layers=1",
    "model.d_model=64",
    "model.num_heads=2",
    "model.num_kv_heads=2",
    "model.d_ff=128",
)


def train(tmp_path: Path, limit_bytes: int, *sets: str) -> subprocess.CompletedProcess[str]:
    """`python -m jtrain.launch --config=tiny` in a process that may map so much memory: malloc fails above
    it.
    """
    command = program(__file__, "train_within", limit_bytes, "--config=tiny", f"--workdir={tmp_path / 'run'}")
    for one in (*SMALL, *sets):
        command += ["--set", one]
    # One device, not eight.
    alone = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    alone["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    )
    return subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sets", "named", "way"),
    (
        # The state does not fit: it fails while it is made.
        pytest.param(
            ("model.vocab_size=8000000", "optimizer.moment_dtype=bfloat16"),
            r"params\.embed_VD",
            r"layout\.\w+=",
            marks=pytest.mark.slow,
        ),
        # The state fits, the first step's activations do not.
        (
            ("data.global_batch=512", "data.seq_len=1024"),
            r"opt_state\.[mn]u\.layers\.\w+",
            r"--set layout\.microbatches=512",
        ),
    ),
    ids=("state", "step"),
)
def test_a_real_allocation_failure_is_explained(
    tmp_path: Path, sets: tuple[str, ...], named: str, way: str
) -> None:
    """Exit code 2, no traceback: what was asked for, the largest arrays by name, and settings that take
    less.
    """
    done = train(tmp_path, 3 * 2**30, *sets)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert re.search(r"error: out of memory: [A-Z_]+: .*Out of memory allocating \d+ bytes", done.stderr)
    assert re.search(named, done.stderr), done.stderr
    assert re.search(way, done.stderr), done.stderr
    assert re.search(r"By the plan, a step needs in addition, at its peak \(\w+\): .* GiB\.", done.stderr)
