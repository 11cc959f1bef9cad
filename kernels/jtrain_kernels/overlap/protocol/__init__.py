"""Verifiers of overlap schedules: a simulator, a model checker of all event orders, a reference executor."""
