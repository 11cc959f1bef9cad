"""Overlap schedules lowered to XLA permutes and matmuls."""
