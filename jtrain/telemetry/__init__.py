"""Measurements during a run: metrics, step times, recompilations and the goodput ledger."""
