"""Qwen3 30B-A3B, a mixture of 128 experts: 8 devices of 141 GB and up; more with mesh.data and fewer microbatches.

    python -m jtrain.launch --config=qwen3_30b_a3b --dry-run
    python -m jtrain.launch --config=qwen3_30b_a3b --set data.path='/my/*.parquet'
    python -m jtrain.launch --config=qwen3_30b_a3b --set mesh.data=64 --set layout.microbatches=4

Dimensions, and the coefficient of the balancing loss: config.json of Qwen/Qwen3-30B-A3B-Base. Sequences as in the first
stage of arXiv:2505.09388, section 3.2, which gives no learning rate: this is Llama 3.1 8B's.
"""

import fiddle as fdl

from jtrain.checkpoint import CheckpointSpec
from jtrain.config import EvalSpec, Run
from jtrain.data import PackedText
from jtrain.layout import LayoutSpec
from jtrain.mesh import MeshSpec
from jtrain.metrics import MetricsSpec
from jtrain.model.rope import RopeSpec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Cosine


def qwen3_30b_a3b() -> fdl.Config[Run]:
    """30.5 billion parameters, of which a token goes through 3.3; experts split over 4 devices, and all over 2."""
    return fdl.Config(
        Run,
        seed=0,
        num_steps=250_000,  # the schedule reads this field too, and warm-up is a fraction of it
        mesh=fdl.Config(MeshSpec, data=2, expert=4),
        layout=fdl.Config(LayoutSpec, zero_stage=3, remat="full", microbatches=32),
        model=fdl.Config(
            Transformer,
            num_layers=48,
            d_model=2048,
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            d_ff=768,  # of one expert
            vocab_size=151936,
            moe=fdl.Config(MoESpec, num_experts=128, top_k=8, balance_loss=1e-3),
            rope=fdl.Config(RopeSpec, theta=1_000_000.0),
            norm_eps=1e-6,
            qk_norm=True,
            tie_embeddings=False,
        ),
        optimizer=fdl.Config(AdamW, peak_lr=3e-4, warmup_steps=0.03, schedule=fdl.Config(Cosine, final_fraction=0.01)),
        data=fdl.Config(
            PackedText,
            path="corpus/*.parquet",
            tokenizer="tokenizer.json",
            seq_len=4096,
            global_batch=1024,  # 4 Mi tokens per step
        ),
        checkpoint=fdl.Config(CheckpointSpec, every_steps=1000, keep_last=2),
        eval=fdl.Config(EvalSpec, every_steps=1000),
        metrics=fdl.Config(MetricsSpec, log_every_steps=10),
    )


def profile(run: fdl.Config[Run]) -> None:
    """Traces five steps once clocks and caches are warm: profile/20/report.html."""
    run.profile.steps = (20, 25)


def debug(run: fdl.Config[Run]) -> None:
    """Five steps of two narrow layers on bytes: every code path of this config, on a laptop."""
    run.num_steps = 5
    run.mesh.data = 1
    run.mesh.expert = 1
    run.layout.microbatches = 1
    run.model.num_layers = 2
    run.model.d_model = 64
    run.model.num_heads = 4
    run.model.num_kv_heads = 2
    run.model.head_dim = 16
    run.model.d_ff = 32
    run.model.moe.num_experts = 8
    run.model.moe.top_k = 2
    run.model.vocab_size = 256
    run.data.path = "stdlib"
    run.data.tokenizer = "bytes"
    run.data.seq_len = 64
    run.data.global_batch = 8
    run.checkpoint.every_steps = 5
    run.eval.every_steps = 5
    run.metrics.log_every_steps = 1
