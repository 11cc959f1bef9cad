"""Byte-level model for a laptop CPU that uses the whole stack; its text comes with every Python.

    python -m jtrain.launch --config=tiny
    python -m jtrain.launch --config=tiny --set data.path='/my/corpus/*.jsonl' --workdir runs/mine
    python -m jtrain.launch --config=tiny --with zero3 --emulate-devices 8 --workdir runs/zero3

Measured: 6.08 -> 1.53 nats/byte (held out: 1.48 +- 0.08) in 134 s on two cores of an Intel Xeon, 2026-11-22.
"""

import fiddle as fdl

from jtrain.checkpoint import CheckpointSpec
from jtrain.config.run import EvalSpec, Run
from jtrain.data import PackedText
from jtrain.layout.layout import LayoutSpec
from jtrain.layout.mesh import MeshSpec
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Cosine
from jtrain.telemetry.metrics import MetricsSpec


def tiny() -> fdl.Config[Run]:
    """Llama of 3 million parameters that learns the Python standard library's source, byte by byte."""
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
            d_ff=768,
            vocab_size=256,
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


def zero3(run: fdl.Config[Run]) -> None:
    """Shards parameters, gradients and optimizer state over all devices; --emulate-devices 8 emulates 8 on
    one CPU.
    """
    run.layout.zero_stage = 3


def tensor(run: fdl.Config[Run]) -> None:
    """Splits heads, feed-forward and vocabulary over 4 devices, and the batch over what is left of them."""
    run.mesh.tensor = 4
