"""Each group of rows with a matrix of its own."""
