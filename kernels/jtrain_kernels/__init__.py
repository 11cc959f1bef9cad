"""Kernels for training: each op has a plain reference and implementations for several back ends. Imports only
JAX.
"""
