"""Makes the reference directories of Llama and Qwen3 with torch and transformers; tests that read them need
neither.

    tests/golden/hf/setup.sh              # makes the environments and runs this script and make_moe.py
    PYTHON_WITH_TORCH tests/golden/hf/make.py

Each case is a model directory as transformers 5 saves it, plus `reference.npz`: tokens, logits, mean cross
entropy of the next token, and its gradient for every tensor, all float32 on a CPU. Under transformers 4 the
script writes only `config.v4.json`, the same configuration in the form of version 4. Made with torch 2.13.0,
transformers 5.23.0 and 4.57.6.

Weights are drawn larger than a fresh model's, so that attention is sharp and the logits spread: a wrong
rotation or head order then shows in the first digit. `original_max_position_embeddings` is half the sequence,
and the frequencies fall into all three ranges of Llama 3's scaling: kept, blended, divided.
"""

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

VERSION = int(transformers.__version__.split(".")[0])

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
BATCH, LENGTH = 2, 128


def rope(theta: float, scaling: dict | None = None) -> dict:
    """Arguments of a configuration class, which got other names in version 5."""
    if VERSION == 4:
        return {"rope_theta": theta, "rope_scaling": scaling}
    return {"rope_parameters": {"rope_theta": theta, **(scaling or {"rope_type": "default"})}}


CASES: dict[str, type[PreTrainedModel]] = {
    "llama": LlamaForCausalLM,
    "llama_tied": LlamaForCausalLM,
    "qwen3": Qwen3ForCausalLM,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, **HEADS, **rope(500.0, LLAMA3)),
    "llama_tied": LlamaConfig(
        **SHAPE, **HEADS, **rope(500.0, LLAMA3), rms_norm_eps=1e-5, tie_word_embeddings=True
    ),
    "qwen3": Qwen3Config(**SHAPE, **HEADS, **rope(1_000.0)),
}


def make(name: str, folder: Path) -> None:
    """Writes one case."""
    torch.manual_seed(list(CASES).index(name))
    kind, config = CASES[name], CONFIGS[name]
    config._attn_implementation = "eager"
    model = kind(config).float()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.copy_(1.0 + 0.2 * torch.randn(weight.shape))
            else:
                weight.copy_(
                    torch.randn(weight.shape) * (1.0 if "embed" in path else 1.2 * weight.shape[1] ** -0.5)
                )
        if config.tie_word_embeddings:
            model.get_input_embeddings().weight.mul_(0.3)
    tokens = torch.randint(0, config.vocab_size, (BATCH, LENGTH))
    logits = model(input_ids=tokens, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    folder.mkdir(exist_ok=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "model.safetensors").chmod(0o644)
    arrays = {
        "tokens": tokens.numpy().astype(np.int32),
        "logits": logits.detach().numpy(),
        "loss": np.float32(loss.item()),
    }
    arrays |= {f"grad/{path}": weight.grad.numpy() for path, weight in model.named_parameters()}
    np.savez_compressed(folder / "reference.npz", **arrays)
    print(f"{name}: loss {loss.item():.4f}, logits' standard deviation {logits.std().item():.2f}")


def make_config(name: str, folder: Path) -> None:
    """Writes the configuration of one case as version 4 saves it beside weights."""
    config = CONFIGS[name]
    config.architectures, config.dtype = [CASES[name].__name__], "float32"
    (folder / "config.v4.json").write_text(json.dumps(json.loads(config.to_json_string()), indent=2) + "\n")


if __name__ == "__main__":
    for case in CASES:
        (make_config if VERSION == 4 else make)(case, Path(__file__).parent / case)
