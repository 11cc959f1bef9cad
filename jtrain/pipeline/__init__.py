"""Pipelines as data: settings, schedules and the placement of layers on stages. Imports no jax."""
