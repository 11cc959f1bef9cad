"""Families of multi-head latent attention."""
