"""Collectives that hide behind matmuls: one schedule as data, and back ends that carry it out."""
