"""Qwen3 30B-A3B, an MoE with 128 experts, for 8 devices of at least 141 GB, or more: as many as are there.

    python -m jtrain.plan --config=qwen3_30b_a3b --device h200 --count 8
    python -m jtrain.launch --config=qwen3_30b_a3b --set data.path='/my/*.jsonl' --set data.tokenizer=t.json

Dimensions, and the coefficient of the balancing loss: config.json of Qwen/Qwen3-30B-A3B-Base. Sequence length
of the first stage in arXiv:2505.09388, section 3.2, which gives no learning rate; the learning rate is Llama
3.1 8B's.
"""

import fiddle as fdl

from jtrain.checkpoint import CheckpointSpec
from jtrain.config.run import EvalSpec, Run
from jtrain.data import PackedText
from jtrain.layout.layout import LayoutSpec
from jtrain.layout.mesh import MeshSpec
from jtrain.model.rope import RopeSpec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Cosine
from jtrain.telemetry.metrics import MetricsSpec


def qwen3_30b_a3b() -> fdl.Config[Run]:
    """30.5 billion parameters, 3.3 active per token; experts split over 4 devices, everything sharded over
    all.
    """
    return fdl.Config(
        Run,
        seed=0,
        num_steps=250_000,  # also the length of the learning-rate schedule; warm-up is a fraction of it
        mesh=fdl.Config(MeshSpec, expert=4),
        layout=fdl.Config(
            LayoutSpec,
            zero_stage=3,
            remat="full",
            microbatch_tokens=16_384,  # 4 sequences: 32 microbatches on 8 devices, 4 on 64
        ),
        model=fdl.Config(
            Transformer,
            num_layers=48,
            d_model=2048,
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            d_ff=768,  # of each expert
            vocab_size=151936,
            moe=fdl.Config(MoESpec, num_experts=128, top_k=8, balance_loss=1e-3),
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
            seq_len=4096,
            global_batch=1024,  # 4 Mi tokens per step
        ),
        checkpoint=fdl.Config(CheckpointSpec, every_steps=1000, keep_last=2),
        eval=fdl.Config(EvalSpec, every_steps=1000),
        metrics=fdl.Config(MetricsSpec, log_every_steps=10),
    )
