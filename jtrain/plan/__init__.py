"""What a run needs before it starts: bytes, FLOPs, collectives; by formula, and by the real compiler."""

AOT_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # with both compilers installed and no accelerator, JAX would look for one, loudly
    "TPU_SKIP_MDS_QUERY": "1",  # libtpu asks the cloud's metadata server otherwise, for half a minute
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # two processes at once abort on a lock file otherwise
    "CUDA_VISIBLE_DEVICES": "-1",
}
"""What the environment must hold before JAX is imported, for `jtrain.plan.aot` to compile for machines not here."""
