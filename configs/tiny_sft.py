"""Fine-tuning in little: conversations about the names in Python's library, with a chat template.

    jtrain launch --config=tiny_sft
    jtrain data inspect --config=tiny_sft --tokens
    jtrain launch --config=tiny_sft --set data.sources.chats.path='/my/chats/*.jsonl' --workdir runs/mine

Seen on 2026-11-28, two idle CPU cores, nothing in a cache: of 100 answers to held-out questions none is exact before
and 98 % after, in 81 s, of which 16 s compile.
"""

import fiddle as fdl

from jtrain.checkpoint import CheckpointSpec
from jtrain.config.run import EvalSpec, Run
from jtrain.data import PackedText, Source
from jtrain.layout.layout import LayoutSpec
from jtrain.layout.mesh import MeshSpec
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Cosine
from jtrain.telemetry.metrics import MetricsSpec


def tiny_sft() -> fdl.Config[Run]:
    """Model that learns to answer two questions about a name, byte by byte, from the first weights on."""
    return fdl.Config(
        Run,
        seed=0,
        num_steps=120,
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
        optimizer=fdl.Config(AdamW, peak_lr=3e-3, warmup_steps=0.1, schedule=fdl.Config(Cosine)),
        data=fdl.Config(
            PackedText,
            sources={"chats": fdl.Config(Source, path="stdlib_chats", messages_field="messages")},
            seq_len=256,
            global_batch=16,
            tokenizer="bytes_chat",  # its folder has the chat template
            eval_fraction=0.05,
        ),
        checkpoint=fdl.Config(CheckpointSpec, every_steps=60, keep_last=2),
        eval=fdl.Config(
            EvalSpec,
            every_steps=120,
            first=True,  # what the weights answer before
            answers=100,
            answer_tokens=32,
            prompts=("How is `MyName` written?",),
        ),
        metrics=fdl.Config(MetricsSpec, log_every_steps=20),
    )
