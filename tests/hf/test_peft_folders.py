"""Adapters of peft: the same logits and gradients, and the same files."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jtrain.errors import FileError, UserError
from jtrain.hf.model_config import model_from_config
from jtrain.hf.peft_folders import read_adapter, write_adapter
from jtrain.hf.peft_tensors import AdapterTensor, adapter_tensors
from jtrain.layout.dims import Batch
from jtrain.model.adapters.lora import LoRA
from jtrain.model.adapters.merge import merge
from jtrain.model.forward_placement import single_device
from jtrain.model.param import at_path, merge_trees
from jtrain.model.transformer import Transformer
from tests.weights import draw_weights

GOLDEN = Path(__file__).parents[1] / "golden" / "peft"
FAMILIES = Path(__file__).parents[1] / "families" / "configs.json"
ADAPTERS = {
    "llama": LoRA(rank=4, alpha=8.0),
    "qwen3": LoRA(rank=3, alpha=6.0, targets=("q", "v", "down"), rslora=True),
    "qwen3_moe": LoRA(rank=2, alpha=4.0, targets=("q", "mlp.*")),
    "qwen3_moe_v5": LoRA(rank=2, alpha=4.0, targets=("q", "mlp.*")),
}


# Both folders of Qwen3 MoE have one model: its programs are compiled once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def loss_and_gradients(model: Transformer, scale: float, own: Any, base: Any, batch: Batch) -> Any:
    """Mean nats with an adapter beside its base, and the gradients of the adapter."""
    placement = dataclasses.replace(single_device("float32"), adapter_scale=scale)
    num_targets = batch.target_BL.shape[0] * (batch.target_BL.shape[1] - 1)
    return jax.value_and_grad(
        lambda own: model.loss(merge_trees(base, own), batch, placement)[0] / num_targets
    )(own)


@functools.partial(jax.jit, static_argnums=0)
def logits_of(model: Transformer, params: Any, batch: Batch) -> jax.Array:
    return model.logits(params, batch)


@pytest.mark.parametrize("reference", ADAPTERS, indirect=True)
def test_logits_and_gradients_are_those_of_peft(reference: Any) -> None:
    """Of the two products side by side; and logits of the merged weights, in float32."""
    folder, adapter = GOLDEN / reference.folder.name, ADAPTERS[reference.folder.name]
    golden, model = dict(np.load(folder / "reference.npz")), reference.model
    own = read_adapter(folder, model, adapter)
    base = jax.tree.map(jnp.asarray, reference.params)
    value, gradients = loss_and_gradients(model, adapter.scale, own, base, reference.batch)
    np.testing.assert_allclose(float(value), golden["loss"], rtol=1e-5)
    apart = np.abs(golden["logits"] - reference.logits[:1]).max()
    assert apart > 0.1 * np.abs(golden["logits"]).max(), "logits near those of the base would prove nothing"
    infos = adapter.infos(model.param_infos())
    everything = merge_trees(base, jax.tree.map(jnp.asarray, own))
    merged = merge(infos, everything, adapter.scale, lambda _: "float32")
    logits_BLV = np.asarray(logits_of(model, merged, reference.batch))[:1]
    np.testing.assert_allclose(logits_BLV, golden["logits"], atol=1e-5 * np.abs(golden["logits"]).max())
    want = {name.removeprefix("grad/"): x for name, x in golden.items() if name.startswith("grad/")}
    is_joined = reference.folder.name == "qwen3_moe_v5"
    targets = adapter_tensors(model, adapter, None, joins_experts=is_joined, shares_a=is_joined)
    assert targets.keys() == want.keys()
    for name, gradient in want.items():
        got = gradient_of(targets[name], gradients)
        assert np.linalg.norm(got - gradient) < 1e-5 * np.linalg.norm(gradient), name


def gradient_of(target: AdapterTensor, gradients: Any) -> np.ndarray:
    """The gradient of a tensor of peft; the A that gate and up share gets the gradients of both."""
    total = np.zeros(target.shape, np.float32)
    for part in target.parts:
        own = np.zeros_like(total)
        part.write(np.asarray(at_path(gradients, part.info.path)[part.index]), own)
        total += own
    return total


@pytest.mark.parametrize("reference", ["llama", "qwen3", "qwen3_moe"], indirect=True)
def test_a_folder_is_written_as_peft_writes_it(reference: Any, tmp_path: Path) -> None:
    folder, adapter = GOLDEN / reference.folder.name, ADAPTERS[reference.folder.name]
    own = read_adapter(folder, reference.model, adapter)
    write_adapter(tmp_path / "out", own, reference.model, adapter, dtype="float32", base="here")
    ours, theirs = (load_file(path / "adapter_model.safetensors") for path in (tmp_path / "out", folder))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor)
    config, their_config = (
        json.loads((path / "adapter_config.json").read_text()) for path in (tmp_path / "out", folder)
    )
    for name in ("peft_type", "r", "lora_alpha", "use_rslora", "bias", "task_type", "fan_in_fan_out"):
        assert config[name] == their_config[name], name
    # For `all-linear` peft writes whole names.
    words = {name.rpartition(".")[2] for name in their_config["target_modules"]}
    assert set(config["target_modules"]) == words


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (LoRA(rank=8, alpha=8.0), r"r=4 there, 8 here"),
        (LoRA(rank=4, alpha=8.0, rslora=True), r"use_rslora=False there, True here"),
        (LoRA(rank=4, alpha=8.0, targets=("q",)), r"missing 0 \(\), more 24 "),
    ],
)
def test_another_adapter_is_refused(llama: Any, adapter: LoRA, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_adapter(GOLDEN / "llama", llama.model, adapter)


def test_other_kinds_and_other_folders_are_refused(llama: Any, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"has no adapter_config\.json and no adapter_model\.safetensors"):
        read_adapter(tmp_path, llama.model, ADAPTERS["llama"])
    shutil.copytree(GOLDEN / "llama", tmp_path / "dora")
    config = tmp_path / "dora" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))
    with pytest.raises(UserError, match=r"use_dora=True there, False here"):
        read_adapter(tmp_path / "dora", llama.model, ADAPTERS["llama"])
    with pytest.raises(UserError, match="trains whole parameters"):
        write_adapter(tmp_path / "out", {}, llama.model, LoRA(train=("embed",)), dtype="float32")


def test_the_dropout_is_written_and_none_is_asked_for(llama: Any, tmp_path: Path) -> None:
    """Preferences, which have none, go on with an adapter that was trained with some."""
    dropping = dataclasses.replace(ADAPTERS["llama"], dropout=0.1)
    own = read_adapter(GOLDEN / "llama", llama.model, ADAPTERS["llama"])
    write_adapter(tmp_path / "out", own, llama.model, dropping, dtype="float32")
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["lora_dropout"] == 0.1
    again = read_adapter(tmp_path / "out", llama.model, ADAPTERS["llama"])
    jax.tree.map(np.testing.assert_array_equal, again, own)


def test_an_adapter_of_mixtral_is_read_by_the_names_of_files_and_of_memory() -> None:
    """Files have `block_sparse_moe` and an expert each, memory of transformers 5 `mlp` and all in one."""
    model = model_from_config(json.loads(FAMILIES.read_text())["mixtral"])
    lora = LoRA(rank=2, alpha=4.0, targets=("mlp.*",))
    layer = "base_model.model.model.layers.0"
    assert f"{layer}.block_sparse_moe.experts.7.w1.lora_A.weight" in adapter_tensors(
        model, lora, None, joins_experts=False
    )
    joined = adapter_tensors(model, lora, None, joins_experts=True, shares_a=True)
    # As peft 0.21.2 writes them: A is [experts x rank, inputs], and gate and up, which come first, are one parameter.
    shapes = {
        "base_layer.lora_A": (16, 64),
        "base_layer.lora_B": (192, 16),
        "lora_A": (16, 96),
        "lora_B": (64, 16),
    }
    for name, shape in shapes.items():
        assert joined[f"{layer}.mlp.experts.{name}.weight"].shape == shape, name


def test_experts_of_one_tensor_are_written_with_an_a_for_gate_and_one_for_up(tmp_path: Path) -> None:
    """As gpt-oss has them: twice the rank, zeros between the two, and the adapter's scale; read as it was written."""
    model = model_from_config(json.loads(FAMILIES.read_text())["gpt_oss"])
    lora = LoRA(rank=2, alpha=4.0, targets=("mlp.*",), rslora=True)
    infos = tuple(dataclasses.replace(i, std=0.3) for i in lora.infos(model.param_infos()) if i.is_adapter)
    params = draw_weights(infos, noise=0.0)
    write_adapter(tmp_path / "out", params, model, lora, dtype="float32")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    assert config["target_modules"] == []
    assert config["rank_pattern"] == {"mlp.experts.gate_up_proj": 4}
    scales = config["lora_alpha"] / config["r"], config["alpha_pattern"]["mlp.experts.gate_up_proj"] / 4
    assert not config["use_rslora"]
    np.testing.assert_allclose(scales, lora.scale)
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_B.weight"
    assert np.mean(tensors[name] == 0) == 0.5
    again = read_adapter(tmp_path / "out", model, lora)
    for info in infos:
        np.testing.assert_array_equal(at_path(again, info.path), at_path(params, info.path))

    save_file(tensors | {name: np.ones_like(tensors[name])}, tmp_path / "out" / "adapter_model.safetensors")
    with pytest.raises(UserError, match="mixes the rows of A of gate and up"):
        read_adapter(tmp_path / "out", model, lora)
    config["alpha_pattern"] = {}
    (tmp_path / "out" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"gate_up_proj by 1\.41421 .*LoRA\(\.\.\.\) all by 2\.82843"):
        read_adapter(tmp_path / "out", model, lora)
