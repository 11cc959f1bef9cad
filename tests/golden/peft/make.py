"""Makes the reference adapters of Llama, Qwen3 and Qwen3-MoE with torch, transformers and peft; tests that read them
need none.

    tests/golden/hf/setup.sh              # makes the environments v4 and v5, and runs this script in both
    PYTHON_WITH_PEFT tests/golden/peft/make.py

Each case is a folder as peft saves it, on the weights of tests/golden/hf, plus `reference.npz`: logits and the
gradients of the mean cross entropy by A and B, on a CPU in float64, but for what transformers computes in float32, so
that next to nothing but jtrain's own rounding is compared; stored in float32. `llama` has an adapter beside every
linear layer, `qwen3` beside three, with the scale of rsLoRA. `qwen3_moe` has one beside each expert's matrices,
which are modules in transformers 4; in `qwen3_moe_v5` they are two parameters of transformers 5, gate and up in one
with one A.
A and B are drawn large, so that logits differ from those of the base.
Made with torch 2.13.0, transformers 4.57.6 (`qwen3_moe`) and 5.23.0, and peft 0.21.2.
"""

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
COMMON = dict(bias="none", task_type="CAUSAL_LM", lora_dropout=0.0)
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES = {
    "4": {
        "qwen3_moe": LoraConfig(
            r=2, lora_alpha=4, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"], **COMMON
        )
    },
    "5": {
        "llama": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", **COMMON),
        "qwen3": LoraConfig(
            r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"], use_rslora=True, **COMMON
        ),
        "qwen3_moe_v5": LoraConfig(
            r=2, lora_alpha=4, target_modules=["q_proj"], target_parameters=EXPERTS, **COMMON
        ),
    },
}


def main() -> None:
    """Makes every case of this version of transformers."""
    torch.set_num_threads(1)
    for name, config in CASES[transformers.__version__[0]].items():
        base = HERE.parent / "hf" / name
        # Version 5 multiplies experts in one kernel, which has no float64.
        options = dict(experts_implementation="eager") if config.target_parameters else {}
        base_model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64, **options)
        model = get_peft_model(base_model, config)
        generator = torch.Generator().manual_seed(0)
        trained = {key: value for key, value in model.named_parameters() if value.requires_grad}
        for value in trained.values():
            value.data = 0.2 * torch.randn(value.shape, generator=generator).double()
        tokens = torch.from_numpy(np.load(base / "reference.npz")["tokens"]).long()
        out = model(input_ids=tokens, labels=tokens)
        out.loss.backward()
        model.float().save_pretrained(HERE / name)
        (HERE / name / "README.md").unlink(missing_ok=True)
        config_file = HERE / name / "adapter_config.json"
        # Where the base lies on this machine says nothing, and a set has no order.
        fields = json.loads(config_file.read_text()) | {"base_model_name_or_path": f"../../hf/{name}"}
        fields["target_modules"] = sorted(fields["target_modules"])
        config_file.write_text(json.dumps(fields, indent=2) + "\n")
        gradients = {
            f"grad/{key.replace('.default', '')}": value.grad.float().numpy()
            for key, value in trained.items()
        }
        # Logits of the first row alone: they are the larger part of the file.
        logits = out.logits.detach().float().numpy()[:1]
        np.savez_compressed(HERE / name / "reference.npz", logits=logits, loss=out.loss.item(), **gradients)


if __name__ == "__main__":
    main()
