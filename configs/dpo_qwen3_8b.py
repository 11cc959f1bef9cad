"""Preferences for Qwen3 8B on one device of 80 GB, or more: as many as are there.

    jtrain hf import --from models/Qwen3-8B --config=dpo_qwen3_8b --set adapter=None --workdir runs/base
    python -m jtrain.launch --config=dpo_qwen3_8b --set adapter.base=runs/base --set data.tokenizer=models/Qwen3-8B \
        --set data.sources.pairs.path='/my/pairs/*.jsonl'
    python -m jtrain.plan --config=dpo_qwen3_8b --device h100 --count 1

The model is that of `qwen3_8b`; its adapter switched off is the reference, so that no second model is held.
"""

import fiddle as fdl

from jtrain.checkpoint import CheckpointSpec
from jtrain.config.run import EvalSpec, Run
from jtrain.data import PackedText, Source
from jtrain.layout.layout import LayoutSpec
from jtrain.layout.mesh import MeshSpec
from jtrain.model.adapters.lora import LoRA
from jtrain.model.rope import RopeSpec
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Cosine
from jtrain.step.objective import DPO
from jtrain.telemetry.metrics import MetricsSpec


def dpo_qwen3_8b() -> fdl.Config[Run]:
    """8.19 billion frozen parameters in bfloat16, and 44 million trained ones in float32."""
    return fdl.Config(
        Run,
        seed=0,
        num_steps=1000,  # also the length of the learning-rate schedule; warm-up is a fraction of it
        mesh=fdl.Config(MeshSpec),
        layout=fdl.Config(
            LayoutSpec,
            zero_stage=0,  # 16 GB of weights on each device, and nothing is gathered
            remat="full",
            microbatch_tokens=8192,  # 2 sequences: 8 microbatches on one device, 1 on 8
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
        adapter=fdl.Config(LoRA, rank=16, alpha=32.0, targets=("*",), base_dtype="bfloat16"),
        objective=fdl.Config(DPO, beta=0.1),
        optimizer=fdl.Config(
            AdamW, peak_lr=5e-6, warmup_steps=0.1, schedule=fdl.Config(Cosine), weight_decay=0.0
        ),
        data=fdl.Config(
            PackedText,
            sources={
                "pairs": fdl.Config(
                    Source, path="pairs/*.jsonl", messages_field="chosen", rejected_field="rejected"
                )
            },
            tokenizer="tokenizer.json",
            seq_len=4096,
            global_batch=16,  # 65,536 tokens per step
        ),
        checkpoint=fdl.Config(CheckpointSpec, every_steps=200, keep_last=2),
        eval=fdl.Config(EvalSpec, every_steps=200),
        metrics=fdl.Config(MetricsSpec, log_every_steps=10),
    )
