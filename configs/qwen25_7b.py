"""Qwen2.5 7B for 8 devices of at least 80 GB, or more: as many as are there.

    python -m jtrain.plan --config=qwen25_7b --device h100 --count 8
    python -m jtrain.launch --config=qwen25_7b --set data.path='/my/*.parquet' --set data.tokenizer=/my/t.json

Dimensions: config.json of Qwen/Qwen2.5-7B. Everything else is llama8b's.
"""

import fiddle as fdl

from jtrain.config.load import load_config
from jtrain.config.run import Run
from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.rope import RopeSpec
from jtrain.model.transformer import Transformer


def qwen25_7b() -> fdl.Config[Run]:
    """7.62 billion parameters: biases of queries, keys and values."""
    run = load_config("llama8b")
    run.model = fdl.Config(
        Transformer,
        num_layers=28,
        d_model=3584,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        d_ff=18944,
        vocab_size=152064,
        pattern=(BlockSpec(AttentionSpec(rope=RopeSpec(theta=1e6), bias="qkv")),),
        norm_eps=1e-6,
    )
    return run
