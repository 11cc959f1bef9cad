"""Llama 3.1 70B for 64 devices of at least 80 GB, or more: as many as are there.

    python -m jtrain.plan --config=llama70b --device h100 --count 64
    python -m jtrain.launch --config=llama70b --set data.path='/my/*.parquet' --set data.tokenizer=/my/t.json
    python -m jtrain.plan --config=llama70b --device h100 --count 256 --set mesh.replica=4

Dimensions: config.json of meta-llama/Llama-3.1-70B. Learning rate, schedule and tokens per step:
arXiv:2407.21783, table 3 and section 3.4.1.
"""

import fiddle as fdl

from jtrain.checkpoint import CheckpointSpec
from jtrain.config.run import EvalSpec, Run
from jtrain.data import PackedText
from jtrain.layout.layout import LayoutSpec
from jtrain.layout.mesh import MeshSpec
from jtrain.model.rope import Llama3Scaling, RopeSpec
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Cosine
from jtrain.telemetry.metrics import MetricsSpec


def llama70b() -> fdl.Config[Run]:
    """70.6 billion parameters, untied embeddings; everything sharded over all devices."""
    return fdl.Config(
        Run,
        seed=0,
        num_steps=250_000,  # also the length of the learning-rate schedule; warm-up is a fraction of it
        mesh=fdl.Config(MeshSpec),
        layout=fdl.Config(
            LayoutSpec,
            zero_stage=3,
            remat="full",
            microbatch_tokens=8192,  # 1 sequence: 8 microbatches on 64 devices
        ),
        model=fdl.Config(
            Transformer,
            num_layers=80,
            d_model=8192,
            num_heads=64,
            num_kv_heads=8,
            head_dim=128,
            d_ff=28672,
            vocab_size=128256,
            rope=fdl.Config(
                RopeSpec,
                theta=500_000.0,
                scaling=fdl.Config(
                    Llama3Scaling,
                    factor=8.0,
                    low_freq_factor=1.0,
                    high_freq_factor=4.0,
                    original_seq_len=8192,
                ),
            ),
            norm_eps=1e-5,
            qk_norm=False,
            tie_embeddings=False,
        ),
        optimizer=fdl.Config(
            AdamW, peak_lr=1.5e-4, warmup_steps=0.03, schedule=fdl.Config(Cosine, final_fraction=0.01)
        ),
        data=fdl.Config(
            PackedText,
            path="corpus/*.parquet",
            tokenizer="tokenizer.json",
            seq_len=8192,
            global_batch=512,  # 4 Mi tokens per step
        ),
        checkpoint=fdl.Config(CheckpointSpec, every_steps=1000, keep_last=2),
        eval=fdl.Config(EvalSpec, every_steps=1000),
        metrics=fdl.Config(MetricsSpec, log_every_steps=10),
    )


def tensor8(run: fdl.Config[Run]) -> None:
    """Tensor parallelism over the 8 devices of a host, ZeRO over hosts: an eighth of the bytes between
    hosts.
    """
    run.mesh.tensor = 8
