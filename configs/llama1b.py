"""Llama 3.2 1B for one device of 80 GB, or several.

    python -m jtrain.plan --config=llama1b --device h100
    python -m jtrain.launch --config=llama1b --set data.path='/my/*.parquet' --set data.tokenizer=/my/t.json

Dimensions: config.json of meta-llama/Llama-3.2-1B. Learning rate and schedule: those of the 8B model,
arXiv:2407.21783, table 3.
"""

import fiddle as fdl

from jtrain.checkpoint import CheckpointSpec
from jtrain.config.run import EvalSpec, Run
from jtrain.data import PackedText
from jtrain.layout.layout import LayoutSpec
from jtrain.layout.mesh import MeshSpec
from jtrain.model.forward_placement import SAVEABLE
from jtrain.model.rope import Llama3Scaling, RopeSpec
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Cosine
from jtrain.telemetry.metrics import MetricsSpec


def llama1b() -> fdl.Config[Run]:
    """1.24 billion parameters, tied embeddings; each device holds the whole model."""
    return fdl.Config(
        Run,
        seed=0,
        num_steps=100_000,  # also the length of the learning-rate schedule; warm-up is a fraction of it
        mesh=fdl.Config(MeshSpec),
        # All that has a name fits beside 8 sequences in 80 GB, so that no matmul and no attention is computed
        # twice.
        layout=fdl.Config(
            LayoutSpec, zero_stage=0, remat="named", remat_save=SAVEABLE, microbatch_tokens=32_768
        ),
        model=fdl.Config(
            Transformer,
            num_layers=16,
            d_model=2048,
            num_heads=32,
            num_kv_heads=8,
            head_dim=64,
            d_ff=8192,
            vocab_size=128256,
            rope=fdl.Config(
                RopeSpec,
                theta=500_000.0,
                scaling=fdl.Config(
                    Llama3Scaling,
                    factor=32.0,
                    low_freq_factor=1.0,
                    high_freq_factor=4.0,
                    original_seq_len=8192,
                ),
            ),
            norm_eps=1e-5,
            qk_norm=False,
            tie_embeddings=True,
        ),
        optimizer=fdl.Config(
            AdamW, peak_lr=3e-4, warmup_steps=0.02, schedule=fdl.Config(Cosine, final_fraction=0.01)
        ),
        data=fdl.Config(
            PackedText,
            path="corpus/*.parquet",
            tokenizer="tokenizer.json",
            seq_len=4096,
            global_batch=64,  # 262,144 tokens per step
        ),
        checkpoint=fdl.Config(CheckpointSpec, every_steps=1000, keep_last=2),
        eval=fdl.Config(EvalSpec, every_steps=1000),
        metrics=fdl.Config(MetricsSpec, log_every_steps=10),
    )


def zero3(run: fdl.Config[Run]) -> None:
    """Shards parameters, gradients and optimizer state over all devices."""
    run.layout.zero_stage = 3
