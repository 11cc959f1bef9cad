"""A byte-level mixture: tiny with eight experts in every layer, of which two serve a token, and a shared one.

python -m jtrain.launch --config=tiny_moe
python -m jtrain.launch --config=tiny_moe --with experts --emulate-devices 8 --workdir runs/experts

Coefficients of the router's losses: arXiv:2101.03961, section 2.2, and arXiv:2202.08906, section 2.2.
"""

import fiddle as fdl

from jtrain.checkpoint import CheckpointSpec
from jtrain.config import EvalSpec, Run
from jtrain.data import PackedText
from jtrain.layout import LayoutSpec
from jtrain.mesh import MeshSpec
from jtrain.metrics import MetricsSpec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Cosine


def tiny_moe() -> fdl.Config[Run]:
    """7 million parameters, of which a token goes through as many as in tiny: 3 million."""
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
            d_ff=256,  # of one expert
            vocab_size=256,
            moe=fdl.Config(MoESpec, num_experts=8, top_k=2, shared_experts=1, balance_loss=1e-2, router_z_loss=1e-3),
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


def experts(run: fdl.Config[Run]) -> None:
    """Experts split over 4 devices, what else there is over 2; --emulate-devices 8 makes them of one CPU."""
    run.mesh.data = 2
    run.mesh.expert = 4
    run.layout.zero_stage = 3


def profile(run: fdl.Config[Run]) -> None:
    """Traces five steps once clocks and caches are warm: profile/20/report.html."""
    run.profile.steps = (20, 25)


def debug(run: fdl.Config[Run]) -> None:
    """Five steps of two narrow layers: whether everything runs, in seconds."""
    run.num_steps = 5
    run.model.num_layers = 2
    run.model.d_model = 64
    run.model.d_ff = 32
    run.data.seq_len = 64
    run.data.global_batch = 8
    run.checkpoint.every_steps = 5
    run.eval.every_steps = 5
    run.metrics.log_every_steps = 1
