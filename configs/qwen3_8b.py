"""Qwen3 8B for 8 devices of at least 80 GB, or more: as many as are there.

    python -m jtrain.plan --config=qwen3_8b --device h100 --count 8
    python -m jtrain.launch --config=qwen3_8b --set data.path='/my/*.parquet' --set data.tokenizer=/my/t.json

Dimensions: config.json of Qwen/Qwen3-8B-Base; the learning rate is Llama 3.1 8B's, because arXiv:2505.09388
gives none.
"""

import fiddle as fdl

from jtrain.checkpoint import CheckpointSpec
from jtrain.config.run import EvalSpec, Run
from jtrain.data import PackedText
from jtrain.layout.layout import LayoutSpec
from jtrain.layout.mesh import MeshSpec
from jtrain.model.rope import RopeSpec
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Cosine
from jtrain.telemetry.metrics import MetricsSpec


def qwen3_8b() -> fdl.Config[Run]:
    """8.19 billion parameters, untied embeddings, QK-norm; everything sharded over all devices."""
    return fdl.Config(
        Run,
        seed=0,
        num_steps=250_000,  # also the length of the learning-rate schedule; warm-up is a fraction of it
        mesh=fdl.Config(MeshSpec),
        layout=fdl.Config(
            LayoutSpec,
            zero_stage=3,
            remat="full",
            microbatch_tokens=16_384,  # 2 sequences: 32 microbatches on 8 devices, 4 on 64
        ),
        model=fdl.Config(
            Transformer,
            num_layers=36,
            d_model=4096,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            d_ff=12288,
            vocab_size=151936,
            rope=fdl.Config(RopeSpec, theta=1_000_000.0),
            norm_eps=1e-6,
            qk_norm=True,
            tie_embeddings=False,
        ),
        optimizer=fdl.Config(
            AdamW, peak_lr=3e-4, warmup_steps=0.03, schedule=fdl.Config(Cosine, final_fraction=0.01)
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


def single_device(run: fdl.Config[Run]) -> None:
    """Fits one H200: bfloat16 moments, 98 GB of parameters, moments and gradients; small batches, for
    benchmarks.
    """
    run.mesh.data = 1
    run.layout.zero_stage = 0
    run.layout.microbatches = 8
    run.optimizer.moment_dtype = "bfloat16"
    run.data.global_batch = 8
