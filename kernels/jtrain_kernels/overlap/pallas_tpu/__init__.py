"""Fused communication and matmul kernels for TPUs, in Pallas with remote DMA."""
