"""Preferences in little: a right and a wrong answer to a question about each name in Python's library.

    jtrain launch --config=tiny_dpo
    jtrain data inspect --config=tiny_dpo
    jtrain launch --config=tiny_dpo --set objective.form=ipo --workdir runs/ipo

Seen on 2026-11-28, two idle CPU cores, nothing in a cache: of 243 held-out pairs the reference tells none apart (its
margins are 0), and 91.8 % are right after 50 steps, in 63 s; their loss is 0.6931 and 0.2034 nats. `--set
num_steps=100` takes 106 s and ends at 97.1 % and 0.0997.
"""

import fiddle as fdl

from jtrain.checkpoint import CheckpointSpec
from jtrain.config.run import EvalSpec, Run
from jtrain.data import PackedText, Source
from jtrain.layout.layout import LayoutSpec
from jtrain.layout.mesh import MeshSpec
from jtrain.model.adapters.lora import LoRA
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Cosine
from jtrain.step.objective import DPO
from jtrain.telemetry.metrics import MetricsSpec


def tiny_dpo() -> fdl.Config[Run]:
    """Adapter beside random weights, which are the reference, that learns to tell right answers from wrong ones."""
    return fdl.Config(
        Run,
        seed=0,
        num_steps=50,
        mesh=fdl.Config(MeshSpec),
        layout=fdl.Config(LayoutSpec, zero_stage=0, remat="none"),
        model=fdl.Config(
            Transformer,
            num_layers=3,
            d_model=128,
            num_heads=4,
            num_kv_heads=4,
            head_dim=32,
            d_ff=384,
            vocab_size=264,  # 256 bytes and three marks of chats, in a size that splits over 8 devices
            tie_embeddings=True,
        ),
        adapter=fdl.Config(LoRA, rank=32, alpha=64.0, targets=("*",)),
        objective=fdl.Config(DPO, beta=0.1),
        optimizer=fdl.Config(AdamW, peak_lr=3e-3, warmup_steps=0.1, schedule=fdl.Config(Cosine)),
        data=fdl.Config(
            PackedText,
            sources={
                "pairs": fdl.Config(
                    Source, path="stdlib_pairs", messages_field="chosen", rejected_field="rejected"
                )
            },
            seq_len=512,  # three pairs of about 150 bytes
            global_batch=8,
            tokenizer="bytes_chat",  # its folder has the chat template
            eval_fraction=0.05,
        ),
        checkpoint=fdl.Config(CheckpointSpec, every_steps=25, keep_last=2),
        eval=fdl.Config(
            EvalSpec,
            every_steps=25,
            first=True,  # none told apart: all margins are 0
        ),
        metrics=fdl.Config(MetricsSpec, log_every_steps=10),
    )
