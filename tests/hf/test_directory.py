"""Files of a Hugging Face directory."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jtrain.errors import FileError
from jtrain.hf.directory import write_directory
from jtrain.hf.mapping import from_hf, to_hf
from jtrain.hf.model_config import config_from_model
from jtrain.hf.model_files import open_tensors, read_config

INDEX = "model.safetensors.index.json"


def write(folder: Path, reference: Any, **options: Any) -> list[str]:
    config = config_from_model(reference.model, dtype="float32", max_seq_len=128, begin_id=None, end_id=0)
    options = {"dtype": "float32"} | options
    return write_directory(folder, reference.params, reference.model, config, **options)


def same_params(folder: Path, reference: Any) -> None:
    with open_tensors(folder) as tensors:
        params = from_hf(tensors, reference.model)
    got = dict(to_hf(params, reference.model, dtype="float32"))
    for name, want in load_file(reference.folder / "model.safetensors").items():
        np.testing.assert_array_equal(got[name], want, err_msg=name)


def test_a_small_model_is_one_file(llama: Any, tmp_path: Path) -> None:
    """An export holds config.json and model.safetensors, readable by all users, and leaves no other file
    behind.
    """
    assert write(tmp_path / "out", llama) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o777 == 0o644
    assert read_config(tmp_path / "out")["model_type"] == "llama"
    same_params(tmp_path / "out", llama)


def test_a_large_model_is_several_files_with_an_index(llama: Any, tmp_path: Path) -> None:
    """No file exceeds the limit, every tensor is in the file that the index names, and the directory reads
    back.
    """
    limit = 30_000
    files = write(tmp_path / "out", llama, max_shard_bytes=limit)
    shards = [name for name in files if name.endswith(".safetensors")]
    assert len(shards) >= 4
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    held = {shard: load_file(tmp_path / "out" / shard) for shard in shards}
    sizes = {shard: sum(array.nbytes for array in tensors.values()) for shard, tensors in held.items()}
    assert all(size <= limit for size in sizes.values())
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert {name: shard for shard, tensors in held.items() for name in tensors} == index["weight_map"]
    same_params(tmp_path / "out", llama)


def test_bfloat16_is_half_the_bytes(llama: Any, tmp_path: Path) -> None:
    """A bfloat16 export stays bfloat16 when it is imported."""
    write(tmp_path / "out", llama, dtype="bfloat16")
    with open_tensors(tmp_path / "out") as tensors:
        params = from_hf(tensors, llama.model)
    assert params["embed_VD"].dtype.name == "bfloat16"
    np.testing.assert_array_equal(
        params["embed_VD"], llama.params["embed_VD"].astype(params["embed_VD"].dtype)
    )


def test_tokenizer_files_are_copied_along(llama: Any, tmp_path: Path) -> None:
    """Existing tokenizer files are copied; other files of the folder are not."""
    source = tmp_path / "tokenizer"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "notes.txt"):
        (source / name).write_text("{}")
    (source / "generation_config.json").write_text('{"temperature": 0.6}')
    files = write(tmp_path / "out", llama, tokenizer_folder=source)
    assert files == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"temperature": 0.6}


def test_a_directory_in_use_is_refused(llama: Any, tmp_path: Path) -> None:
    """A non-empty folder stays unchanged; an empty folder is accepted."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("keep")
    with pytest.raises(ValueError, match="is there already and not empty"):
        write(out, llama)
    assert [path.name for path in out.iterdir()] == ["precious"]
    (out / "precious").unlink()
    write(out, llama)


def test_a_failed_export_leaves_nothing(llama: Any, tmp_path: Path) -> None:
    """A failed export leaves no directory, since a half-written one would look like a model."""
    broken = {**llama.params, "final_norm": {"scale_D": np.ones(3, np.float32)}}
    config = config_from_model(llama.model, dtype="float32", max_seq_len=128, begin_id=None, end_id=0)
    with pytest.raises(ValueError, match="cannot reshape array of size 3"):
        write_directory(tmp_path / "out", broken, llama.model, config, dtype="float32")
    assert list(tmp_path.iterdir()) == []


def test_missing_files_are_named(llama: Any, tmp_path: Path) -> None:
    """A missing config.json, missing weights and one missing file of several are each reported."""
    with pytest.raises(FileError, match=r"config\.json: no such file"):
        read_config(tmp_path)
    with pytest.raises(FileError, match=r"neither model\.safetensors nor"), open_tensors(tmp_path):
        pass
    write(tmp_path / "out", llama, max_shard_bytes=30_000)
    missing = sorted((tmp_path / "out").glob("*.safetensors"))[1]
    missing.unlink()
    with pytest.raises(FileError, match=f"{missing.name}: no such file, but"), open_tensors(tmp_path / "out"):
        pass


def test_broken_files_are_named(llama: Any, tmp_path: Path) -> None:
    """Truncated safetensors, a tensor missing from its file, and invalid JSON are each reported."""
    out = tmp_path / "out"
    write(out, llama)
    weights = out / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with (
        pytest.raises(ValueError, match=r"model\.safetensors is no complete safetensors file"),
        open_tensors(out),
    ):
        pass
    weights.write_bytes(whole)
    (out / INDEX).write_text(json.dumps({"weight_map": {"model.extra": "model.safetensors"}}))
    with pytest.raises(ValueError, match=r"model\.safetensors has no model\.extra"), open_tensors(out):
        pass
    (out / "config.json").write_text("{,")
    with pytest.raises(ValueError, match=r"config\.json is no JSON"):
        read_config(out)
