"""Proof of a run before it is paid for: its data, template, model, loss and optimizer on emulated devices."""
