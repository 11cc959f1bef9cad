"""Data plane: prefetching iterator, its process, and the resources it takes."""
