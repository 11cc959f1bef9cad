"""A step's own account of itself: its collectives, products and saved arrays, read off traces of its own functions."""
