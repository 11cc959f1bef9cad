"""Collectives that overlap with matmuls: one schedule as data, and the back ends that execute it."""
