"""Causal, segment-aware attention."""
