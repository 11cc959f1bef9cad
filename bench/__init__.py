"""Benchmarks of published figures, one file each; `python -m jtrain.bench` of the same checkout runs them."""
