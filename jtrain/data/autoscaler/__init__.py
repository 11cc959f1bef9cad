"""Autoscaler: places sources on loader processes and changes the placement during a run."""
