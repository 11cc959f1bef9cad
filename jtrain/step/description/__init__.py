"""A step's own account of itself: its collectives and products, read off traces of its own functions."""
