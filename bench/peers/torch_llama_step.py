"""The CPU step's baseline: Hugging Face's Llama on torch, trained under bf16 autocast.

Runs in the peers' environment, which setup.sh makes; jtrain is not installed there.

    python torch_llama_step.py --mode eager|compile --threads 2

After warm-up it prints `{"ready": ...}`; then, for each line `N` on standard input, it runs N steps and
prints `{"step_ms": [...], "loss": ...}`. This lets the caller alternate with other programs on the same
cores.
"""

import json
import sys
import time

import torch
import transformers
from protocol import arguments


def main() -> None:
    """Builds the model, warms up, then answers on standard output."""
    args = arguments(mode="eager", threads=1, batch=8, seq_len=512)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    config = transformers.LlamaConfig(
        num_hidden_layers=4,
        hidden_size=256,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        intermediate_size=1024,
        vocab_size=32000,
        max_position_embeddings=args.seq_len,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = transformers.LlamaForCausalLM(config).train()  # parameters in float32
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    token_BL = torch.randint(0, config.vocab_size, (args.batch, args.seq_len))

    def step() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=token_BL, labels=token_BL).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        # To None, torch's default: no pass over the gradients.
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    if args.mode == "compile":
        model = torch.compile(model)
    start = time.perf_counter()
    # Three steps: torch.compile compiles in the first, and may again once gradients exist.
    losses = [step().item() for _ in range(3)]
    print(json.dumps({
        "ready": args.mode,
        "warmup_s": time.perf_counter() - start,
        "first_loss": losses[0],
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }), flush=True)  # fmt: skip

    for line in sys.stdin:
        step_ms = []
        for _ in range(int(line)):
            start = time.perf_counter()
            loss = step().item()
            step_ms.append(1e3 * (time.perf_counter() - start))
        print(json.dumps({"step_ms": step_ms, "loss": loss}), flush=True)


if __name__ == "__main__":
    main()
