"""A step's own account of itself: collectives, products and saved arrays, read off its functions' traces."""
