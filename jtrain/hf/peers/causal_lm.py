"""Runs under another Python, with torch and transformers: random weights of a configuration, and what its own class
computes with them.

    python causal_lm.py CONFIG.json DOCUMENTS.json OUT

CONFIG.json is a model's configuration, or {"model_type": ...} with some of its fields. DOCUMENTS.json is a list of
lists of token ids. OUT gets `weights/` and `gradients/`, both as `save_pretrained` writes a model, with the gradients
in the place of the weights, and `outputs.npz`: `logits` of all documents one after another, each computed alone, and
`loss`, the mean cross entropy of the next tokens in nats. All in float32.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

os.environ["HF_HUB_OFFLINE"] = "1"


def main(config_path: str, documents_path: str, out: str) -> None:
    """Writes OUT."""
    fields = json.loads(Path(config_path).read_text("utf-8"))
    documents = json.loads(Path(documents_path).read_text("utf-8"))
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    draw_weights(model)
    model.train(False)
    model.save_pretrained(Path(out, "weights"), max_shard_size="50GB")
    logits, total, count = [], torch.zeros(()), 0
    for document in documents:
        ids = torch.tensor([document])
        computed = model(input_ids=ids, use_cache=False).logits[0].float()
        logits.append(computed.detach().numpy())
        total = total + torch.nn.functional.cross_entropy(computed[:-1], ids[0, 1:], reduction="sum")
        count += len(document) - 1
    loss = total / count
    loss.backward()
    np.savez(Path(out, "outputs.npz"), logits=np.concatenate(logits), loss=loss.detach().numpy())
    # In the place of the weights, gradients are renamed, split and joined on saving as weights are.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(Path(out, "gradients"), max_shard_size="50GB")


def draw_weights(model: torch.nn.Module) -> None:
    """Draws every parameter, and moves each vector from its first value: scales of one and biases of zero would
    hide that they are not read.
    """
    generator = torch.Generator().manual_seed(1)

    def noise(value: torch.Tensor, std: float) -> torch.Tensor:
        return std * torch.randn(value.shape, generator=generator)

    with torch.no_grad():
        for value in model.parameters():
            if value.ndim >= 2:
                value.copy_(noise(value, value.shape[-1] ** -0.5))
            else:
                value.add_(noise(value, 0.2))
        for name, value in model.named_buffers():
            if name.endswith("bias") and value.is_floating_point():
                value.add_(noise(value, 0.2))


if __name__ == "__main__":
    main(*sys.argv[1:])
