"""Classes of a user's own in configs: the files of docs/own_parts.md, read as the page has them."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jtrain.checkpoint import Checkpoints, CheckpointSpec
from jtrain.config import tree
from jtrain.config.load import load_config
from jtrain.config.resume import check_same_run
from jtrain.config.run import Run, build_run
from jtrain.errors import UserError
from jtrain.hf.mapping import tensors_of
from jtrain.layout.dims import Batch, ParamInfo
from jtrain.model.kv_cache_decode import empty_cache, extend
from jtrain.optim import build, state_bytes
from jtrain.runtime.user_code import load_function
from tests import pages
from tests.weights import draw_weights

PAGE = Path(__file__).parents[2] / "docs" / "own_parts.md"
CONFIG = "my_parts.py:calm"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files of the page."""
    for block in pages.blocks(PAGE.read_text()):
        if block.language == "python":
            (tmp_path / block.title).write_text(block.text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_config_keeps_the_names_of_classes_and_a_hash_of_their_source(folder: Path) -> None:
    """And is read back: the same text, the same classes, with their own fields."""
    text = tree.flat(load_config(CONFIG, sets=["model.price=0.5", "model.pattern.0.mixer.keep=0.75"]))
    assert "model: Transformer = my_parts.py:CalmModel\n" in text
    assert "model.pattern.0.mixer: MixerSpec | None = my_parts.py:DecaySpec\n" in text
    assert re.search(r"^code\.my_parts\.py: str = '[0-9a-f]{16}'$", text, re.MULTILINE)
    read = tree.read(Run, text)
    assert tree.flat(read) == text
    model = build_run(read).model
    assert type(model).__name__ == "CalmModel"
    assert getattr(model, "price", None) == 0.5
    assert getattr(model.blocks[0].mixer, "keep", None) == 0.75


def test_a_pattern_of_the_shipped_parts_is_read_back() -> None:
    """Mixers are found by their names below `MixerSpec`, whichever module they are in."""
    text = tree.flat(load_config("olmo3_7b"))
    assert "model.pattern.0.mixer: MixerSpec | None = AttentionSpec\n" in text
    assert tree.flat(tree.read(Run, text)) == text


def test_a_source_that_has_changed_makes_another_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resume is refused until it is allowed by name; who only reads is warned."""
    text = tree.flat(load_config(CONFIG))
    (folder / "config.txt").write_text(text)
    assert check_same_run(folder, text) == []
    source = folder / "my_parts.py"
    source.write_text(source.read_text() + "\n# another line\n")
    changed = tree.flat(load_config(CONFIG))
    with pytest.raises(UserError, match=r"(?s)code\.my_parts\.py: .* there, .*--allow-change code to go on"):
        check_same_run(folder, changed)
    assert len(check_same_run(folder, changed, allow=["code"])) == 1
    tree.read(Run, text)
    assert "WARNING: my_parts.py has changed since this config was written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model.pattern.0.mixer=my_parts.py:Decay", "Decay is no MixerSpec. Make it a subclass"),
        (
            "model.pattern.0.mixer=my_parts.py:DecaySpek",
            "has no function 'DecaySpek'. Did you mean DecaySpec",
        ),
        ("model.pattern.0.mixer=nowhere.py:DecaySpec", "there is no file"),
        ("model=my_parts.py:calm", "is a function, and must be a class"),
    ],
)
def test_a_name_of_another_thing_is_refused(text: str, message: str, folder: Path) -> None:
    """With the field, the name and what is there."""
    with pytest.raises(UserError, match=re.escape(message)):
        load_config(CONFIG, sets=[text])


def test_a_class_may_be_set_on_the_command_line(folder: Path) -> None:
    """The fields that both classes have stay as they were."""
    run = load_config("tiny", sets=["model.d_ff=96", "model=my_parts.py:CalmModel", "model.price=2"])
    assert type(build_run(run).model).__name__ == "CalmModel"
    assert (run.model.d_ff, run.model.price) == (96, 2.0)


@pytest.mark.slow
def test_the_mixer_of_the_page_continues_as_it_computes_whole_rows(folder: Path) -> None:
    """Tokens one by one through its cache give the logits of the row, and documents do not mix."""
    model = build_run(load_config(CONFIG)).model
    params = draw_weights(model.param_infos(), noise=0.0)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (1, 12), np.int32))
    ones, position = jnp.ones((1, 12), jnp.int32), jnp.arange(12)[None]
    want = np.asarray(model.logits(params, Batch(tokens, tokens, position, ones)))
    cache = empty_cache(model, batch=1, max_len=12, dtype="float32")
    for column in range(12):
        got, cache = extend(model, params, tokens[:, column : column + 1], jnp.int32(1), cache)
        np.testing.assert_allclose(np.asarray(got), want[:, column], rtol=1e-4, atol=1e-5)
    # Two documents in one row: the second is what it is alone.
    segment = jnp.where(jnp.arange(12) < 5, 1, 2)[None].astype(jnp.int32)
    packed = np.asarray(model.logits(params, Batch(tokens, tokens, position, segment)))
    alone = np.asarray(
        model.logits(params, Batch(tokens[:, 5:], tokens[:, 5:], position[:, :7], ones[:, :7]))
    )
    np.testing.assert_allclose(packed[:, 5:], alone, rtol=1e-4, atol=1e-5)
    assert np.abs(packed[:, 5] - want[:, 5]).max() > 1e-2


def test_the_table_of_names_of_the_page_has_every_parameter(folder: Path) -> None:
    """A table that lacks one is refused with its path."""
    model = build_run(load_config(CONFIG)).model
    family = load_function("--family", "my_names.py:names")[0]()
    assert list(tensors_of(model, family))[:2] == ["embed.weight", "layers.0.decay.weight"]
    names = {path: name for path, name in family.names.items() if path != "decay.in_DF"}
    with pytest.raises(UserError, match=r"calm has no name for the parameter decay\.in_DF\. Add it"):
        tensors_of(model, dataclasses.replace(family, names=names))


def test_the_optimizer_and_the_schedule_of_the_page_are_their_formulas(folder: Path) -> None:
    """Three updates of Lion with weight decay, in float64; the state is one moment, and the planner counts it so."""
    sets = ["optimizer=my_training.py:Lion", "optimizer.schedule=my_training.py:InverseRoot"]
    run = build_run(load_config("tiny", sets=[*sets, "num_steps=9", "optimizer.warmup_steps=2"]))
    info = ParamInfo("kernel_DF", (3, 5), "DF", "normal", 0.02)
    optimizer = build(run.optimizer, num_steps=9, params={"kernel_DF": info})
    rng = np.random.default_rng(0)
    params = {"kernel_DF": jnp.asarray(rng.standard_normal((3, 5)), jnp.float32)}
    state, want, mean = optimizer.init(params), np.float64(params["kernel_DF"]), np.zeros((3, 5))
    assert [leaf.shape for leaf in jax.tree.leaves(state)] == [(3, 5)]
    assert state_bytes(run.optimizer, info, info.size) == 4 * 15
    for step in range(3):
        gradient = rng.standard_normal((3, 5))
        grads = {"kernel_DF": jnp.asarray(gradient, jnp.float32)}
        params, state, values = optimizer.update(grads, state, params, step)
        rate = 3e-3 * (min((step + 1) / 2, 1) if step < 2 else (2 / (step + 1)) ** 0.5)
        np.testing.assert_allclose(values["learning_rate"], rate, rtol=1e-6)
        clipped = gradient * min(1.0, 1.0 / float(np.linalg.norm(gradient)))
        direction = np.sign(0.9 * mean + 0.1 * clipped)
        mean = 0.95 * mean + 0.05 * clipped
        want = want - rate * (direction + 0.1 * want)
        np.testing.assert_allclose(params["kernel_DF"], want, atol=1e-6)
        np.testing.assert_allclose(jax.tree.leaves(state)[0], mean, atol=1e-6)


SETS = ["num_steps=6", "checkpoint.every_steps=2", "eval.every_steps=3", "data.global_batch=8"]
SETS += ["data.seq_len=64", "precision.compute_dtype=float32", "metrics.log_every_steps=1"]


def command(verb: str, *words: str) -> list[str]:
    return [sys.executable, "-m", f"jtrain.{verb}", *words]


def launch(folder: Path, workdir: str, *words: str) -> list[str]:
    sets = [word for text in SETS for word in ("--set", text)]
    return command("launch", f"--config={CONFIG}", "--workdir", workdir, "--device", "cpu", *sets, *words)


def checked(words: list[str]) -> str:
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_own_parts_train_resume_after_a_kill_generate_and_export(devices: int, folder: Path) -> None:
    """On one device and on eight under ZeRO 3, with the weights of a run that was not killed, bit for bit."""
    words = ["--emulate-devices", str(devices), "--set", f"layout.zero_stage={3 if devices > 1 else 0}"]
    checked(launch(folder, "whole", *words))
    process = subprocess.Popen(launch(folder, "killed", *words), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not os.path.exists("killed/checkpoints/2/manifest.json"):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    checked(launch(folder, "killed", *words))
    assert checked(command("generate", "--workdir", "killed", "--prompt", "def ", "--max-tokens", "4"))
    export = ["--family", "my_names.py:names"]
    for workdir in ("whole", "killed"):
        checked(command("hf", "export", "--workdir", workdir, "--out", f"{workdir}.out", *export))
    want, got = (load_file(folder / f"{name}.out" / "model.safetensors") for name in ("whole", "killed"))
    assert "layers.0.decay.weight" in want
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    with Checkpoints(folder / "killed", CheckpointSpec()) as checkpoints:
        assert checkpoints.latest_step() == 6
    assert np.isfinite(jax.tree.leaves(want)[0]).all()
