"""`python -m jtrain.hf import`: streams, goes on after a kill, divides its work, and names bad weights."""

import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jtrain.checkpoint import Checkpoints, CheckpointSpec
from jtrain.cli.hf import main
from jtrain.config.resume import open_checkpoint
from jtrain.config.trained_params import read_params
from jtrain.hf.mapping import to_hf
from jtrain.hf.model_config import config_from_model
from jtrain.model.param import map_params
from jtrain.model.transformer import Transformer
from tests.data.sources.object_store import hf_store, s3_store

SIZES: dict[str, Any] = dict(
    num_layers=3, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=48, vocab_size=256
)


def write_model(folder: Path, sizes: dict[str, Any], *, shards: int = 3, dtype: str = "float32") -> None:
    """A Llama with drawn weights as others publish it, in several files with an index."""
    model = Transformer(**sizes)
    rng = np.random.default_rng(0)
    params = map_params(lambda info: rng.standard_normal(info.shape, np.float32), model.param_infos())
    folder.mkdir(parents=True)
    config = config_from_model(model, dtype=dtype, max_seq_len=64, begin_id=0, end_id=0)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = list(to_hf(params, model, dtype=dtype))
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        held = dict(tensors[shard::shards])
        save_file(held, folder / name)
        weight_map |= dict.fromkeys(held, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def options(folder: Path, sizes: dict[str, Any], **more: Any) -> list[str]:
    text = folder / "text.txt"
    text.write_text("All work and no play makes Jack a dull boy.\n" * 200)
    sets = {f"model.{key}": value for key, value in sizes.items()}
    sets |= {"data.path": text, "data.seq_len": 32, "data.global_batch": 4, "data.eval_fraction": 0.0}
    sets |= {"data.text_piece_bytes": 512, "eval.every_steps": None, "model.tie_embeddings": False}
    sets |= {key.replace("__", "."): value for key, value in more.items()}
    return ["--config=tiny", *(word for key, value in sets.items() for word in ("--set", f"{key}={value}"))]


@pytest.fixture
def run_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Imports `theirs` to `run`; keywords set fields of the config."""
    monkeypatch.setenv("XLA_FLAGS", "")  # the verb adds to it
    write_model(tmp_path / "theirs", SIZES)

    def run(*words: str, source: str | None = None, workdir: str = "run", **sets: Any) -> int:
        command = ["import", "--from", source or str(tmp_path / "theirs"), "--workdir"]
        return main([*command, str(tmp_path / workdir), *options(tmp_path, SIZES, **sets), *words])

    return run


def weights(folder: Path) -> dict[str, np.ndarray]:
    return {
        name: value
        for path in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(path).items()
    }


def exported(workdir: Path) -> dict[str, np.ndarray]:
    out = workdir.with_name(f"{workdir.name}.out")
    assert main(["export", "--workdir", str(workdir), "--out", str(out)]) == 0
    return weights(out)


def same(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert sorted(got) == sorted(want)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
def test_the_first_state_of_an_optimizer_takes_no_disk(
    tmp_path: Path, run_import: Callable[..., int]
) -> None:
    """Zeros have no files: the workdir holds the parameters once, where Adam's moments would be two more.

    The training that follows restores them as zeros, and its losses are those of the weights.
    """
    assert run_import(num_steps=2) == 0
    size = sum(array.nbytes for array in weights(tmp_path / "theirs").values())
    assert size < disk_bytes(tmp_path / "run") < 1.6 * size
    same(exported(tmp_path / "run"), weights(tmp_path / "theirs"))
    command = [sys.executable, "-m", "jtrain.launch", *options(tmp_path, SIZES, num_steps=2)]
    command += ["--workdir", str(tmp_path / "run"), "--device", "cpu"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with Checkpoints(tmp_path / "run", CheckpointSpec()) as checkpoints:
        assert checkpoints.latest_step() == 2


def test_master_weights_are_the_files_own(tmp_path: Path, run_import: Callable[..., int]) -> None:
    """Parameters in bfloat16 are rounded, the optimizer's float32 copy is not."""
    assert run_import(precision__param_dtype="bfloat16", optimizer__master_dtype="float32") == 0
    with Checkpoints(tmp_path / "run", CheckpointSpec()) as checkpoints:
        step, run = open_checkpoint(checkpoints, None)
        params = read_params(checkpoints, step, run, lambda _: "float32")
    table = weights(tmp_path / "theirs")["model.embed_tokens.weight"]
    rounded = table.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(params["embed_VD"]), rounded)
    assert not np.array_equal(rounded, table)
    master = tmp_path / "run" / "checkpoints" / "0" / "state" / "opt_state.master.embed_VD" / "c.0.0"
    np.testing.assert_array_equal(np.fromfile(master, np.float32).reshape(table.shape), table)


def test_scales_of_8_bit_matmuls_follow_from_the_weights(
    tmp_path: Path, run_import: Callable[..., int]
) -> None:
    """The history of each weight begins with its largest absolute value, layer by layer."""
    assert run_import(precision__matmul_dtype="fp8_delayed") == 0
    (folder,) = (tmp_path / "run" / "checkpoints" / "0" / "state").glob("scaling*mlp*up_DF")
    history = np.fromfile(folder / "c.0.0.0", np.float32).reshape(3, 3, -1)
    tensors = weights(tmp_path / "theirs")
    want = [np.abs(tensors[f"model.layers.{y}.mlp.up_proj.weight"]).max() for y in range(3)]
    np.testing.assert_array_equal(history[:, 1].max(axis=-1), want)


def test_several_processes_write_a_share_each(tmp_path: Path, run_import: Callable[..., int]) -> None:
    """Three processes at once: the last one completes the workdir, whose bits are those of one process."""
    command = [sys.executable, "-m", "jtrain.hf", "import", "--from", str(tmp_path / "theirs")]
    command += ["--workdir", str(tmp_path / "run"), *options(tmp_path, SIZES)]
    processes = [
        subprocess.Popen([*command, "--share", f"{share}/3"], stdout=subprocess.PIPE, text=True)
        for share in range(3)
    ]
    said = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sum("Train on from it" in text for text in said) == 1
    assert sum("files are left for others" in text for text in said) == 2
    same(exported(tmp_path / "run"), weights(tmp_path / "theirs"))
    assert not (tmp_path / "run.importing").exists()


LARGE: dict[str, Any] = dict(
    num_layers=12, d_model=1024, num_heads=8, num_kv_heads=8, head_dim=128, d_ff=4096, vocab_size=1024
)
"""205 million parameters: 410 MB in bfloat16, 819 MB in float32."""


def write_random(folder: Path) -> None:
    """Random bytes that are finite numbers, in four files of bfloat16."""
    model, rng = Transformer(**LARGE), np.random.default_rng(0)
    folder.mkdir(parents=True)
    config = config_from_model(model, dtype="bfloat16", max_seq_len=64, begin_id=0, end_id=0)
    (folder / "config.json").write_text(json.dumps(config))
    from jtrain.hf.mapping import tensors_of

    names, weight_map = list(tensors_of(model).items()), dict[str, str]()
    for shard in range(4):
        held = {
            name: (rng.integers(0, 2**16, parts[0].shape, np.uint16) & 0xBFFF).view(ml_dtypes.bfloat16)
            for name, parts in names[shard::4]
        }
        file = f"model-{shard + 1:05}-of-00004.safetensors"
        save_file(held, folder / file)
        weight_map |= dict.fromkeys(held, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


PEAK = """
import resource, sys
from jtrain.cli.hf import main
code = main(sys.argv[1:])
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
sys.exit(code)
"""


def peak_bytes(source: Path, workdir: Path, sizes: dict[str, Any]) -> int:
    """Largest memory of an import in a process of its own."""
    words = ["import", "--from", str(source), "--workdir", str(workdir), *options(workdir.parent, sizes)]
    done = subprocess.run([sys.executable, "-c", PEAK, *words], check=True, capture_output=True, text=True)
    return int(done.stdout.rpartition("peak ")[2]) * 1024


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """410 MB of weights take at most 400 MB more than a model of some kilobytes: four threads, each with a
    chunk of 64 MiB or less, where the whole state is 2.5 GB.
    """
    write_model(tmp_path / "small", SIZES)
    write_random(tmp_path / "large")
    above = peak_bytes(tmp_path / "large", tmp_path / "run", LARGE) - peak_bytes(
        tmp_path / "small", tmp_path / "run_small", SIZES
    )
    assert above < 400e6
    assert resource.getpagesize() <= disk_bytes(tmp_path / "run") < 1.01 * 2 * disk_bytes(tmp_path / "large")


@pytest.mark.slow
def test_a_killed_import_goes_on_where_it_was(tmp_path: Path) -> None:
    """Files that were whole stay as they are, and the result has every bit."""
    write_random(tmp_path / "theirs")
    command = [sys.executable, "-m", "jtrain.hf", "import", "--from", str(tmp_path / "theirs")]
    command += ["--workdir", str(tmp_path / "run"), *options(tmp_path, LARGE)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    journal = tmp_path / "run.importing" / "written.0-of-1.jsonl"
    deadline = time.monotonic() + 120
    while not (journal.exists() and len(journal.read_text().splitlines()) >= 4):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "run").exists()
    state = tmp_path / "run.importing" / "checkpoints" / "0"
    names = [json.loads(line)[0] for line in journal.read_text().splitlines()]
    times = {name: (state / name).stat().st_mtime_ns for name in names}
    subprocess.run(command, check=True, capture_output=True)
    state = tmp_path / "run" / "checkpoints" / "0"
    assert {name: (state / name).stat().st_mtime_ns for name in names} == times
    assert len(names) < len(list(state.rglob("c.*")))
    got, want = exported(tmp_path / "run"), weights(tmp_path / "theirs")
    same(got, {name: value.astype(np.float32) for name, value in want.items()})


def edit(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    """Changes the tensors of the first weight file."""
    path = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


NORM = "model.layers.0.input_layernorm.weight"


def spoil(tensors: dict[str, np.ndarray]) -> None:
    name = next(name for name in tensors if "layers" in name)
    tensors[name].reshape(-1)[:2] = np.nan, np.inf


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (spoil, "has 2 values that are NaN or infinite"),
        (lambda tensors: tensors.update(extra=np.zeros(2, np.float32)), "unknown 1: extra"),
        (
            lambda tensors: tensors.update(
                {name: value[:2].copy() for name, value in tensors.items() if "embed" in name}
            ),
            "tensor model.embed_tokens.weight has shape [2, 32], but config.json makes it [256, 32]",
        ),
        (
            lambda tensors: tensors.update(
                {name: value.astype(np.int8) for name, value in tensors.items() if "embed" in name}
            ),
            "tensor model.embed_tokens.weight has dtype int8; only float32, bfloat16, float16 can be imported",
        ),
    ],
    ids=["nan", "left over", "shape", "dtype"],
)
def test_bad_weights_are_named(
    change: Callable[[dict[str, np.ndarray]], None],
    message: str,
    tmp_path: Path,
    run_import: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And no workdir is made of them."""
    edit(tmp_path / "theirs", change)
    assert run_import() == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_missing_weights_are_named(
    tmp_path: Path, run_import: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder with some of its files, and an index without a tensor that config.json describes."""
    index = tmp_path / "theirs" / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    lost = sorted(set(weight_map.values()))[1:]
    for name in lost:
        (tmp_path / "theirs" / name).rename(tmp_path / name)
    assert run_import() == 2
    assert f"2 of the 3 weight files are not there: {lost[0]}, {lost[1]}" in capsys.readouterr().err
    for name in lost:
        (tmp_path / name).rename(tmp_path / "theirs" / name)
    edit(tmp_path / "theirs", lambda tensors: tensors.pop("model.embed_tokens.weight"))
    del weight_map["model.embed_tokens.weight"]
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert run_import() == 2
    assert "missing 1: model.embed_tokens.weight" in capsys.readouterr().err


def test_another_dtype_than_config_json_says_is_said(
    tmp_path: Path, run_import: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """A line with the tensors; float32 holds each of the readable dtypes exactly."""
    file = tmp_path / "theirs" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"torch_dtype": "bfloat16"}))
    assert run_import() == 0
    said = capsys.readouterr().out
    assert "config.json says bfloat16, and 23 of 30 tensors have another dtype: " in said
    assert "(float32); all become float32" not in said.partition("have another dtype")[0]


def test_an_import_of_other_weights_is_not_gone_on_with(
    tmp_path: Path, run_import: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """After a bad tensor the folder stays; with other files it is refused, and what it held is not mixed in."""
    edit(tmp_path / "theirs", spoil)
    assert run_import() == 2
    assert run_import(seed=5) == 2
    assert "run.importing is an import of other weights, or for another config" in capsys.readouterr().err


@pytest.mark.parametrize("store_of", [hf_store, s3_store], ids=["hub", "s3"])
def test_from_a_store_by_byte_range(
    store_of: Any, tmp_path: Path, run_import: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits are those of a folder; no file is fetched as a whole, and no byte of a tensor twice."""
    with store_of(monkeypatch) as store:
        for path in (tmp_path / "theirs").iterdir():
            store.files[path.name] = path.read_bytes()
        assert run_import(source=store.url) == 0
        same(exported(tmp_path / "run"), weights(tmp_path / "theirs"))
        ranges = [(request.path, request.range) for request in store.requests if request.range]
        assert store_of is s3_store or len(ranges) == len(set(ranges)) > 30


def test_a_gated_model_asks_for_a_token(
    run_import: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Hub answers 401: the message says what to accept and to set."""
    with hf_store(monkeypatch) as store:
        store.refuse = 401
        assert run_import(source=store.url) == 2
    said = capsys.readouterr().err
    assert "A gated or private model needs a token: accept its terms at https://huggingface.co/" in said
    assert "HF_TOKEN" in said


@pytest.mark.parametrize("share", ["3/3", "x", "1"])
def test_a_share_that_is_none_is_refused(
    share: str, run_import: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """With an example."""
    assert run_import("--share", share) == 2
    assert f"--share {share} must be I/N with I from 0 to N - 1, such as 0/4" in capsys.readouterr().err
