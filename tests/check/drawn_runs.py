"""Runs by chance: descriptions and layouts as the fuzz of layouts draws them."""

import itertools
import random

import fiddle as fdl

from jtrain.bench.layout_trials.descriptions import SIZES, draw_description
from jtrain.bench.layout_trials.pairs import random_settings
from jtrain.bench.layout_trials.settings import DESCRIBED, DESCRIPTION, make_run, refusal
from jtrain.config.run import Run
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW


def drawn(seed: int) -> fdl.Config[Run]:
    """Config of a description that nobody else has, on the first layout that takes it."""
    description = draw_description(random.Random(f"check {seed}"))
    described = {"model": DESCRIBED, DESCRIPTION: description, "kernels": "chosen"}
    settings = (setting | described for setting in itertools.islice(random_settings(seed), 2000))
    run = make_run(next(setting for setting in settings if refusal(setting) is None))
    return fdl.Config(
        Run,
        seed=seed,
        num_steps=20,
        mesh=run.mesh,
        layout=run.layout,
        pipeline=run.pipeline,
        model=fdl.Config(Transformer, **SIZES | dict(description) | {"vocab_size": 256}),
        optimizer=AdamW(peak_lr=3e-3, warmup_steps=4),
        data=fdl.Config(
            type(run.data), path="stdlib", seq_len=128, global_batch=16, context_order=run.data.context_order
        ),
        eval=run.eval,
    )
