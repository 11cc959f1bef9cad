"""Llama-style transformers: descriptions of parameters, and pure functions of them."""
