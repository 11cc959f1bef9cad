"""Mistral 7B for 8 devices of at least 80 GB, or more: as many as are there.

    python -m jtrain.plan --config=mistral_7b --device h100 --count 8
    python -m jtrain.launch --config=mistral_7b --set data.path='/my/*.parquet' --set data.tokenizer=/my/t.json

Dimensions: config.json of mistralai/Mistral-7B-v0.3. Everything else is llama8b's.
"""

import fiddle as fdl

from jtrain.config.load import load_config
from jtrain.config.run import Run
from jtrain.model.rope import RopeSpec
from jtrain.model.transformer import Transformer


def mistral_7b() -> fdl.Config[Run]:
    """7.25 billion parameters; since version 0.2 without a window."""
    run = load_config("llama8b")
    run.model = fdl.Config(
        Transformer,
        num_layers=32,
        d_model=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        d_ff=14336,
        vocab_size=32768,
        rope=fdl.Config(RopeSpec, theta=1e6),
        norm_eps=1e-5,
    )
    return run
