"""Mixtures as in DeepSeek-V3 (arXiv:2412.19437): sigmoid scores with a correction bias, groups, shared
experts, and first layers that are dense.
"""

from collections.abc import Callable
from typing import Any

from jtrain.model.block import BlockSpec
from jtrain.model.families.config_fields import Fields
from jtrain.model.families.decoder import moe_of
from jtrain.model.families.family import Names, Tensor
from jtrain.model.mixer import MixerSpec
from jtrain.model.mlp import MLPSpec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer


def experts_in(
    fields: Fields, *, scoring_func: str = "sigmoid", topk_method: str = "noaux_tc", **changes: Any
) -> MoESpec:
    """The mixture that a config.json describes.

    Args:
      scoring_func, topk_method: values of these fields that describe this mixture.
      changes: arguments of `MoESpec` that this family has otherwise.
    """
    fields.only(scoring_func=scoring_func, topk_method=topk_method, moe_layer_freq=1)
    fields.ignore("aux_loss_alpha", "seq_aux", "ep_size")
    arguments: dict[str, Any] = dict(
        num_experts=fields.whole("n_routed_experts"),
        top_k=fields.whole("num_experts_per_tok"),
        d_ff=fields.whole("moe_intermediate_size"),
        normalize_top_k=fields.flag("norm_topk_prob", True),
        shared_experts=fields.get("n_shared_experts", 0),
        score="sigmoid",
        correction_bias=True,
        num_groups=fields.whole("n_group", 1),
        top_groups=fields.whole("topk_group", 1),
        weight_scale=fields.number("routed_scaling_factor", 1.0),
        # Its load is balanced by the correction bias.
        balance_loss=0.0,
    )
    return MoESpec(**arguments | changes)


def first_dense(
    fields: Fields, attention: MixerSpec, moe: MoESpec, *, default: int = 1
) -> Callable[[int], BlockSpec]:
    """Description of each layer: the first `first_k_dense_replace` are dense."""
    dense = fields.whole("first_k_dense_replace", default)
    return lambda y: BlockSpec(attention, MLPSpec() if y < dense else moe)


def experts_written(model: Transformer) -> dict[str, Any]:
    """Fields that `experts_in` and `first_dense` read."""
    moe = moe_of(model)
    dense = [isinstance(block.feed_forward, MLPSpec) for block in model.blocks]
    return {
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.d_ff or model.d_ff,
        "norm_topk_prob": moe.normalize_top_k,
        "n_shared_experts": moe.shared_experts,
        "n_group": moe.num_groups,
        "topk_group": moe.top_groups,
        "routed_scaling_factor": moe.weight_scale,
        "first_k_dense_replace": dense.index(False),
    }


def names_of_experts(
    bias: str = "mlp.gate.e_score_correction_bias", shared: str = "mlp.shared_experts"
) -> Names:
    """Names of what such a mixture has beside the usual experts."""
    layer = "model.layers.{y}"
    return {
        "mlp.router_bias_X": Tensor(f"{layer}.{bias}", "X"),
        "mlp.shared.gate_DF": Tensor(f"{layer}.{shared}.gate_proj.weight", "F D"),
        "mlp.shared.up_DF": Tensor(f"{layer}.{shared}.up_proj.weight", "F D"),
        "mlp.shared.down_FD": Tensor(f"{layer}.{shared}.down_proj.weight", "D F"),
    }
