"""GLM-4.5-Air, a mixture of 128 experts, for 32 devices of at least 141 GB, or more: as many as are there.

    python -m jtrain.plan --config=glm45_air --device h200 --count 32
    python -m jtrain.launch --config=glm45_air --set data.path='/my/*.parquet' --set data.tokenizer=/my/t.json

Dimensions: config.json of zai-org/GLM-4.5-Air, without its layer that predicts a second token.
Everything else is llama8b's.
"""

import fiddle as fdl

from jtrain.config.load import load_config
from jtrain.config.run import Run
from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.rope import RopeSpec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer

ATTENTION = AttentionSpec(rope=RopeSpec(theta=1e6, rotated_share=0.5), bias="qkv")
EXPERTS = MoESpec(
    num_experts=128,
    top_k=8,
    d_ff=1408,
    shared_experts=1,
    score="sigmoid",
    correction_bias=True,
    balance_loss=0.0,
)


def glm45_air() -> fdl.Config[Run]:
    """107 billion parameters, 13 active per token; the first layer is dense."""
    run = load_config("llama8b")
    run.model = fdl.Config(
        Transformer,
        num_layers=46,
        d_model=4096,
        num_heads=96,
        num_kv_heads=8,
        head_dim=128,
        d_ff=10944,  # of the dense layer
        vocab_size=151552,
        first=(BlockSpec(ATTENTION),),
        pattern=(BlockSpec(ATTENTION, EXPERTS),),
        norm_eps=1e-5,
    )
    run.mesh.expert = 8
    return run
