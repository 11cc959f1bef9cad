"""Bugs planted one at a time into a copy of the packages: the quick tests find each of them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
KERNELS = "kernels/jtrain_kernels/"
OVERLAP = "tests/kernels/overlap/"
LIMIT_S = 150
"""Time limit of a test in the copy, longer than that of the processes that tests start there (`test_gpu_fabric.py`).

A bug that ends in a deadlock or an endless loop takes this long."""


class Bug(NamedTuple):
    """Replacement of `old`, which occurs once in `file`, by `new`; `test` finds it."""

    file: str
    old: str
    new: str
    test: str


FUSED = OVERLAP + "test_gpu_fabric.py::test_the_fused_kernels_give_the_product_although_senders_are_late"
ELSEWHERE = "tests/test_platform_dependent.py::test_an_accelerators_branch_computes_what_the_cpus_does"
IN_FLOAT64 = OVERLAP + "test_api.py::test_values_and_gradients_are_those_of_float64"

BUGS = {
    "schedule: no wait for what was sent": Bug(
        KERNELS + "overlap/schedule.py",
        'return place, [] if before is None else [Wait(place, "sent", before)]',
        "return place, []",
        OVERLAP + "test_schedule.py",
    ),
    "gpu: an output buffer reused one tile early": Bug(
        KERNELS + "overlap/mosaic_gpu/wgmma_tile.py",
        "plgpu.wait_smem_to_gmem(1, wait_read_only=True)",
        "plgpu.wait_smem_to_gmem(2, wait_read_only=True)",
        OVERLAP + "test_mosaic_gpu.py",
    ),
    "gpu: gathered dy without the rank's own rows": Bug(
        KERNELS + "overlap/mosaic_gpu/op.py",
        "plan, keep=True)",
        "plan)",
        OVERLAP + "test_gpu_fabric.py::test_the_gradients_of_the_fused_ops_are_those_of_float64",
    ),
    "gpu: rows used after 1 of 3 senders": Bug(
        KERNELS + "overlap/mosaic_gpu/kernel.py",
        "peers.wait(rows_here, (at.piece, at.row), SENDERS)",
        "peers.wait(rows_here, (at.piece, at.row), 1)",
        FUSED,
    ),
    "gpu: rows passed on after 1 of 3 senders": Bug(
        KERNELS + "overlap/mosaic_gpu/send_blocks.py",
        "peers.wait(rows_here, (piece, row), SENDERS)",
        "peers.wait(rows_here, (piece, row), 1)",
        FUSED,
    ),
    "gpu: landed sums used after 1 of 2 warpgroups": Bug(
        KERNELS + "overlap/mosaic_gpu/kernel.py",
        "(jobs[rank, at.turn, 4 + j], at.row, at.column), WARPGROUPS)",
        "(jobs[rank, at.turn, 4 + j], at.row, at.column), 1)",
        FUSED,
    ),
    "tokamax: a window one too wide": Bug(
        KERNELS + "attention/tokamax.py",
        "position_1L - mask.window + 1)",
        "position_1L - mask.window)",
        "tests/kernels/test_splash.py",
    ),
    "gpu: a copy to the rank itself": Bug(
        KERNELS + "overlap/mosaic_gpu/send_blocks.py",
        "peers.to_peer(copy_to, inbox, peer, call.program.offsets)",
        "copy_to(mine)",
        FUSED,
    ),
    # Other classes.
    "gpu: the counter of the wrong slot": Bug(
        KERNELS + "overlap/mosaic_gpu/kernel.py",
        "peers.signal(landed, (at.slot, at.row, at.column), at.peer)",
        "peers.signal(landed, (0 * at.slot, at.row, at.column), at.peer)",
        FUSED,
    ),
    "gpu: the first piece of a rank for all of its pieces": Bug(
        KERNELS + "overlap/mosaic_gpu/launch_params.py",
        "self.sizes.row(lax.rem(piece, each), row, each)",
        "self.sizes.row(0 * piece, row, each)",
        FUSED,
    ),
    "gpu: slots that overlap where there are several sequences": Bug(
        KERNELS + "overlap/mosaic_gpu/kernel.py",
        "(at.slot * sizes.rows + at.row, at.column), piece",
        "(at.slot * sizes.of_one + at.row, at.column), piece",
        FUSED,
    ),
    "ring: rows of the wrong rank in the second direction": Bug(
        KERNELS + "overlap/xla/lower_schedule.py",
        "(rank - turn * peer) % n * each + index, piece)",
        "(rank - turn) % n * each + index, piece)",
        IN_FLOAT64,
    ),
    "ring: a kernel's gradient from the last piece alone": Bug(
        KERNELS + "overlap/xla/op.py",
        "return dx, total + _kernel_part(rows_of(x_BRK, number, each), dy)",
        "return dx, _kernel_part(rows_of(x_BRK, number, each), dy)",
        IN_FLOAT64,
    ),
    "fp8: every rank scales its rows by its own amax": Bug(
        KERNELS + "overlap/fp8.py",
        "        amax = jax.lax.pmax(amax, plan.axis_name)",
        "        pass",
        OVERLAP + "test_fp8.py",
    ),
    "accelerators: a kernel's gradient rounded to bfloat16": Bug(
        KERNELS + "linear/api.py",
        "default=lambda x, dy: contract(x, dy, 0, 0, kernel_IO.dtype),",
        "default=lambda x, dy: contract(x, dy, 0, 0, x.dtype).astype(kernel_IO.dtype),",
        ELSEWHERE,
    ),
    "accelerators: rows exchanged from where they go to where they are": Bug(
        "jtrain/model/expert_dispatch.py",
        "jax.lax.ragged_all_to_all(x, out, first, count, place, coming,",
        "jax.lax.ragged_all_to_all(x, out, place, count, first, coming,",
        ELSEWHERE,
    ),
    "groups: the last row of a group counts to the group, and the first of the next as well": Bug(
        KERNELS + "grouped_matmul/blocked.py",
        "jnp.sum(self.end_X <= row)",
        "jnp.sum(self.end_X < row)",
        "tests/kernels/test_grouped_matmul.py",
    ),
    "context: gradients of keys that stay one device before their owner": Bug(
        KERNELS + "attention/ring.py",
        "    dk, dv = ring.send(dkv)  # back",
        "    dk, dv = dkv  # back",
        "tests/kernels/test_context_attention.py",
    ),
    "window: the first chunk of keys left out": Bug(
        KERNELS + "attention/pairs.py",
        "jnp.maximum(i * chunk - (window - 1), 0)",
        "jnp.maximum(i * chunk - (window - 2), 0)",
        "tests/kernels/test_attention_pairs.py",
    ),
}

pytestmark = pytest.mark.slow


def run(tree: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    """Runs quick tests of a copy until the first failure."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), str(tree / "kernels")])}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-o", f"faulthandler_timeout={LIMIT_S}", *tests]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy of the packages and their tests."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("jtrain", "kernels", "tests", "configs"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tree / name)
    return tree


def test_without_a_bug_the_tests_pass(tree: Path) -> None:
    """A failure below is due to the bug."""
    done = run(tree, *sorted({bug.test.partition("::")[0] for bug in BUGS.values()}))
    assert done.returncode == pytest.ExitCode.OK, done.stdout


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS.keys())
def test_the_quick_tests_find_it(bug: Bug, tree: Path) -> None:
    """A test fails, or ends at its time limit; it is not that none could be collected."""
    file = tree / bug.file
    text = file.read_text()
    assert text.count(bug.old) == 1, f"{bug.file} has changed: plant the bug anew"
    file.write_text(text.replace(bug.old, bug.new))
    try:
        done = run(tree, bug.test)
    finally:
        file.write_text(text)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout[-2000:]
    assert " failed" in done.stdout or "Timeout" in done.stderr, done.stdout[-2000:] + done.stderr[-2000:]
