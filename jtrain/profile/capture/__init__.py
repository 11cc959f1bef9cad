"""Capture of trace windows: when they open and close, and what JAX records in them."""
