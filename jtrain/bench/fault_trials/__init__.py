"""Trials of `jtrain bench faults`: a real training, one fault, the same command again, compared with an unbroken run."""
