"""An adapter of low rank on Llama 3.1 70B in blocks of four bits (QLoRA), for one device of 80 GB, or more.

    jtrain hf import --from models/Llama-3.1-70B --config=qlora_llama70b --set adapter=None --set data.path=stdlib \
        --set precision.param_dtype=bfloat16 --workdir runs/base
    python -m jtrain.launch --config=qlora_llama70b --set adapter.base=runs/base --set data.path='/my/*.jsonl'
    python -m jtrain.plan --config=qlora_llama70b --device h100 --count 1

The model is that of `llama70b`. Blocks, targets and learning rate: arXiv:2305.14314, sections 3 and 4 and table 9.
"""

import fiddle as fdl

from jtrain.checkpoint import CheckpointSpec
from jtrain.config.run import EvalSpec, Run
from jtrain.data import PackedText
from jtrain.layout.layout import LayoutSpec
from jtrain.layout.mesh import MeshSpec
from jtrain.model.adapters.lora import LoRA
from jtrain.model.rope import Llama3Scaling, RopeSpec
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Cosine
from jtrain.telemetry.metrics import MetricsSpec


def qlora_llama70b() -> fdl.Config[Run]:
    """68.5 billion frozen parameters in 38.5 GB of blocks, 2.1 billion in bfloat16, and 414 million trained ones."""
    return fdl.Config(
        Run,
        seed=0,
        num_steps=1000,  # also the length of the learning-rate schedule; warm-up is a fraction of it
        mesh=fdl.Config(MeshSpec),
        layout=fdl.Config(
            LayoutSpec,
            zero_stage=0,  # 43 GB of weights on each device, and nothing is gathered
            remat="full",
            microbatch_tokens=4096,  # 1 sequence
        ),
        model=fdl.Config(
            Transformer,
            num_layers=80,
            d_model=8192,
            num_heads=64,
            num_kv_heads=8,
            head_dim=128,
            d_ff=28672,
            vocab_size=128256,
            rope=fdl.Config(
                RopeSpec,
                theta=500_000.0,
                scaling=fdl.Config(
                    Llama3Scaling,
                    factor=8.0,
                    low_freq_factor=1.0,
                    high_freq_factor=4.0,
                    original_seq_len=8192,
                ),
            ),
            norm_eps=1e-5,
            qk_norm=False,
            tie_embeddings=False,
        ),
        adapter=fdl.Config(LoRA, rank=32, alpha=64.0, targets=("*",), base_dtype="nf4"),
        optimizer=fdl.Config(
            AdamW, peak_lr=1e-4, warmup_steps=0.03, schedule=fdl.Config(Cosine), weight_decay=0.0
        ),
        data=fdl.Config(
            PackedText,
            path="corpus/*.jsonl",
            tokenizer="tokenizer.json",
            seq_len=4096,
            global_batch=16,  # 65,536 tokens per step
        ),
        checkpoint=fdl.Config(CheckpointSpec, every_steps=200, keep_last=2),
        eval=fdl.Config(EvalSpec, every_steps=200),
        metrics=fdl.Config(MetricsSpec, log_every_steps=10),
    )


def long_context(run: fdl.Config[Run]) -> None:
    """One sequence of 32,768 tokens at a time; what layers save for the backward pass is in host memory."""
    run.data.seq_len = 32_768
    run.data.global_batch = 1
    run.layout.microbatch_tokens = 32_768
    run.layout.offload.activations = 1.0
