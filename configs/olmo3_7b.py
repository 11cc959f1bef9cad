"""Olmo 3 7B for 8 devices of at least 80 GB, or more: as many as are there.

    python -m jtrain.plan --config=olmo3_7b --device h100 --count 8
    python -m jtrain.launch --config=olmo3_7b --set data.path='/my/*.parquet' --set data.tokenizer=/my/t.json

Dimensions: config.json of allenai/Olmo-3-1025-7B. Everything else is llama8b's.
"""

import fiddle as fdl

from jtrain.config.load import load_config
from jtrain.config.run import Run
from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.rope import RopeSpec, YarnScaling
from jtrain.model.transformer import Transformer

_ROPE = RopeSpec(theta=5e5)
_YARN = YarnScaling(8.0, original_seq_len=8192, attention_factor=1.2079441541679836)
WINDOWED = BlockSpec(AttentionSpec(rope=_ROPE, qk_norm="all", window=4096), norms="after")
FULL = BlockSpec(AttentionSpec(rope=RopeSpec(theta=5e5, scaling=_YARN), qk_norm="all"), norms="after")


def olmo3_7b() -> fdl.Config[Run]:
    """7.30 billion parameters: norms after branches, a window in three layers of four."""
    run = load_config("llama8b")
    run.model = fdl.Config(
        Transformer,
        num_layers=32,
        d_model=4096,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        d_ff=11008,
        vocab_size=100278,
        pattern=(WINDOWED, WINDOWED, WINDOWED, FULL),
        norm_eps=1e-6,
    )
    return run
