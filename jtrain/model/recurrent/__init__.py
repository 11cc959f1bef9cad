"""Mixers with a state of fixed size: delta rules, Mamba-2, and short convolutions."""
