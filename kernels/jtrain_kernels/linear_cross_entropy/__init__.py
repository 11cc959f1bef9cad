"""Fused unembedding and cross entropy."""
