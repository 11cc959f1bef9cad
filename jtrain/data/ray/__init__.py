"""Data plane on Ray actors, with loaders on any host of the cluster."""
