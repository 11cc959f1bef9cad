"""`jtrain hf config`: the file that it writes is a config with the directory's model."""

import dataclasses
import json
from pathlib import Path

import jax
import pytest

from jtrain.cli.hf import main
from jtrain.config.load import load_config
from jtrain.config.run import build_component
from jtrain.hf.config_file import config_source
from jtrain.hf.model_config import model_from_config
from jtrain.model.transformer import Transformer
from tests.families.test_golden import CONFIGS, NOT_YET


def fields(model: Transformer) -> dict[str, object]:
    return {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - set(NOT_YET)))
def test_every_familys_model_is_read_back(name: str, tmp_path: Path) -> None:
    """The config's loader takes the file, with the same model field by field and all else of the base."""
    model = model_from_config(CONFIGS[name])
    source = config_source(model, base="tiny", model_from=name)
    assert max(map(len, source.splitlines())) <= 110
    (tmp_path / "mine.py").write_text(source)
    loaded = load_config(f"{tmp_path}/mine.py:run")
    assert fields(build_component(loaded.model)) == fields(model)
    assert loaded.optimizer == load_config("tiny").optimizer


def test_a_directory_becomes_a_config_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The next command is printed; a file that is there, and a folder that is not, are refused."""
    # Before the verb asks for one device: later tests of this process want theirs.
    assert len(jax.devices()) == 8
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(CONFIGS["qwen3"]))
    words = ["config", "--from", str(tmp_path / "theirs"), "--base", "sft_llama1b", "--out"]
    file = tmp_path / "mine.py"
    assert main([*words, str(file)]) == 0
    said = capsys.readouterr()
    follow = f"jtrain hf import --from {tmp_path}/theirs --config={file}:run --workdir runs/mine"
    assert follow in said.out + said.err
    assert load_config(f"{file}:run").data.global_batch == load_config("sft_llama1b").data.global_batch
    before = file.read_text()
    assert main([*words, str(file)]) == 2
    assert "is there already. Give a new file." in capsys.readouterr().err
    assert file.read_text() == before
    assert main([*words, str(tmp_path / "nowhere" / "mine.py")]) == 2
    assert "Give a file in a folder that is there." in capsys.readouterr().err
