"""Trials of `jtrain bench faults`: a real training, one fault, the same command again, an unbroken run beside
it.
"""
