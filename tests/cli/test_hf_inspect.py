"""`python -m jtrain.hf inspect`, and the options --as and --part of its neighbours."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jtrain.cli.hf import main
from jtrain.hf.mapping import from_hf
from jtrain.hf.model_config import model_from_config
from jtrain.hf.model_files import open_tensors, read_config

GOLDEN = Path(__file__).parents[1] / "golden" / "hf"
CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "families" / "configs.json").read_text()
)
LLAMA_8B: dict[str, Any] = dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14336,
    vocab_size=128256,
    rope_theta=500000.0,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    torch_dtype="bfloat16",
)


def write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(autouse=True, scope="module")
def all_devices() -> None:
    """Starts JAX before the verb asks for one device: later tests of this process want theirs."""
    assert len(jax.devices()) == 8


def inspected(folder: Path, *options: str) -> dict[str, Any]:
    file = folder.parent / "inspected.json"
    assert main(["inspect", str(folder), *options, "--json", str(file)]) == 0
    return json.loads(file.read_text())


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 2
    return capsys.readouterr().err


def test_parameters_are_those_that_an_import_makes(tmp_path: Path) -> None:
    """To the last one, for a dense model and a mixture; of a mixture, the experts of one token are active."""
    for case in ("llama", "qwen3_moe"):
        folder = GOLDEN / case
        result = inspected(write(tmp_path / case, read_config(folder)))
        with open_tensors(folder) as tensors:
            params = from_hf(tensors, model_from_config(read_config(folder)))
        assert result["parameters"] == sum(array.size for array in _leaves(params))
        assert (result["active_parameters"] < result["parameters"]) == (case == "qwen3_moe")


def _leaves(tree: Any) -> list[np.ndarray]:
    return [leaf for value in tree.values() for leaf in _leaves(value)] if isinstance(tree, dict) else [tree]


@pytest.mark.slow
def test_an_8b_model_on_a_chip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The published count of Llama 3.1 8B, and a layout for 8 x H100 that fits; on one it is refused."""
    folder = write(tmp_path / "model", LLAMA_8B)
    result = inspected(folder, "--device", "h100", "--count", "8")
    assert result["parameters"] == 8_030_261_248
    assert result["plan"]["count"] == 8
    assert 8_030_261_248 * 12 / 8 < result["plan"]["bytes_per_device"] < 80e9
    said = capsys.readouterr().out
    assert "8,030,261,248 parameters" in said
    assert "layers 0-31: BlockSpec(mixer=AttentionSpec(rope=RopeSpec(theta=500000.0))" in said
    assert "not in config.json, so as llama has it: attention_bias" in said
    options = ("inspect", str(folder), "--device", "h100", "--count", "1", "--host-memory", "1GiB")
    assert "nothing fits into 1 x h100" in refusal(capsys, *options)


def test_an_unknown_type_is_offered_as_the_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is read as another family unless --as names it."""
    config = LLAMA_8B | dict(model_type="own", architectures=["OwnForCausalLM"], attention_bias=False)
    folder = write(tmp_path / "model", config | dict(mlp_bias=False, pretraining_tp=1))
    said = refusal(capsys, "inspect", str(folder))
    assert "no family of model_type='own'. All its fields are known, and llama is nearest" in said
    assert "`--as llama` reads it so" in said
    assert inspected(folder, "--as", "llama")["parameters"] == 8_030_261_248


def test_a_family_whose_fields_do_not_fit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the field, its value, and what it asks for."""
    config = LLAMA_8B | dict(model_type="own", kv_lora_rank=512)
    folder = write(tmp_path / "model", config)
    words = ("inspect", str(folder), "--as")
    said = refusal(capsys, *words, "llama")
    assert "--as llama: it has no field kv_lora_rank=512 (multi-head latent attention)" in said
    assert "--as lama: no such family. Did you mean llama?" in refusal(capsys, *words, "lama")
    folder = write(tmp_path / "qwen", CONFIGS["qwen2"])
    said = refusal(capsys, "inspect", str(folder), "--as", "llama")
    assert "--as llama: model_type='qwen2' has a family of its own" in said


def test_what_no_family_reads_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of an unknown type, and of a known one with a field that it does not have."""
    config = LLAMA_8B | dict(model_type="own", hc_mult=4, surprise=1)
    said = refusal(capsys, "inspect", str(write(tmp_path / "a", config)))
    assert "no family of model_type='own', and none has all its fields. Nearest is" in said
    assert "hc_mult=4 (hyper-connections), surprise=1." in said
    said = refusal(capsys, "inspect", str(write(tmp_path / "b", LLAMA_8B | dict(surprise=None, hc_mult=4))))
    assert "config.json: hc_mult=4 (hyper-connections): model_type='llama' is not known" in said


GEMMA: dict[str, Any] = dict(
    model_type="gemma3", architectures=["Gemma3ForConditionalGeneration"], vision_config={"hidden_size": 8}
)


def test_the_text_part_of_a_model_that_sees_is_offered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the option that reads it, and the model is then that of the text part."""
    text = CONFIGS["gemma3_text"]
    folder = write(tmp_path / "model", GEMMA | dict(text_config=text))
    said = refusal(capsys, "inspect", str(folder))
    assert "Its text part is text_config, of model_type='gemma3_text': add `--part text_config`" in said
    alone = inspected(write(tmp_path / "text", text))
    assert inspected(folder, "--part", "text_config") == alone
    assert "--part vision_config: no such part" in refusal(
        capsys, "inspect", str(folder), "--part", "vision_config"
    )
    unlike = GEMMA | dict(text_config=text, tie_word_embeddings=not text.get("tie_word_embeddings", True))
    folder = write(tmp_path / "unlike", unlike | dict(text_config=text | dict(tie_word_embeddings=True)))
    assert "Delete the wrong one" in refusal(capsys, "inspect", str(folder), "--part", "text_config")


def test_the_text_part_is_imported_without_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tensors of the text part have a prefix, and those of the vision part are left out."""
    monkeypatch.setenv("XLA_FLAGS", "")  # the verb adds to it
    folder = GOLDEN / "llama"
    text = {key: value for key, value in read_config(folder).items() if key != "architectures"}
    # A row for each byte: the tokenizer of `tiny`.
    text["vocab_size"] = 256
    write(tmp_path / "model", dict(model_type="sees", text_config=text, vision_config={}))
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = np.resize(weights[name], (256, weights[name].shape[1]))
    renamed = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: value
        for name, value in weights.items()
    }
    renamed["model.vision_tower.patch.weight"] = np.zeros((2, 2), np.float32)
    save_file(renamed, tmp_path / "model" / "model.safetensors")
    (tmp_path / "text.txt").write_text("All work and no play makes Jack a dull boy.\n" * 200)
    model = model_from_config(text)
    sets: dict[str, Any] = {
        f"model.{key}": getattr(model, key)
        for key in ("num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff", "vocab_size")
    }
    sets |= {"model.tie_embeddings": model.tie_embeddings, "model.norm_eps": model.norm_eps}
    sets |= {"model.rope.theta": model.rope.theta, "data.path": tmp_path / "text.txt", "data.seq_len": 32}
    sets |= {"data.eval_fraction": 0.0, "data.text_piece_bytes": 512, "eval.every_steps": None}
    assert model.rope.scaling is not None
    scaling = dataclasses.asdict(model.rope.scaling)
    sets |= {"model.rope.scaling": "jtrain.model.rope:Llama3Scaling"}
    sets |= {f"model.rope.scaling.{key}": value for key, value in scaling.items()}
    options = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    words = ["import", "--from", str(tmp_path / "model"), "--workdir", str(tmp_path / "run"), "--config=tiny"]
    assert main([*words, *options, "--part", "text_config"]) == 0
    assert "1 tensors are of other parts than text_config, and left out" in capsys.readouterr().out
    assert main(["export", "--workdir", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    exported = load_file(tmp_path / "out" / "model.safetensors")
    np.testing.assert_array_equal(exported["model.norm.weight"], weights["model.norm.weight"])
