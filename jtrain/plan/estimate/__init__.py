"""Closed forms of memory, FLOPs, network traffic and step time."""
