"""Fused communication and matmul kernels for Hopper GPUs, in Mosaic GPU."""
