"""Supervisor: a process without jax that starts a run's processes, watches their heartbeats, ends and
restarts them.
"""
