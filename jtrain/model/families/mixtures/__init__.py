"""Families of mixtures of experts that have a file of their own."""
