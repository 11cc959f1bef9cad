"""Trials of `jtrain bench faults`: a real training, one fault, the same command again, and a comparison with an unbroken run."""
