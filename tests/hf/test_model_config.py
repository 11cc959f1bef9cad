"""Reading and writing config.json: each field that changes the model is read or refused by name."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jtrain.hf.model_config import config_from_model, model_differences, model_from_config
from jtrain.hf.model_files import read_config
from jtrain.model.attention import AttentionSpec
from jtrain.model.mlp import MLPSpec
from jtrain.model.rope import Llama3Scaling, RopeSpec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer
from jtrain.plan.estimate.flops import flops_per_token

# As published, https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}

# As published, https://huggingface.co/Qwen/Qwen3-8B/blob/main/config.json
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

QWEN3_30B_A3B: dict[str, Any] = QWEN3_8B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}

GOLDEN = Path(__file__).parents[1] / "golden" / "hf"

V5_ROPE = {"rope_theta": 500000.0, **LLAMA_8B["rope_scaling"]}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def test_llama_as_published() -> None:
    """Llama-3.1-8B, field by field."""
    model = model_from_config(LLAMA_8B)
    sizes = (model.num_layers, model.d_model, model.num_heads, model.num_kv_heads, model.head_dim, model.d_ff)
    assert sizes == (32, 4096, 32, 8, 128, 14336)
    assert model.vocab_size == 128256
    assert model.rope == RopeSpec(500_000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192))
    assert (model.norm_eps, model.qk_norm, model.tie_embeddings) == (1e-5, False, False)
    assert sum(info.size for info in model.param_infos()) == 8_030_261_248


def test_qwen3_as_published() -> None:
    """Qwen3-8B: norms of queries and keys, and a base that is written as an int."""
    model = model_from_config(QWEN3_8B)
    assert (model.num_layers, model.head_dim, model.qk_norm, model.norm_eps) == (36, 128, True, 1e-6)
    assert model.rope == RopeSpec(1_000_000.0)
    assert sum(info.size for info in model.param_infos()) == 8_190_735_360


def test_qwen3_moe_as_published() -> None:
    """Qwen3-30B-A3B: 30.5 billion parameters, of which 3.3 billion are active per token."""
    model = model_from_config(QWEN3_30B_A3B)
    assert (model.num_layers, model.d_model, model.num_kv_heads, model.d_ff) == (48, 2048, 4, 768)
    assert model.moe == MoESpec(num_experts=128, top_k=8, normalize_top_k=True, balance_loss=1e-3)
    assert sum(info.size for info in model.param_infos()) == 30_532_122_624
    active = sum(info.active_size for info in model.param_infos())
    assert active == 3_353_032_704
    assert (
        flops_per_token(model, seq_len=4096).matmul_params
        == active - 151936 * 2048 - (2 * 2048 + 256) * 48 - 2048
    )


def test_the_form_of_transformers_5_is_the_same_model() -> None:
    """`rope_parameters` replaces `rope_theta` and `rope_scaling`."""
    new = without(LLAMA_8B, "rope_theta", "rope_scaling") | {"rope_parameters": V5_ROPE}
    assert model_differences(model_from_config(new), model_from_config(LLAMA_8B)) == []
    plain = without(QWEN3_8B, "rope_theta", "rope_scaling") | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}
    }
    assert model_differences(model_from_config(plain), model_from_config(QWEN3_8B)) == []


@pytest.mark.parametrize("case", ["llama", "llama_tied", "qwen3"])
def test_transformers_4_and_5_write_one_model_in_two_forms(case: str) -> None:
    """The configuration that each version wrote of one model is read as that model."""
    old, new = json.loads((GOLDEN / case / "config.v4.json").read_text()), read_config(GOLDEN / case)
    assert (old["transformers_version"][0], new["transformers_version"][0]) == ("4", "5")
    assert "rope_theta" in old
    assert "rope_parameters" in new
    assert model_differences(model_from_config(old), model_from_config(new)) == []


def test_transformers_4_and_5_write_one_mixture_in_two_forms() -> None:
    """Version 5 renames `num_experts` to `num_local_experts`; the model and the balancing loss stay the
    same.
    """
    old, new = read_config(GOLDEN / "qwen3_moe"), read_config(GOLDEN / "qwen3_moe_v5")
    assert old["num_experts"] == new["num_local_experts"] == 8
    assert "num_local_experts" not in old
    assert "num_experts" not in new
    theirs, again = model_from_config(old), model_from_config(new)
    assert model_differences(theirs, again) == []
    assert theirs.moe == again.moe


def test_two_numbers_of_experts_are_refused() -> None:
    """Each major version of transformers would build another model from such a file."""
    both = QWEN3_30B_A3B | {"num_local_experts": 128}
    assert model_from_config(both).moe == model_from_config(QWEN3_30B_A3B).moe
    with pytest.raises(
        ValueError, match=r"num_experts=128 but num_local_experts=64\. transformers 4 reads the first"
    ):
        model_from_config(QWEN3_30B_A3B | {"num_local_experts": 64})


def test_defaults_are_those_of_transformers() -> None:
    """Fields that the config.json of an old Llama leaves out take the defaults of transformers."""
    keys = ("num_key_value_heads", "rope_theta", "rope_scaling", "rms_norm_eps", "tie_word_embeddings")
    model = model_from_config(without(LLAMA_8B, *keys))
    assert (model.num_kv_heads, model.head_dim, model.rope) == (32, 128, RopeSpec(10_000.0))
    assert (model.norm_eps, model.tie_embeddings) == (1e-6, False)
    assert model_from_config(LLAMA_8B | {"head_dim": 64}).head_dim == 64


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "bloom"}, r"model_type='bloom' is not one of llama, qwen2"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            r"architectures=\['LlamaForSequenceClassification'\]",
        ),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu'"),
        ({"pretraining_tp": 2}, "pretraining_tp=2"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            r"rope_scaling\.rope_type='longrope' is not supported",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling of type linear has no factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "finetuned": True}}, "has {'finetuned': True}"),
        (
            {"attention_sinks": True},
            r"attention_sinks=True \(attention sinks\): model_type='llama' is not known to have such a field",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}},
            "llama3 has no low_freq_factor, high_freq_factor",
        ),
        (
            {"rope_scaling": None, "rope_parameters": {"rope_type": "dynamic"}},
            r"rope_parameters\.rope_type='dynamic'",
        ),
        (
            {"rope_scaling": None, "rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"hidden_size": None}, "hidden_size=None must be a whole number"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has sliding_attention"),
    ],
    ids=str,
)
def test_what_the_model_has_not_is_refused_by_name(changes: dict[str, Any], match: str) -> None:
    """The message has the field, its value and the supported value."""
    with pytest.raises(ValueError, match=match):
        model_from_config(LLAMA_8B | changes)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_experts": None}, "num_experts=None must be a whole number"),
        ({"num_experts": None, "num_local_experts": 8.5}, r"num_local_experts=8\.5 must be a whole number"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size=None must be a whole number"),
        ({"num_experts_per_tok": 129}, r"top_k=129 must be from 1 to model\.moe\.num_experts=128"),
    ],
    ids=str,
)
def test_a_mixture_without_a_size_is_refused(changes: dict[str, Any], match: str) -> None:
    """The message names the field."""
    with pytest.raises(ValueError, match=match):
        model_from_config(QWEN3_30B_A3B | changes)


def test_a_mixture_that_transformers_has_not_is_not_exported() -> None:
    """Mixtures with shared experts, or without norms of queries and keys, cannot be exported."""
    sizes: dict[str, Any] = dict(
        num_layers=1, d_model=8, num_heads=2, num_kv_heads=1, head_dim=4, d_ff=8, vocab_size=8
    )
    written: dict[str, Any] = dict(dtype="float32", max_seq_len=8, begin_id=None, end_id=0)
    moe = MoESpec(num_experts=4, top_k=2)
    shared = Transformer(**sizes, qk_norm=True, moe=dataclasses.replace(moe, shared_experts=1))
    with pytest.raises(ValueError, match=r"no family .*: model\.moe\.shared_experts: 0 there, 1 here"):
        config_from_model(shared, **written)
    # Without norms of queries and keys it is a Mixtral.
    assert config_from_model(Transformer(**sizes, moe=moe), **written)["model_type"] == "mixtral"


def test_dense_layers_of_a_mixture() -> None:
    """Qwen3-MoE may have dense layers of another width, by number or by step."""
    model = model_from_config(QWEN3_30B_A3B | {"mlp_only_layers": [0]})
    assert [isinstance(block.feed_forward, MLPSpec) for block in model.blocks[:3]] == [True, False, False]
    assert (model.period[0].feed_forward, model.d_ff) == (MLPSpec(d_ff=6144), 768)
    model = model_from_config(QWEN3_30B_A3B | {"decoder_sparse_step": 2})
    assert len(model.period) == 2
    assert model.num_periods == 24


def test_a_window_is_only_read_where_it_is_in_use() -> None:
    """Qwen3's config.json names a window that is in use only with `use_sliding_window`."""
    assert model_from_config(QWEN3_8B | {"sliding_window": 4096}).pattern == ()
    used = QWEN3_8B | {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 34}
    windows = [
        block.mixer.window
        for block in model_from_config(used).blocks
        if isinstance(block.mixer, AttentionSpec)
    ]
    assert windows == [None] * 34 + [4096] * 2


@pytest.mark.parametrize(
    "config",
    [
        LLAMA_8B,
        QWEN3_8B,
        LLAMA_8B | {"tie_word_embeddings": True},
        QWEN3_30B_A3B | {"intermediate_size": 768},
    ],
    ids=["l", "q", "t", "m"],
)
def test_written_configs_are_read_back(config: dict[str, Any]) -> None:
    """A written config.json reads back as the same model, and its fields equal the published ones."""
    model = model_from_config(config)
    written = config_from_model(model, dtype="bfloat16", max_seq_len=8192, begin_id=1, end_id=2)
    assert model_differences(model_from_config(written), model) == []
    length, ids = "max_position_embeddings", ("bos_token_id", "eos_token_id")
    for key in written.keys() & config.keys() - {length, *ids}:
        assert written[key] == config[key], key
    # transformers asks that a scaled model's longest sequence is longer than what it was scaled from
    assert written[length] == (65536 if model.rope.scaling else 8192)
    assert [written[key] for key in ids] == [1, 2]


def test_a_shape_that_transformers_refuses_of_llama_is_a_mistral() -> None:
    """transformers requires for Llama that the width is a multiple of the heads, whatever the head size."""
    sizes: dict[str, Any] = dict(num_layers=1, d_model=20, num_heads=6, num_kv_heads=3, head_dim=4)
    sizes |= dict(d_ff=8, vocab_size=8)
    written: dict[str, Any] = dict(dtype="float32", max_seq_len=8, begin_id=None, end_id=0)
    assert config_from_model(Transformer(**sizes), **written)["model_type"] == "mistral"
    assert config_from_model(Transformer(**sizes, qk_norm=True), **written)["model_type"] == "qwen3"
    scaled = Transformer(**sizes, embedding_scale=2.0)
    refused = r"no family .*llama: model\.d_model=20 is not a multiple of model\.num_heads=6.*embedding_scale"
    with pytest.raises(ValueError, match=refused):
        config_from_model(scaled, **written)


def test_differences_are_listed_field_by_field() -> None:
    """Each line has the field, both values and the key of config.json."""
    other = model_from_config(LLAMA_8B | {"num_hidden_layers": 16, "rope_scaling": None})
    lines = model_differences(other, model_from_config(LLAMA_8B))
    assert len(lines) == 2
    assert lines[0] == "model.num_layers: 16 there, 32 here"
    assert lines[1].startswith("model.rope.scaling: None there, Llama3Scaling(")


def test_differences_of_mixtures_are_listed_too() -> None:
    """Fields that change a token's output are listed; the coefficients of the router's losses are not."""
    theirs = model_from_config(QWEN3_30B_A3B)
    other = QWEN3_30B_A3B | {"num_experts_per_tok": 4, "norm_topk_prob": False, "router_aux_loss_coef": 0.5}
    assert model_differences(model_from_config(other), theirs) == [
        "model.moe.top_k: 4 there, 8 here",
        "model.moe.normalize_top_k: False there, True here",
    ]
    dense = [line for line in model_differences(model_from_config(QWEN3_8B), theirs) if "moe" in line]
    assert dense == [f"model.moe: None there, {theirs.moe} here"]


@pytest.mark.parametrize(
    ("model_type", "field", "missing", "null"),
    [("mistral", "window", 4096, None), ("gemma3_text", "head_dim", 256, 16), ("glm", "num_kv_heads", 2, 4)],
)
def test_a_missing_field_has_the_value_of_its_class_and_a_null_one_has_not(
    model_type: str, field: str, missing: int, null: int | None
) -> None:
    """As transformers 5.23 reads them: Mistral without `sliding_window` has one of 4096, with null it has none."""
    configs = json.loads((Path(__file__).parents[1] / "families" / "configs.json").read_text())
    config = next(config for config in configs.values() if config["model_type"] == model_type)
    key = {"window": "sliding_window", "num_kv_heads": "num_key_value_heads"}.get(field, field)
    for changed, value in ((without(config, key), missing), (config | {key: None}, null)):
        model = model_from_config(changed)
        mixer = model.blocks[0].mixer
        assert isinstance(mixer, AttentionSpec)
        sizes = mixer.with_sizes(model.sizes)
        assert getattr(sizes, field) == value


def test_minimax_m2_as_published() -> None:
    """Fields that transformers' class has no choice of are read, with the one value that it computes."""
    configs = json.loads((Path(__file__).parents[1] / "families" / "configs.json").read_text())
    config = next(config for config in configs.values() if config["model_type"] == "minimax_m2")
    published = dict(
        use_qk_norm=True, qk_norm_type="per_layer", use_routing_bias=True, scoring_func="sigmoid"
    )
    assert model_differences(model_from_config(config | published), model_from_config(config)) == []
    with pytest.raises(ValueError, match="scoring_func='softmax' is not supported, only 'sigmoid'"):
        model_from_config(config | published | dict(scoring_func="softmax"))
