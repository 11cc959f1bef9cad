"""Supervisor: a process without jax that starts a run's processes, watches, ends and restarts them."""
