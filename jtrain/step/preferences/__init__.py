"""Preference losses of pairs of texts: formulas, and how a step computes them."""
