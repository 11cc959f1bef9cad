"""Mixture of six sources in six formats, with a schedule: first prose about Python, later code.

    python -m jtrain.data sample --out runs/sources
    python -m jtrain.data inspect --config=mixture --step 40
    python -m jtrain.launch --config=mixture
    python -m jtrain.data prepare --config=mixture --out runs/prepared     # tokenise once ...
    python -m jtrain.launch --config=mixture --set data.prepared=runs/prepared --workdir runs/mixture-prepared

Prepared documents are cut at exactly seq_len tokens, raw ones by their bytes, so the two give other batches.
A weight may change between attempts: the run resumes, and its log records the change and its step.
"""

import fiddle as fdl

from jtrain.checkpoint import CheckpointSpec
from jtrain.config.run import EvalSpec, Run
from jtrain.data import Linear, PackedText, Source
from jtrain.layout.layout import LayoutSpec
from jtrain.layout.mesh import MeshSpec
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Cosine
from jtrain.telemetry.metrics import MetricsSpec

_PROSE = {"docstrings": 0.3, "comments": 0.2, "topics": 0.2, "packages": 0.2, "code": 0.1}
_CODE = {"docstrings": 0.1, "comments": 0.1, "topics": 0.0, "packages": 0.1, "code": 0.6, "signatures": 0.1}


def mixture() -> fdl.Config[Run]:
    """Model of `tiny` on a mixture that moves from prose to code."""
    return fdl.Config(
        Run,
        seed=0,
        num_steps=300,
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
            sources={
                "code": fdl.Config(Source, path="runs/sources/code.jsonl.gz"),
                "docstrings": fdl.Config(Source, path="runs/sources/docstrings.parquet"),
                "comments": fdl.Config(Source, path="runs/sources/comments.arrayrecord"),
                "topics": fdl.Config(Source, path="runs/sources/topics"),
                "packages": fdl.Config(Source, path="runs/sources/packages.tar", text_field="txt"),
                "signatures": fdl.Config(Source, path="runs/sources/signatures.jsonl"),
            },
            mixture=fdl.Config(Linear, points=((50, _PROSE), (200, _CODE))),
            packing="best_fit",
            seq_len=512,
            global_batch=8,  # sequences per step, over all devices
            eval_fraction=0.02,
        ),
        checkpoint=fdl.Config(CheckpointSpec, every_steps=100, keep_last=2),
        eval=fdl.Config(EvalSpec, every_steps=100),
        metrics=fdl.Config(MetricsSpec, log_every_steps=10),
    )


def debug(run: fdl.Config[Run]) -> None:
    """Shrinks the run to five steps of two narrow layers, to try every code path in seconds."""
    run.num_steps = 5
    run.model.num_layers = 2
    run.model.d_model = 64
    run.model.d_ff = 128
    run.data.seq_len = 128
    run.checkpoint.every_steps = 5
    run.eval.every_steps = 5
    run.metrics.log_every_steps = 1
