"""The text part of Gemma 3 12B for 8 devices of at least 80 GB, or more: as many as are there.

    python -m jtrain.plan --config=gemma3_12b --device h100 --count 8
    python -m jtrain.launch --config=gemma3_12b --set data.path='/my/*.parquet' --set data.tokenizer=/my/t.json

Dimensions: text_config of google/gemma-3-12b-pt. Everything else is llama8b's.
"""

import fiddle as fdl

from jtrain.config.load import load_config
from jtrain.config.run import Run
from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.mlp import MLPSpec
from jtrain.model.norm import NormSpec
from jtrain.model.rope import LinearScaling, RopeSpec
from jtrain.model.transformer import Transformer

_MLP = MLPSpec(activation="gelu_tanh")
_WIDE = RopeSpec(theta=1e6, scaling=LinearScaling(8.0))
WINDOWED = BlockSpec(AttentionSpec(qk_norm="head", window=1024, scale=256**-0.5), _MLP, norms="sandwich")
FULL = BlockSpec(AttentionSpec(rope=_WIDE, qk_norm="head", scale=256**-0.5), _MLP, norms="sandwich")


def gemma3_12b() -> fdl.Config[Run]:
    """11.77 billion parameters, and no vision part: a window in five layers of six."""
    run = load_config("llama8b")
    run.model = fdl.Config(
        Transformer,
        num_layers=48,
        d_model=3840,
        num_heads=16,
        num_kv_heads=8,
        head_dim=256,
        d_ff=15360,
        vocab_size=262208,
        pattern=(WINDOWED, WINDOWED, WINDOWED, WINDOWED, WINDOWED, FULL),
        norm=NormSpec(scale="one_plus"),
        norm_eps=1e-6,
        embedding_scale=3840**0.5,
        tie_embeddings=True,
    )
    return run
