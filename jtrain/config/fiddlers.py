"""Fiddlers for every config: `--with debug` and `--with profile`. A config file may define its own by these
names.
"""

import fiddle as fdl

from jtrain.config.run import Run


def debug(run: fdl.Config[Run]) -> None:
    """Shrinks the run to five steps of two narrow layers, so that a laptop runs every code path of this
    config.

    A model for accelerators also gets few heads and experts, `mesh.data=auto`, and byte-level text of the
    standard library.
    """
    # Read before the fields below change: `large` must not judge the shrunk model.
    large, moe = run.model.d_model >= 1024, getattr(run.model, "moe", None)
    run.num_steps = 5
    run.model.num_layers = 2
    run.model.d_model = 64
    run.model.d_ff = 128 if moe is None else 32
    run.data.seq_len = 64
    run.data.global_batch = 8
    run.checkpoint.every_steps = 5
    run.eval.every_steps = 5
    run.metrics.log_every_steps = 1
    if not large:
        return
    # The devices of a laptop, whatever mesh the config is for.
    run.mesh.data = "auto"
    run.mesh.expert = 1
    run.layout.microbatches = 1
    run.model.num_heads = 4
    run.model.num_kv_heads = 2
    run.model.head_dim = 16
    run.model.vocab_size = 256
    # Files that every installation has: the run must not download anything.
    run.data.path = "stdlib"
    run.data.tokenizer = "bytes"
    if moe is not None:
        moe.num_experts = 8
        moe.top_k = 2


def profile(run: fdl.Config[Run]) -> None:
    """Traces five steps once clocks and caches are warm; the report is profile/20/report.html."""
    run.profile.steps = (20, 25)
