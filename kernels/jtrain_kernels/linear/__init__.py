"""Contraction of activations with a weight."""
