"""Mesh, sharding, offload and dtypes of every array of a run."""
