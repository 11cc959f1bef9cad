"""Matmuls of 8-bit floating-point operands."""
