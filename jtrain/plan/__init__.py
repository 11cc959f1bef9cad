"""Plans of a run before it starts: bytes, FLOPs, collectives, seconds, by formula and by compiler."""

AOT_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # otherwise JAX looks for an accelerator and logs errors when there is none
    "TPU_SKIP_MDS_QUERY": "1",  # otherwise libtpu queries the cloud's metadata server, for half a minute
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # otherwise a second process aborts on a lock file
    "CUDA_VISIBLE_DEVICES": "-1",
}
"""Environment variables that must be set before JAX is imported, so that `jtrain.plan.compile` can
compile."""
