"""Readers of compiled XLA programs: instructions, network traffic, memory traffic."""
