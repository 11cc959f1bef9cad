"""`python -m jtrain.hf prove`: how a config is shrunk, what counts as unequal, and what is refused.

PEER_TORCH_PYTHON=/path/to/python pytest -m slow tests/hf/test_prove.py
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jtrain.cli.hf import main
from jtrain.errors import UserError
from jtrain.hf.peer import run_peer
from jtrain.hf.peers.draw import IGNORED, batches, draw
from jtrain.hf.peers.shrink import shrink
from jtrain.hf.prove import LAYOUTS, PEER, worst_gradient
from jtrain.layout.dims import IGNORE

LLAMA: dict[str, Any] = dict(
    model_type="llama",
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14336,
    vocab_size=128256,
)


def test_a_config_is_shrunk_to_two_layers_of_width_64() -> None:
    """Grouped heads stay grouped, and every size is one that 2 divides."""
    small = shrink(LLAMA, LLAMA)
    assert small["num_hidden_layers"] == 2
    assert small["hidden_size"] == 64
    assert (small["num_attention_heads"], small["num_key_value_heads"]) == (4, 2)
    assert small["vocab_size"] == 128


def test_the_first_layers_and_one_period_are_kept() -> None:
    """Three dense layers, then a window in two of three: three and three layers, the lists cut with them."""
    kinds = (["window", "window", "full"] * 11)[:32]
    layers = dict(
        layer_types=kinds, first_k_dense_replace=3, n_routed_experts=256, num_experts_per_tok=8, n_group=8
    )
    config = LLAMA | layers | dict(topk_group=4)
    small = shrink(config, config)
    assert small["num_hidden_layers"] == 6
    assert small["layer_types"] == kinds[:6]
    assert small["first_k_dense_replace"] == 3
    assert (small["n_routed_experts"], small["num_experts_per_tok"]) == (8, 3)
    assert (small["n_group"], small["topk_group"]) == (4, 2)


def test_of_a_long_pattern_one_layer_of_each_kind_is_kept() -> None:
    """Attention in layers 5, 18 and 30 of 32 has no period: one layer with and one without it are left."""
    config = LLAMA | dict(attn_layer_indices=[5, 18, 30])
    small = shrink(config, config)
    assert small["num_hidden_layers"] == 2
    assert small["attn_layer_indices"] == [1]


def test_a_pattern_of_letters_is_cut_with_the_list_that_it_stands_for() -> None:
    """Mamba, attention and experts without a number of layers: one block of each kind is left of 18."""
    kinds = ["mamba", "moe", "mamba", "moe", "attention", "moe", "mamba", "mamba", "moe"] * 2
    full = {k: v for k, v in LLAMA.items() if k != "num_hidden_layers"} | dict(layers_block_type=kinds)
    config = {k: v for k, v in full.items() if k != "layers_block_type"}
    small = shrink(config | dict(hybrid_override_pattern="MEME*EMME" * 2, num_hidden_layers=18), full)
    assert small["num_hidden_layers"] == 3
    assert small["layers_block_type"] == ["mamba", "moe", "attention"]
    assert small["hybrid_override_pattern"] == "ME*"


def test_a_list_that_the_class_derives_is_left_to_it() -> None:
    """The config proved is the one given: only the complete form knows the kinds of its layers."""
    full = LLAMA | dict(layer_types=["window", "full"] * 16, original_max_position_embeddings=8192)
    small = shrink(
        LLAMA | dict(rope_scaling=dict(rope_type="yarn", original_max_position_embeddings=4096)), full
    )
    assert small["num_hidden_layers"] == 2
    assert "layer_types" not in small
    assert small["rope_scaling"] == dict(rope_type="yarn", original_max_position_embeddings=32)


def test_nothing_random_and_no_other_loss_is_left() -> None:
    """Dropout, a balancing loss and layers that predict further tokens would change the loss."""
    config = LLAMA | dict(attention_dropout=0.1, router_aux_loss_coef=0.001, num_nextn_predict_layers=1)
    small = shrink(config, config)
    assert (
        small["attention_dropout"] == small["router_aux_loss_coef"] == small["num_nextn_predict_layers"] == 0
    )


def test_packed_rows_have_documents_of_one_token_and_padding() -> None:
    """The batch meets what breaks packing: documents shorter than a convolution, and tokens that are none."""
    assert IGNORED == IGNORE
    packed = batches(0, 128)["packed"]
    lengths = [np.bincount(row)[1:].min() for row in packed["segment_BL"]]
    assert min(lengths) == 1
    assert np.any(packed["segment_BL"] == 0)
    is_first = packed["position_BL"] == 0
    assert np.all(packed["target_BL"][packed["segment_BL"] == 0] == IGNORE)
    assert int(is_first.sum()) > 10


def test_drawn_weights_follow_from_their_name() -> None:
    """Equal names give equal numbers, in every version of numpy: the golden arrays rest on them."""
    value = draw("model.norm.weight", (2,), 1.0, 0.2)
    np.testing.assert_array_equal(value, draw("model.norm.weight", (2,), 1.0, 0.2))
    np.testing.assert_allclose(value, [0.9367011, 1.1951871], rtol=1e-6)


def test_one_wrong_gradient_is_named() -> None:
    """An error of 3e-5 of a gradient's norm is over the bound, NaN too; noise of a sum that cancels is not."""
    random = np.random.default_rng(0)
    want = {name: random.standard_normal((8, 8)).astype(np.float32) for name in "abc"}
    assert worst_gradient("x", want, want).is_equal
    check = worst_gradient("x", want | {"b": want["b"] * np.float32(1 + 3e-5)}, want)
    assert not check.is_equal
    assert check.where == "b"
    not_a_number = worst_gradient("x", want | {"c": want["c"] * np.nan}, want)
    assert not not_a_number.is_equal
    assert not_a_number.where == "c"
    # A gradient that is 0 but for rounding: 1e-9 of noise beside gradients of length 8.
    zero = want | {"d": np.zeros((8, 8), np.float32)}
    assert worst_gradient("x", zero | {"d": np.full((8, 8), 1e-9, np.float32)}, zero).is_equal
    assert not worst_gradient("x", zero | {"d": np.full((8, 8), 1e-6, np.float32)}, zero).is_equal


@pytest.mark.parametrize(
    ("python", "message"),
    [
        (None, "give --torch-python, or set PEER_TORCH_PYTHON"),
        (
            "/nowhere/python",
            r"--torch-python /nowhere/python: no such file. Make one with `python3.11 -m venv T",
        ),
        (sys.executable, "No module named 'torch'. Install it there"),
    ],
)
def test_a_python_without_torch_is_refused(python: str | None, message: str, tmp_path: Path) -> None:
    """The message says how to make one."""
    with pytest.raises(UserError, match=message):
        run_peer(python, "llama", tmp_path, sets=(), seed=0)


@pytest.fixture
def peer() -> str:
    python = os.environ.get("PEER_TORCH_PYTHON", "")
    if not Path(python).is_file():
        pytest.skip(f"PEER_TORCH_PYTHON names no Python with torch and transformers: {python!r}")
    return python


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_model_is_proved(
    peer: str, model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers agrees in both batches, and every layout agrees or is refused with a reason."""
    monkeypatch.setenv("XLA_FLAGS", "")  # the verb adds to it
    report = tmp_path / "proof.json"
    code = main(["prove", model_type, "--torch-python", peer, "--json", str(report)])
    proof = json.loads(report.read_text())
    assert code == 0, proof["checks"]
    assert proof["is_equal"]
    compared = {check["compared"] for check in proof["checks"]}
    assert compared == {"transformers, unpacked", "transformers, packed", *LAYOUTS}
    for check in proof["checks"]:
        assert check["where"] or check["quantity"] != "refused"
    # Equality to the last bit would mean that one side was compared with itself.
    assert any(0 < (check["difference"] or 0) < PEER for check in proof["checks"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llamma"], "llamma is no file, no folder with a config.json, and no model_type of transformers"),
        (["llama", "--set", "hidden_size"], "--set hidden_size: give FIELD=JSON"),
        (["llama", "--set", 'hidden_act="no"'], "transformers cannot build or run llama at a small size"),
        (["mamba2"], "model_type='mamba2' is not one of"),
    ],
)
def test_a_model_that_cannot_be_proved_is_refused(
    peer: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and one line that names the field."""
    assert main(["prove", *arguments, "--torch-python", peer]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_wrong_model_is_unequal(peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose norms have another epsilon than transformers' fails, with exit code 1."""
    from jtrain.hf import prove as proofs

    read = proofs.read_config
    monkeypatch.setattr(proofs, "read_config", lambda folder: read(folder) | {"rms_norm_eps": 1e-4})
    assert main(["prove", "llama", "--torch-python", peer]) == 1
