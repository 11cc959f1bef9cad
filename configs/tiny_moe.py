"""Byte-level MoE: `tiny` with eight experts per layer, two of them active per token, and a shared expert.

python -m jtrain.launch --config=tiny_moe
python -m jtrain.launch --config=tiny_moe --with experts --emulate-devices 8 --workdir runs/experts

Coefficients of the router's losses: arXiv:2101.03961, section 2.2, and arXiv:2202.08906, section 2.2.
"""

import fiddle as fdl

from jtrain.checkpoint import CheckpointSpec
from jtrain.config.run import EvalSpec, Run
from jtrain.data import PackedText
from jtrain.layout.layout import LayoutSpec
from jtrain.layout.mesh import MeshSpec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Cosine
from jtrain.telemetry.metrics import MetricsSpec


def tiny_moe() -> fdl.Config[Run]:
    """7 million parameters, 3 million active per token, as many as in `tiny`."""
    return fdl.Config(
        Run,
        seed=0,
        num_steps=300,  # the learning-rate schedule reads this field too
        mesh=fdl.Config(MeshSpec),
        layout=fdl.Config(LayoutSpec, zero_stage=0, remat="none"),
        model=fdl.Config(
            Transformer,
            num_layers=4,
            d_model=256,
            num_heads=8,
            num_kv_heads=4,
            head_dim=32,
            d_ff=256,  # of each expert
            vocab_size=256,
            moe=fdl.Config(
                MoESpec, num_experts=8, top_k=2, shared_experts=1, balance_loss=1e-2, router_z_loss=1e-3
            ),
            tie_embeddings=True,
        ),
        optimizer=fdl.Config(AdamW, peak_lr=3e-3, warmup_steps=0.05, schedule=fdl.Config(Cosine)),
        data=fdl.Config(
            PackedText,
            path="stdlib",
            seq_len=256,
            global_batch=16,  # sequences per step, over all devices
            tokenizer="bytes",
            # 73 documents: fewer make a loss that says more about them than about the model.
            eval_fraction=0.1,
        ),
        checkpoint=fdl.Config(CheckpointSpec, every_steps=100, keep_last=2),
        eval=fdl.Config(EvalSpec, every_steps=100),
        metrics=fdl.Config(MetricsSpec, log_every_steps=10),
    )


def experts(run: fdl.Config[Run]) -> None:
    """Splits experts over 4 devices and shards the rest over all; --emulate-devices 8 emulates 8 on one
    CPU.
    """
    run.mesh.expert = 4
    run.layout.zero_stage = 3
