"""Ahead-of-time compilation of kernels for chips that are not present, and reports of the compilers'
results.
"""
