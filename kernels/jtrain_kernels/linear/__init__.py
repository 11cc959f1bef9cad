"""Contraction with a weight."""
