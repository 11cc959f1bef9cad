"""Mapping of Hugging Face tensors to jtrain parameters and back."""

import itertools
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from jtrain.hf import mapping
from jtrain.hf.mapping import tensors_of
from jtrain.model.families import FAMILIES
from jtrain.model.families.family import Family
from jtrain.model.param import map_params
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer

BF16 = np.dtype(ml_dtypes.bfloat16)


def model_of(**changes: Any) -> Transformer:
    """Model whose sizes all differ, so that no two dimensions can be confused."""
    sizes: dict[str, Any] = dict(num_layers=3, d_model=20, d_ff=28, vocab_size=32)
    heads: dict[str, Any] = dict(num_heads=6, num_kv_heads=3, head_dim=4)
    return Transformer(**(sizes | heads | changes))


def mixture() -> Transformer:
    """Model of the shape of Qwen3-MoE."""
    return model_of(qk_norm=True, moe=MoESpec(num_experts=5, top_k=2))


def family_of(model: Transformer) -> Family:
    """Sizes that all differ describe no Llama, whose width is a multiple of the heads; its names are the same."""
    return FAMILIES["qwen3_moe" if model.moe else "qwen3" if model.qk_norm else "llama"]


def to_hf(params: Any, model: Transformer, **options: Any) -> Iterator[tuple[str, np.ndarray]]:
    return mapping.to_hf(params, model, family=family_of(model), **options)


def from_hf(tensors: Any, model: Transformer, **options: Any) -> Any:
    return mapping.from_hf(tensors, model, family=family_of(model), **options)


def params_of(model: Transformer, dtype: str = "float32") -> dict[str, Any]:
    rng = np.random.default_rng(0)
    kind = BF16 if dtype == "bfloat16" else np.dtype(dtype)
    return map_params(
        lambda info: rng.standard_normal(info.shape, np.float32).astype(kind), model.param_infos()
    )


def readers(tensors: dict[str, np.ndarray]) -> dict[str, Callable[[], np.ndarray]]:
    return {name: lambda array=array: array for name, array in tensors.items()}


def exported(model: Transformer, dtype: str = "float32") -> dict[str, np.ndarray]:
    return dict(to_hf(params_of(model), model, dtype=dtype))


@pytest.mark.parametrize(("tied", "qk_norm"), list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_there_and_back_is_bitwise(dtype: str, tied: bool, qk_norm: bool) -> None:
    """Parameters exported in their own dtype and imported again are bitwise equal."""
    model = model_of(tie_embeddings=tied, qk_norm=qk_norm)
    params = params_of(model, dtype)
    back = from_hf(readers(dict(to_hf(params, model, dtype=dtype))), model)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    for got, want in zip(jax.tree.leaves(back), jax.tree.leaves(params), strict=True):
        assert got.dtype == want.dtype == np.dtype(dtype if dtype == "float32" else BF16)
        assert got.tobytes() == want.tobytes()


def test_a_tied_head_is_exported_once() -> None:
    """As the embedding; an untied model has both."""
    tied, untied = (
        [name for name, _ in to_hf(params_of(model), model, dtype="float32")]
        for model in (model_of(tie_embeddings=True), model_of(tie_embeddings=False))
    )
    assert sorted(untied) == sorted([*tied, "lm_head.weight"])


@pytest.mark.smoke
def test_back_and_there_is_bitwise(reference: Any) -> None:
    """A reference directory, imported and exported, has the same tensors."""
    from safetensors.numpy import load_file

    want = load_file(reference.folder / "model.safetensors")
    got = dict(to_hf(reference.params, reference.model, dtype="float32"))
    assert set(got) == set(want)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def test_linear_layers_are_outputs_by_inputs_with_heads_flattened() -> None:
    """One entry of each kind of matrix, computed by hand: head n, entry h is row n * H + h."""
    model = model_of()
    params, theirs = params_of(model), exported(model)
    attention, mlp = params["layers"]["attention"], params["layers"]["mlp"]
    layer, d, n, k, h, f, v = 1, 7, 5, 2, 3, 11, 13
    prefix = f"model.layers.{layer}"
    size = model.head_dim
    assert theirs[f"{prefix}.self_attn.q_proj.weight"][n * size + h, d] == attention["q_DNH"][layer, d, n, h]
    assert theirs[f"{prefix}.self_attn.k_proj.weight"][k * size + h, d] == attention["k_DKH"][layer, d, k, h]
    assert theirs[f"{prefix}.self_attn.v_proj.weight"][k * size + h, d] == attention["v_DKH"][layer, d, k, h]
    assert theirs[f"{prefix}.self_attn.o_proj.weight"][d, n * size + h] == attention["o_NHD"][layer, n, h, d]
    assert theirs[f"{prefix}.mlp.gate_proj.weight"][f, d] == mlp["gate_DF"][layer, d, f]
    assert theirs[f"{prefix}.mlp.down_proj.weight"][d, f] == mlp["down_FD"][layer, f, d]
    assert theirs["model.embed_tokens.weight"][v, d] == params["embed_VD"][v, d]
    assert theirs["lm_head.weight"][v, d] == params["unembed_DV"][d, v]


def test_each_expert_has_its_tensors() -> None:
    """Mixtures convert both ways bitwise, and one entry of each matrix is checked by hand."""
    model = mixture()
    params = params_of(model)
    theirs = dict(to_hf(params, model, dtype="float32"))
    mlp = params["layers"]["mlp"]
    layer, x, d, f = 1, 3, 7, 11
    prefix = f"model.layers.{layer}.mlp"
    assert theirs[f"{prefix}.experts.{x}.gate_proj.weight"][f, d] == mlp["gate_XDF"][layer, x, d, f]
    assert theirs[f"{prefix}.experts.{x}.up_proj.weight"][f, d] == mlp["up_XDF"][layer, x, d, f]
    assert theirs[f"{prefix}.experts.{x}.down_proj.weight"][d, f] == mlp["down_XFD"][layer, x, f, d]
    assert theirs[f"{prefix}.gate.weight"][x, d] == mlp["router_DX"][layer, d, x]
    assert len([name for name in theirs if ".experts." in name]) == 3 * 3 * 5
    back = from_hf(readers(theirs), model)
    for got, want in zip(jax.tree.leaves(back), jax.tree.leaves(params), strict=True):
        assert got.tobytes() == want.tobytes()


def test_export_rounds_once_to_nearest_even() -> None:
    """bfloat16 from float32 rounds once, as numpy does."""
    model = model_of()
    for (name, got), (_, want) in zip(
        to_hf(params_of(model), model, dtype="bfloat16"), exported(model).items(), strict=True
    ):
        assert got.dtype == BF16, name
        np.testing.assert_array_equal(got, want.astype(BF16), err_msg=name)


def test_import_widens_half_precision_exactly() -> None:
    """bfloat16 and float16 directories become float32 parameters of the same values."""
    model = model_of()
    for dtype in (BF16, np.dtype("float16")):
        theirs = {name: array.astype(dtype) for name, array in exported(model).items()}
        params = from_hf(readers(theirs), model, dtype="float32")
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}
        np.testing.assert_array_equal(
            params["embed_VD"], theirs["model.embed_tokens.weight"].astype(np.float32)
        )


def test_one_tensor_at_a_time() -> None:
    """Neither direction holds more than the parameters and two tensors, so a 70B model needs no second
    copy.
    """
    # Tensors large beside the few 100 KB that names and views take.
    model = model_of(num_layers=24, d_model=128, d_ff=512, vocab_size=64)
    params = params_of(model)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    largest = max(int(np.prod(parts[0].shape)) * 4 for parts in tensors_of(model, family_of(model)).values())
    assert total > 60 * largest, "or a copy of everything would be as small as one tensor"

    tracemalloc.start()
    for _ in to_hf(params, model, dtype="float32"):
        pass
    export_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    shapes = {name: parts[0].shape for name, parts in tensors_of(model, family_of(model)).items()}
    lazy = {name: (lambda shape=shape: np.ones(shape, np.float32)) for name, shape in shapes.items()}
    imported = from_hf(lazy, model)
    import_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert export_bytes < 5 * largest
    assert total <= import_bytes < total + 5 * largest
    assert imported["embed_VD"].shape == params["embed_VD"].shape


def test_missing_and_unknown_tensors_are_named() -> None:
    """One message names all missing and unknown tensors."""
    model = model_of()
    theirs = exported(model)
    del theirs["model.layers.1.mlp.up_proj.weight"]
    theirs["model.layers.0.self_attn.q_proj.bias"] = np.zeros(24, np.float32)
    match = (
        r"missing 1: model\.layers\.1\.mlp\.up_proj\.weight; unknown 1: "
        r"model\.layers\.0\.self_attn\.q_proj\.bias"
    )
    with pytest.raises(ValueError, match=match):
        from_hf(readers(theirs), model)


def test_a_long_list_of_tensors_is_cut() -> None:
    """The message for a model of another depth stays short."""
    with pytest.raises(ValueError, match=r"missing 18: .* and 10 more"):
        from_hf(readers(exported(model_of())), model_of(num_layers=5))


def test_a_wrong_shape_is_named() -> None:
    """The message has both shapes and the parameter."""
    model = model_of()
    theirs = exported(model) | {"model.layers.2.self_attn.k_proj.weight": np.zeros((16, 20), np.float32)}
    match = r"2\.self_attn\.k_proj\.weight has shape \[16, 20\], .* \[12, 20\] \(our layers\.attention\.k_DKH"
    with pytest.raises(ValueError, match=match):
        from_hf(readers(theirs), model)


def test_a_dtype_that_is_no_float_is_refused() -> None:
    """Quantised weights are refused."""
    theirs = exported(model_of()) | {"model.norm.weight": np.ones(20, np.int8)}
    with pytest.raises(
        ValueError, match=r"model\.norm\.weight has dtype int8; only float32, bfloat16, float16"
    ):
        from_hf(readers(theirs), model_of())


def test_layers_of_mixed_dtypes_need_a_dtype() -> None:
    """Layers are stacked, so their dtypes must agree."""
    model = model_of()
    theirs = exported(model)
    name = "model.layers.1.mlp.up_proj.weight"
    theirs[name] = theirs[name].astype(BF16)
    with pytest.raises(ValueError, match=r"up_proj\.weight has dtype bfloat16, other layers' have float32"):
        from_hf(readers(theirs), model)
    from_hf(readers(theirs), model, dtype="float32")


def test_a_tied_directory_may_hold_the_head_if_it_is_the_embedding() -> None:
    """A tied head equal to the embedding is accepted, as in Qwen3-0.6B; another head or dtype is refused."""
    model = model_of(tie_embeddings=True)
    theirs = exported(model)
    assert "lm_head.weight" not in theirs
    same = theirs | {"lm_head.weight": theirs["model.embed_tokens.weight"].copy()}
    assert "unembed_DV" not in from_hf(readers(same), model)
    other = theirs | {"lm_head.weight": theirs["model.embed_tokens.weight"] + 1}
    with pytest.raises(ValueError, match=r"ties the embeddings .* another matrix"):
        from_hf(readers(other), model)


def test_an_unknown_dtype_is_refused() -> None:
    """An export offers the two dtypes that transformers and a run share."""
    with pytest.raises(ValueError, match="--dtype float8 is not one of float32, bfloat16"):
        next(to_hf(params_of(model_of()), model_of(), dtype="float8"))


def test_derived_buffers_of_old_exports_are_ignored() -> None:
    """`rotary_emb.inv_freq` is ignored, since it follows from config.json."""
    model = model_of()
    theirs = exported(model) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    from_hf(readers(theirs), model)
