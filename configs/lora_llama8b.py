"""An adapter of low rank on Llama 3.1 8B, for one device of 80 GB, or more: as many as are there.

    jtrain hf import --from models/Llama-3.1-8B --config=lora_llama8b --set adapter=None --workdir runs/base
    python -m jtrain.launch --config=lora_llama8b --set adapter.base=runs/base --set data.path='/my/*.jsonl'
    python -m jtrain.plan --config=lora_llama8b --device h100 --count 1

The model is that of `llama8b`. All matrices of the layers have an adapter: arXiv:2305.14314, section 4. Learning
rate: the same, table 9.
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


def lora_llama8b() -> fdl.Config[Run]:
    """8.03 billion frozen parameters in bfloat16, and 42 million trained ones in float32."""
    return fdl.Config(
        Run,
        seed=0,
        num_steps=1000,  # also the length of the learning-rate schedule; warm-up is a fraction of it
        mesh=fdl.Config(MeshSpec),
        layout=fdl.Config(
            LayoutSpec,
            zero_stage=0,  # 16 GB of weights on each device, and nothing is gathered
            remat="full",
            microbatch_tokens=8192,  # 2 sequences: 8 microbatches on one device, 1 on 8
        ),
        model=fdl.Config(
            Transformer,
            num_layers=32,
            d_model=4096,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            d_ff=14336,
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
        adapter=fdl.Config(LoRA, rank=16, alpha=32.0, targets=("*",), base_dtype="bfloat16"),
        optimizer=fdl.Config(
            AdamW, peak_lr=2e-4, warmup_steps=0.03, schedule=fdl.Config(Cosine), weight_decay=0.0
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
