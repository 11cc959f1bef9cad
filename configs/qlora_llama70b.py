"""An adapter of low rank on Llama 3.1 70B in blocks of four bits (QLoRA), for one device of 80 GB, or more.

    jtrain hf import --from models/Llama-3.1-70B --config=qlora_llama70b --set adapter=None --set data.path=stdlib \
        --set precision.param_dtype=bfloat16 --workdir runs/base
    python -m jtrain.launch --config=qlora_llama70b --set adapter.base=runs/base --set data.path='/my/*.jsonl'
    python -m jtrain.plan --config=qlora_llama70b --device h100 --count 1

The model is that of `llama70b`, all else that of `lora_llama8b`. Blocks, targets and learning rate: arXiv:2305.14314,
sections 3 and 4 and table 9.
"""

import fiddle as fdl

from jtrain.config.load import load_config
from jtrain.config.run import Run
from jtrain.model.adapters.lora import LoRA


def qlora_llama70b() -> fdl.Config[Run]:
    """68.5 billion frozen parameters in 38.5 GB of blocks, 2.1 billion in bfloat16, and 414 million trained ones."""
    run = load_config("lora_llama8b")
    run.model = load_config("llama70b").model
    run.layout.microbatch_tokens = 4096  # 1 sequence
    run.adapter = fdl.Config(LoRA, rank=32, alpha=64.0, targets=("*",), base_dtype="nf4")
    run.optimizer.peak_lr = 1e-4
    return run


def long_context(run: fdl.Config[Run]) -> None:
    """One sequence of 131,072 tokens at a time: what layers save and the moments are in host memory, A and B in
    bfloat16, and hidden units of the feed-forward layers exist for 4096 positions at a time.
    """
    run.data.seq_len = 131_072
    run.data.global_batch = 1
    run.layout.microbatch_tokens = None
    run.layout.mlp_chunk = 4096
    run.layout.offload.activations = 1.0
    run.layout.offload.optimizer = 1.0
    run.precision.param_dtype = "bfloat16"
