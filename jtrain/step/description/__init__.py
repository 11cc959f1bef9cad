"""What a step says of itself: its collectives and products, read off traces of its own functions."""
