"""The page `docs/one_file.md`: its blocks are a program, which reads, starts and learns as jtrain does."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.config.load import load_config
from jtrain.config.run import Run, build_run, build_run_optimizer, run_layout
from jtrain.data import open_dataset, put_batch
from jtrain.layout.constants import IGNORE
from jtrain.layout.mesh import make_mesh
from jtrain.model.param import init_params
from jtrain.step.state import init_state
from jtrain.step.train_step import make_eval_step, make_train_step
from jtrain.telemetry import metrics

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "one_file.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
PROGRAM = "\n\n".join(BLOCKS)

STEPS, ROWS = 5, 4
FIELDS = {
    "num_steps": STEPS,
    "data.global_batch": ROWS,
    "data.engine": "inline",
    "precision.compute_dtype": "float32",
    "metrics.log_every_steps": 1,
}
"""Fields of `tiny` for the short runs below."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("one_file") / "one_file.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture(scope="module")
def one_file(program: Path) -> ModuleType:
    """The program as a module."""
    module = ModuleType("one_file")
    exec(compile(PROGRAM, str(program), "exec"), module.__dict__)
    return module


def tiny(*sets: str) -> Run:
    """The run of `tiny` with some fields set."""
    return build_run(load_config("tiny", [], sets))


def test_the_program_is_short_and_imports_nothing_of_jtrain() -> None:
    assert len(PROGRAM.splitlines()) <= 300
    imported = {
        alias.name if isinstance(node, ast.Import) else str(node.module)
        for node in ast.walk(ast.parse(PROGRAM))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    third_party = {name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names}
    assert third_party == {"jax", "jax.numpy", "numpy"}


def test_each_block_follows_a_text_that_names_the_file_that_does_it_for_real() -> None:
    """`tests/test_docs.py` checks that every file that a page names is there."""
    _, *texts = re.split(r"^```python\n.*?^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    *texts, end = texts
    assert end.strip() == ""
    assert len(texts) == len(BLOCKS) - 1
    assert [text for text in texts if not re.search(r"`(jtrain|kernels)/[\w/]+\.py`", text)] == []


def test_the_command_of_the_page_extracts_the_program(tmp_path: Path) -> None:
    """The line that a reader types gives the same program, blank lines aside."""
    (command,) = re.findall(r"^sed .*$", PAGE, re.MULTILINE)
    command = command.replace("docs/one_file.md", str(ROOT / "docs" / "one_file.md"))
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    extracted = (tmp_path / "one_file.py").read_text()
    assert ast.dump(ast.parse(extracted)) == ast.dump(ast.parse(PROGRAM))


def test_the_program_starts_from_the_same_weights(one_file: ModuleType) -> None:
    """Bit for bit, by path."""
    run = tiny()
    expected = jax.jit(lambda: init_params(run.model.param_infos(), seed=run.seed, dtype="float32"))()
    weights: dict[str, Any] = one_file.init_params()
    by_path = {
        ".".join(str(key.key) for key in path): value for path, value in jax.tree.leaves_with_path(expected)
    }
    assert by_path.keys() == weights.keys()
    for path, value in by_path.items():
        np.testing.assert_array_equal(weights[path], value, err_msg=path)


def test_the_program_reads_the_same_batches(one_file: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batches have the same rows, in any order; some rows hold several documents, some one."""
    run = tiny("data.engine=inline", "data.global_batch=16")
    handed_over: list[Any] = []
    monkeypatch.setattr(one_file, "train_step", lambda *state, **_: handed_over.append(state[3]) or state[:3])
    monkeypatch.setattr(one_file, "evaluate", lambda *_: 0.0)
    one_file.main(steps=8, rows=16, dtype="float32")
    batches = open_dataset(run.data, seed=run.seed).train_batches(inline=True)
    segments = set()
    for arrays in handed_over:
        batch = next(batches)
        expected = np.stack([batch.token_BL, batch.target_BL, batch.position_BL, batch.segment_BL], axis=1)
        rows = np.stack(arrays, axis=1)
        assert sorted(row.tobytes() for row in rows) == sorted(row.tobytes() for row in expected)
        segments |= set(rows[:, 3].max(axis=1).tolist())
    batches.close()
    assert {1, 2} <= segments


def losses_of(output: str) -> list[float]:
    """Losses of the steps and of the evaluation, as the program prints them."""
    losses = [float(loss) for loss in re.findall(r"loss (\S+) nats", output)]
    assert len(losses) == STEPS + 1, output
    assert losses[0] - losses[-1] > 1, "the loss must move"
    return losses


@pytest.mark.slow
def test_the_program_has_the_losses_of_jtrain(
    one_file: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each step and the evaluation, in float32, where only the order of additions differs.

    Such sums differ by 1e-7 of their value. Five updates at the peak rate make that 2e-6: the bound is 1e-5.
    """
    with jax.numpy_rank_promotion("allow"):  # a reader's JAX; conftest.py forbids it
        one_file.main(steps=STEPS, rows=ROWS, dtype="float32")
    losses = losses_of(capsys.readouterr().out)

    run = tiny("mesh.data=1", *(f"{path}={value}" for path, value in FIELDS.items()))
    mesh, layout, optimizer = (
        make_mesh(run.mesh, jax.devices()[:1]),
        run_layout(run),
        build_run_optimizer(run),
    )
    step, evaluate = (
        make_train_step(run.model, optimizer, layout, mesh),
        make_eval_step(run.model, layout, mesh),
    )
    state, dataset, expected = (
        init_state(layout, optimizer, mesh, seed=run.seed),
        open_dataset(run.data, seed=run.seed),
        [],
    )
    with dataset.train_batches(inline=True) as batches:
        for _ in range(STEPS):
            state, values = step(state, put_batch(next(batches), mesh))
            expected.append(float(values["loss_nats"]))
    held_out = [held.batch for held in dataset.held_out().batches()]
    nats = sum(float(jnp.sum(evaluate(state.params, put_batch(batch, mesh)))) for batch in held_out)
    expected.append(nats / sum(int((batch.target_BL != IGNORE).sum()) for batch in held_out))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def python(*arguments: str, cwd: Path) -> str:
    """Output of a process with one device, as a reader has."""
    environment = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_both_commands_have_the_same_losses(program: Path, tmp_path: Path) -> None:
    """The same claim for the two programs as they are started."""
    arguments = ["--steps", str(STEPS), "--rows", str(ROWS), "--dtype", "float32"]
    losses = losses_of(python(str(program), *arguments, cwd=tmp_path))
    sets = [f"--set={path}={value}" for path, value in FIELDS.items()]
    python("-m", "jtrain.launch", "--config=tiny", *sets, f"--workdir={tmp_path / 'run'}", cwd=tmp_path)
    lines = metrics.read(tmp_path / "run" / metrics.FILE)
    expected = [line["loss_nats"] for line in lines if "loss_nats" in line]
    expected += [line["eval_loss_nats"] for line in lines if "eval_loss_nats" in line]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
