"""Constants that both the train step and loader processes need: no imports, because a loader may not import
jax.
"""

IGNORE = -1
"""Target id of positions without a target: padding, and the last token of a document."""

BATCH_AXES = ("replica", "data", "expert")
"""Mesh axes over which the sequences of a batch are split."""
