"""Fine-tuning of all weights of Llama 3.2 1B on conversations, for one device of 80 GB, or several.

    jtrain hf import --from models/Llama-3.2-1B-Instruct --config=sft_llama1b --workdir runs/chat
    python -m jtrain.check --config=sft_llama1b
    python -m jtrain.launch --config=sft_llama1b --set data.sources.chats.path='/my/chats/*.jsonl' --workdir runs/chat
    python -m jtrain.plan --config=sft_llama1b --device h100

The model is that of `llama1b`, and the folder of the tokenizer has the chat template. Learning rate: that of the
supervised fine-tuning of Llama 3, arXiv:2407.21783, section 4.1.3.
"""

import fiddle as fdl

from jtrain.config.load import load_config
from jtrain.config.run import Run
from jtrain.data import Source


def sft_llama1b() -> fdl.Config[Run]:
    """1.24 billion parameters, 65,536 tokens a step, of which the answers are learned."""
    run = load_config("llama1b")
    run.num_steps = 1000
    run.optimizer.peak_lr = 1e-5
    run.optimizer.warmup_steps = 0.03
    run.data.path = None
    run.data.sources = {"chats": fdl.Config(Source, path="chats/*.jsonl", messages_field="messages")}
    run.data.tokenizer = "models/Llama-3.2-1B-Instruct"
    run.data.global_batch = 16
    run.data.eval_fraction = 0.02
    run.checkpoint.every_steps = 200
    run.eval.every_steps = 200
    run.eval.first = True
    run.eval.prompts = ("What is a compiler?",)
    return run
