"""Optimizer and learning-rate schedule, built from specs. The only state is moments and optional master
weights.

Update k (0-based, `step` = completed updates) uses `learning_rate(k)`; the bias corrections count from the
same `step`, and so do the random bits of stochastic rounding. The optimizer's state has no counter of its
own, so none can drift after a restore.
"""

from jtrain.optim.decay_schedules import Cosine, StepsOrFraction, WarmupStableDecay
from jtrain.optim.optimizer import Optimizer, build, check_layout
from jtrain.optim.rounding import moving_mean
from jtrain.optim.spec import AdamW, Muon
from jtrain.optim.state import Moments, ParamTree, state_bytes
from jtrain.optim.update import Update

__all__ = [
    "AdamW",
    "Cosine",
    "Moments",
    "Muon",
    "Optimizer",
    "ParamTree",
    "StepsOrFraction",
    "Update",
    "WarmupStableDecay",
    "build",
    "check_layout",
    "moving_mean",
    "state_bytes",
]
