"""Makes the reference directory of Qwen3-MoE with torch and transformers; the tests that read it need neither.

    PYTHON_WITH_TORCH tests/golden/hf/make_moe.py

As make.py's cases, and besides them in `reference.npz`: every layer's router logits, and transformers' load-balancing
loss of them by layer and row. Made with torch 2.13.0 and transformers 4.57.6; the loss has no balancing term in it.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

CONFIG = Qwen3MoeConfig(
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


def make(folder: Path) -> None:
    """Writes the directory."""
    torch.manual_seed(3)
    CONFIG._attn_implementation = "eager"
    model = Qwen3MoeForCausalLM(CONFIG).float()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.copy_(1.0 + 0.2 * torch.randn(weight.shape))
            else:
                weight.copy_(torch.randn(weight.shape) * (1.0 if "embed" in path else 1.2 * weight.shape[1] ** -0.5))
    tokens = torch.randint(0, CONFIG.vocab_size, (BATCH, LENGTH))
    out = model(input_ids=tokens, use_cache=False, output_router_logits=True)
    loss = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    folder.mkdir(exist_ok=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "model.safetensors").chmod(0o644)
    router = torch.stack([logits.view(BATCH, LENGTH, -1) for logits in out.router_logits]).detach()
    top_k = CONFIG.num_experts_per_tok
    balance = [
        [load_balancing_loss_func((row,), CONFIG.num_experts, top_k).item() for row in layer] for layer in router
    ]
    arrays = {
        "tokens": tokens.numpy().astype(np.int32),
        "logits": out.logits.detach().numpy(),
        "loss": np.float32(loss.item()),
        "router_logits": router.numpy(),
        "balance": np.array(balance, np.float32),
    }
    arrays |= {f"grad/{path}": weight.grad.numpy() for path, weight in model.named_parameters()}
    np.savez_compressed(folder / "reference.npz", **arrays)
    print(f"loss {loss.item():.4f}, logits' deviation {out.logits.std().item():.2f}, balance {balance}")
    chosen = router.topk(top_k).indices.flatten().bincount(minlength=CONFIG.num_experts)
    print(f"tokens of each expert: {chosen.tolist()}")


if __name__ == "__main__":
    make(Path(__file__).parent / "qwen3_moe")
