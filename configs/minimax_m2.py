"""MiniMax-M2, a mixture of 256 experts, for 64 devices of at least 141 GB, or more: as many as are there.

    python -m jtrain.plan --config=minimax_m2 --device h200 --count 64
    python -m jtrain.launch --config=minimax_m2 --set data.path='/my/*.parquet' --set data.tokenizer=/my/t.json

Dimensions: config.json of MiniMaxAI/MiniMax-M2, without its layers that predict further tokens.
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

ATTENTION = AttentionSpec(rope=RopeSpec(theta=5e6, rotated_share=0.5), qk_norm="all")
EXPERTS = MoESpec(num_experts=256, top_k=8, score="sigmoid", correction_bias=True, balance_loss=0.0)


def minimax_m2() -> fdl.Config[Run]:
    """229 billion parameters, 10 active per token."""
    run = load_config("llama8b")
    run.model = fdl.Config(
        Transformer,
        num_layers=62,
        d_model=3072,
        num_heads=48,
        num_kv_heads=8,
        head_dim=128,
        d_ff=1536,  # of each expert
        vocab_size=200064,
        pattern=(BlockSpec(ATTENTION, EXPERTS),),
        norm_eps=1e-6,
    )
    run.mesh.expert = 8
    return run
