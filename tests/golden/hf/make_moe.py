"""Makes the reference directories of Qwen3-MoE with torch and transformers; the tests that read them need
neither.

    tests/golden/hf/setup.sh              # makes the environments and runs make.py and this script
    PYTHON_WITH_TORCH tests/golden/hf/make_moe.py

`qwen3_moe` is written by transformers 4. Under transformers 5 the script loads it and saves the same model as
`qwen3_moe_v5`: the weights are equal, config.json spells `num_experts` as `num_local_experts`. Each directory
  has the
files of make.py's cases and besides them, in `reference.npz`, every layer's router logits and transformers'
load-balancing loss of the logits by layer and row. The loss has no balancing term. Made with torch 2.13.0,
transformers 4.57.6 and 5.23.0.
"""

from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

VERSION = int(transformers.__version__.split(".")[0])
CONFIG = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=40,  # of dense layers, of which there are none
    moe_intermediate_size=16,
    num_experts=8,
    num_experts_per_tok=3,
    norm_topk_prob=True,
    router_aux_loss_coef=0.0,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    rope_theta=1_000.0,
    tie_word_embeddings=False,
)
BATCH, LENGTH = 2, 64


def fresh_model() -> Qwen3MoeForCausalLM:
    """A model with random weights, drawn larger than usual, so that errors show in the logits."""
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG, attn_implementation="eager")).float()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.copy_(1.0 + 0.2 * torch.randn(weight.shape))
            else:
                weight.copy_(
                    torch.randn(weight.shape) * (1.0 if "embed" in path else 1.2 * weight.shape[1] ** -0.5)
                )
    return model


def gradients(model: Qwen3MoeForCausalLM) -> dict[str, np.ndarray]:
    """Gradients by the names of the saved tensors: version 5 joins all experts of a layer in memory, not in
    files.
    """
    out: dict[str, np.ndarray] = {}
    for path, weight in model.named_parameters():
        grad = weight.grad.numpy()
        if path.endswith(("experts.gate_up_proj", "experts.down_proj")):
            prefix, _, joined = path.rpartition(".")
            names = ("gate_proj", "up_proj") if joined == "gate_up_proj" else ("down_proj",)
            for expert, matrix in enumerate(grad):
                parts = zip(names, np.split(matrix, len(names)), strict=True)
                out |= {f"{prefix}.{expert}.{name}.weight": part for name, part in parts}
        else:
            out[path] = grad
    return out


def make(model: Qwen3MoeForCausalLM, tokens: torch.Tensor, folder: Path) -> None:
    """Writes one directory."""
    config = model.config
    out = model(input_ids=tokens, use_cache=False, output_router_logits=True)
    loss = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    folder.mkdir(exist_ok=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "model.safetensors").chmod(0o644)
    router = torch.stack([logits.view(BATCH, LENGTH, -1) for logits in out.router_logits]).detach()
    top_k = config.num_experts_per_tok
    balance = [
        [load_balancing_loss_func((row,), config.num_experts, top_k).item() for row in layer]
        for layer in router
    ]
    arrays = {
        "tokens": tokens.numpy().astype(np.int32),
        "logits": out.logits.detach().numpy(),
        "loss": np.float32(loss.item()),
        "router_logits": router.numpy(),
        "balance": np.array(balance, np.float32),
    }
    arrays |= {f"grad/{path}": grad for path, grad in gradients(model).items()}
    np.savez_compressed(folder / "reference.npz", **arrays)
    print(f"loss {loss.item():.4f}, logits' deviation {out.logits.std().item():.2f}, balance {balance}")
    chosen = router.topk(top_k).indices.flatten().bincount(minlength=config.num_experts)
    print(f"tokens of each expert: {chosen.tolist()}")


if __name__ == "__main__":
    here = Path(__file__).parent
    if VERSION == 4:
        torch.manual_seed(3)
        model = fresh_model()
        make(model, torch.randint(0, CONFIG["vocab_size"], (BATCH, LENGTH)), here / "qwen3_moe")
    else:
        model = Qwen3MoeForCausalLM.from_pretrained(here / "qwen3_moe", attn_implementation="eager")
        tokens = torch.from_numpy(np.load(here / "qwen3_moe" / "reference.npz")["tokens"]).long()
        make(model, tokens, here / "qwen3_moe_v5")
