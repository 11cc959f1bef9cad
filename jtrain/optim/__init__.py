"""Optimizer and learning-rate schedule from their specs; moments, and masters if asked for, are the only state.

Update k (0-based, `step` = completed updates) uses `learning_rate(k)`; the bias corrections count from the same
`step`, and so do the random bits of stochastic rounding. Nothing in the optimizer's state counts, so no second counter
can drift after a restore.
"""

from jtrain.optim.optimizer import Optimizer, Update, build, check_layout
from jtrain.optim.schedule import Cosine, StepsOrFraction, WarmupStableDecay
from jtrain.optim.spec import AdamW, Muon
from jtrain.optim.state import Moments, ParamTree, state_bytes

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
    "state_bytes",
]
