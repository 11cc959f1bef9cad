"""A byte-level toy: the whole stack on a laptop CPU, on text that every Python brings along.

    python -m jtrain.launch --config=tiny
    python -m jtrain.launch --config=tiny --set data.path='/my/corpus/*.jsonl' --workdir runs/mine
    python -m jtrain.launch --config=tiny --with zero3 --emulate-devices 8 --workdir runs/zero3

Measured: 6.25 -> 1.47 nats/byte (held out: 1.62) in 159 s on two busy cores of an AMD EPYC, 2026-11-21.
"""

import fiddle as fdl

from jtrain.checkpoint import CheckpointSpec
from jtrain.config import EvalSpec, Run
from jtrain.data import PackedText
from jtrain.layout import LayoutSpec
from jtrain.mesh import MeshSpec
from jtrain.metrics import MetricsSpec
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Cosine


def tiny() -> fdl.Config[Run]:
    """A Llama of 3 million parameters that learns the Python standard library's source, byte by byte."""
    return fdl.Config(
        Run,
        seed=0,
        num_steps=300,  # the schedule reads this field too: one horizon, one home
        mesh=fdl.Config(MeshSpec, data=1),
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
        ),
        checkpoint=fdl.Config(CheckpointSpec, every_steps=100, keep_last=2),
        eval=fdl.Config(EvalSpec, every_steps=100),
        metrics=fdl.Config(MetricsSpec, log_every_steps=10),
    )


def zero3(run: fdl.Config[Run]) -> None:
    """Parameters, gradients and optimizer state split over 8 devices; --emulate-devices 8 makes them of one CPU."""
    run.mesh.data = 8
    run.layout.zero_stage = 3


def tensor(run: fdl.Config[Run]) -> None:
    """Heads, feed-forward and vocabulary split over 4 devices, the batch over 2."""
    run.mesh.data = 2
    run.mesh.tensor = 4


def profile(run: fdl.Config[Run]) -> None:
    """Traces five steps once clocks and caches are warm: profile/20/report.html."""
    run.profile.steps = (20, 25)


def debug(run: fdl.Config[Run]) -> None:
    """Five steps of two narrow layers: whether everything runs, in seconds."""
    run.num_steps = 5
    run.model.num_layers = 2
    run.model.d_model = 64
    run.model.d_ff = 128
    run.data.seq_len = 64
    run.data.global_batch = 8
    run.checkpoint.every_steps = 5
    run.eval.every_steps = 5
    run.metrics.log_every_steps = 1
