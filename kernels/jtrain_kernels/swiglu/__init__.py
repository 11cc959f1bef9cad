"""Gated linear unit."""
