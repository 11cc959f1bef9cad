"""Preferences for Qwen3 8B on one device of 80 GB, or more: as many as are there.

    jtrain hf import --from models/Qwen3-8B --config=dpo_qwen3_8b --set adapter=None --workdir runs/base
    python -m jtrain.launch --config=dpo_qwen3_8b --set adapter.base=runs/base --set data.tokenizer=models/Qwen3-8B \
        --set data.sources.pairs.path='/my/pairs/*.jsonl'
    python -m jtrain.plan --config=dpo_qwen3_8b --device h100 --count 1

The model is that of `qwen3_8b`; adapter, layout and batch are those of `lora_llama8b`. The adapter switched off is the
reference, so that no second model is held.
"""

import fiddle as fdl

from jtrain.config.load import load_config
from jtrain.config.run import Run
from jtrain.data import Source
from jtrain.step.objective import DPO


def dpo_qwen3_8b() -> fdl.Config[Run]:
    """8.19 billion frozen parameters in bfloat16, and 44 million trained ones in float32."""
    run = load_config("lora_llama8b")
    run.model = load_config("qwen3_8b").model
    run.objective = fdl.Config(DPO, beta=0.1)
    run.optimizer.peak_lr = 5e-6
    run.optimizer.warmup_steps = 0.1
    run.data.path = None
    run.data.sources = {
        "pairs": fdl.Config(Source, path="pairs/*.jsonl", messages_field="chosen", rejected_field="rejected")
    }
    return run
