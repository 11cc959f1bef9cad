"""Fiddlers for every config: `--with debug`, `small`, `lora`, `dpo`, `distill`, `stream` and `profile`. A
config file may define its own by these names.
"""

from typing import Any

import fiddle as fdl

from jtrain.config.run import Run
from jtrain.config.weight_stream_spec import WeightStreamSpec
from jtrain.model.adapters.lora import LoRA
from jtrain.step.objective import DPO, Distillation

LARGE = 1024
"""Width from which on a model is one for accelerators, with files that not every machine has."""


def small(run: fdl.Config[Run]) -> None:
    """Shrinks the run to five steps of a narrow model on short sequences, with the config's own layout.

    Mesh, layout, batch, heads and experts stay, so whatever does not split over a cluster does not split over
    as many emulated devices. A model for accelerators reads byte-level text of the standard library, or
    conversations about it.
    """
    is_large = run.model.d_model >= LARGE
    run.num_steps = 5
    # Each kind of layer once at least.
    period, first = len(run.model.pattern), len(run.model.first)
    run.model.num_layers = max(2, period) * run.mesh.stage + first
    run.model.d_model = 64
    run.model.head_dim = 4
    has_experts = getattr(run.model, "moe", None) is not None
    run.model.d_ff = 32 if has_experts else 128
    for block in _blocks(run):
        if getattr(block.feed_forward, "d_ff", None) is not None:
            block.feed_forward.d_ff = 32
        if getattr(block.mixer, "window", None) is not None:
            block.mixer.window = 16
    # A pair is whole, and those of the standard library have about 150 bytes.
    is_paired = any(source.rejected_field is not None for source in run.data.sources.values())
    seq_len = 256 if is_paired else 64
    if run.layout.microbatch_tokens is not None:
        # As many sequences at a time as before.
        run.layout.microbatch_tokens = max(1, seq_len * run.layout.microbatch_tokens // run.data.seq_len)
    run.data.seq_len = seq_len
    run.checkpoint.every_steps = 5
    run.eval.every_steps = 5
    run.metrics.log_every_steps = 1
    if is_large:
        # Files that every installation has: the run must not download anything.
        chats = [source for source in run.data.sources.values() if source.messages_field is not None]
        for source in chats:
            source.path = "stdlib_chats" if source.rejected_field is None else "stdlib_pairs"
        if chats:
            run.model.vocab_size = 264  # divides over 8 devices
            run.data.tokenizer = "bytes_chat"
        else:
            run.model.vocab_size = 256
            run.data.path = "stdlib"
            run.data.tokenizer = "bytes"


def debug(run: fdl.Config[Run]) -> None:
    """Shrinks the run to five steps of two narrow layers, so that a laptop runs every code path of this
    config.

    A model for accelerators also gets few heads and experts, `mesh.data=auto`, and byte-level text of the
    standard library.
    """
    # Read before the fields below change: `is_large` must not judge the shrunk model.
    is_large, moe, head_dim = run.model.d_model >= LARGE, getattr(run.model, "moe", None), run.model.head_dim
    small(run)
    run.model.num_layers = max(2, len(run.model.pattern)) + len(run.model.first)
    run.model.head_dim = head_dim
    run.data.global_batch = 8
    if not is_large:
        return
    # The devices of a laptop, whatever mesh the config is for.
    run.mesh.data = "auto"
    run.mesh.expert = 1
    run.layout.microbatches = 1
    run.layout.microbatch_tokens = None
    run.model.num_heads = 4
    run.model.num_kv_heads = 2
    run.model.head_dim = 16
    mixtures: list[Any] = [moe, *(block.feed_forward for block in _blocks(run))]
    for experts in mixtures:
        if hasattr(experts, "num_experts"):
            experts.num_experts = 8
            experts.top_k = 2


def _blocks(run: fdl.Config[Run]) -> list[Any]:
    """Configs of the blocks of a model that has a pattern, each once."""
    return [*run.model.first, *run.model.pattern]


def lora(run: fdl.Config[Run]) -> None:
    """Freezes the model and trains an adapter of low rank beside every matrix of its layers."""
    run.adapter = fdl.Config(LoRA)


def dpo(run: fdl.Config[Run]) -> None:
    """Learns from preference pairs, against the model without its adapter."""
    run.objective = fdl.Config(DPO)


def distill(run: fdl.Config[Run]) -> None:
    """Learns what a teacher says of each token, stored beforehand by `jtrain data reference`."""
    run.objective = fdl.Config(Distillation)


def stream(run: fdl.Config[Run]) -> None:
    """Writes the weights into a folder of the workdir every 100 steps, by the names of Hugging Face files."""
    run.weight_stream = fdl.Config(WeightStreamSpec)


def profile(run: fdl.Config[Run]) -> None:
    """Traces five steps once clocks and caches are warm; the report is profile/20/report.html."""
    run.profile.steps = (20, 25)
