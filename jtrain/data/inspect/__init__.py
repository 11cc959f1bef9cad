"""Reports on what a run reads: contents of steps, order, excerpts, resources."""
