"""Matmuls with FP8 operands."""
