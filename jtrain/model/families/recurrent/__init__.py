"""Families of mixers with a state: delta nets, Mamba-2, short convolutions."""
