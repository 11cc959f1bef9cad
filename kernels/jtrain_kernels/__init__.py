"""Kernels for training: each op has one plain reference and the forms that back ends like. Imports only JAX."""
