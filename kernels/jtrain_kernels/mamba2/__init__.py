"""Mamba-2 state space model."""
