"""Adapters of low rank on every expert of Qwen3 30B-A3B, for 8 devices of 80 GB, or more: as many as are there.

    jtrain hf import --from models/Qwen3-30B-A3B --config=lora_qwen3_30b_a3b --set adapter=None --workdir runs/base
    python -m jtrain.launch --config=lora_qwen3_30b_a3b --set adapter.base=runs/base --set data.path='/my/*.jsonl'
    python -m jtrain.plan --config=lora_qwen3_30b_a3b --device h100 --count 8

The model is that of `qwen3_30b_a3b`, without losses of the router, which is frozen.
"""

import fiddle as fdl

from jtrain.checkpoint import CheckpointSpec
from jtrain.config.run import EvalSpec, Run
from jtrain.data import PackedText
from jtrain.layout.layout import LayoutSpec
from jtrain.layout.mesh import MeshSpec
from jtrain.model.adapters.lora import LoRA
from jtrain.model.rope import RopeSpec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Cosine
from jtrain.telemetry.metrics import MetricsSpec


def lora_qwen3_30b_a3b() -> fdl.Config[Run]:
    """30.5 billion frozen parameters in bfloat16, and 0.85 billion trained ones in float32: A and B of attention,
    and of each of 48 x 128 experts.
    """
    return fdl.Config(
        Run,
        seed=0,
        num_steps=1000,  # also the length of the learning-rate schedule; warm-up is a fraction of it
        mesh=fdl.Config(MeshSpec, expert=4),
        layout=fdl.Config(
            LayoutSpec,
            zero_stage=3,
            remat="full",
            microbatch_tokens=8192,  # 2 sequences
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
            moe=fdl.Config(MoESpec, num_experts=128, top_k=8),
            rope=fdl.Config(RopeSpec, theta=1_000_000.0),
            norm_eps=1e-6,
            qk_norm=True,
            tie_embeddings=False,
        ),
        adapter=fdl.Config(LoRA, rank=16, alpha=32.0, targets=("*",), base_dtype="bfloat16"),
        optimizer=fdl.Config(
            AdamW, peak_lr=2e-4, warmup_steps=0.03, schedule=fdl.Config(Cosine), weight_decay=0.0
        ),
        data=fdl.Config(
            PackedText,
            path="corpus/*.jsonl",
            tokenizer="tokenizer.json",
            seq_len=4096,
            global_batch=64,  # 262,144 tokens per step
        ),
        checkpoint=fdl.Config(CheckpointSpec, every_steps=200, keep_last=2),
        eval=fdl.Config(EvalSpec, every_steps=200),
        metrics=fdl.Config(MetricsSpec, log_every_steps=10),
    )
