"""Ahead-of-time compilation of the real train step for machines that are not here."""
