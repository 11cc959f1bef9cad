"""Fine-tunes small models on conversations in a plain loop of torch and transformers, for tests/train/test_sft_peer.py.

    PYTHONPATH=jtrain/hf/peers PYTHON_WITH_TORCH tests/train/peers/sft.py [NAME]...

Each conversation goes through the model alone, unpadded. What is learned is what comes after the generation prompt
of each assistant's turn, through the first stop token; the loss is the mean over all of these tokens of a batch.
AdamW is torch's, with warm-up and half a cosine. Weights follow from the names of the tensors (`draw`), and the
conversations of each batch from tests/train/golden/sft.json, so that the test needs no torch.

golden/sft_NAME.npz gets the losses and the parameters after the last step. tests/golden/hf/setup.sh makes the
Python. Made with torch 2.13.0 and transformers 5.23.0.
"""

import json
import math
import sys
import tempfile
from pathlib import Path

import numpy as np
import reference
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

HERE = Path(__file__).parents[1] / "golden"
TOKENIZER = Path(__file__).parents[3] / "jtrain" / "data" / "chat" / "byte_tokenizer"
SETTINGS = json.loads((HERE / "sft.json").read_text())


def answers(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]]
) -> tuple[list[int], list[int]]:
    """Ids of a conversation, and its labels: what the assistant says, through the stop token; -100 elsewhere."""
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    labels = [-100] * len(ids)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = tokenizer.apply_chat_template(
                messages[:number], add_generation_prompt=True, tokenize=True, return_dict=False
            )
            assert ids[: len(prompt)] == prompt
            end = ids.index(tokenizer.eos_token_id, len(prompt)) + 1
            labels[len(prompt) : end] = ids[len(prompt) : end]
    return ids, labels


def rate(step: int) -> float:
    """Learning rate of an update, from 0 on."""
    warmup, steps, peak = SETTINGS["warmup_steps"], SETTINGS["num_steps"], SETTINGS["peak_lr"]
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / (steps - warmup)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(name: str) -> dict[str, np.ndarray]:
    """Losses and last parameters of one case."""
    case, batches = SETTINGS["cases"][name], SETTINGS["batches"]
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    conversations = [answers(tokenizer, messages) for messages in SETTINGS["conversations"]]
    config = reference.small_config(case["model_type"], case["fields"] | SETTINGS["sizes"])
    with tempfile.TemporaryDirectory() as folder:
        model, recipe = reference.build_model(config, Path(folder), 0)
    parameters = dict(model.named_parameters())
    decayed = [p for p in parameters.values() if p.ndim > 1]
    others = [p for p in parameters.values() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": SETTINGS["weight_decay"]},
            {"params": others, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    losses = []
    for step, numbers in enumerate(batches):
        optimizer.zero_grad()
        batch = [conversations[number] for number in numbers]
        targets = sum(label != -100 for _, labels in batch for label in labels[1:])
        loss = 0.0
        for ids, labels in batch:
            logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].float()
            nats = torch.nn.functional.cross_entropy(
                logits, torch.tensor(labels[1:]), ignore_index=-100, reduction="sum"
            )
            (nats / targets).backward()
            loss += float(nats.detach().double()) / targets
        torch.nn.utils.clip_grad_norm_(parameters.values(), SETTINGS["clip_norm"])
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        losses.append(loss)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        last = reference.load_all(Path(folder))
    arrays = {f"last/{key}": value for key, value in last.items() if key in recipe}
    assert len(arrays) == len(recipe)
    return {
        "losses": np.asarray(losses),
        "config": np.array(json.dumps(config)),
        "recipe": np.array(json.dumps(recipe)),
        **arrays,
    }


def main() -> None:
    """Makes the cases named on the command line, or all."""
    torch.set_num_threads(1)
    for name in sys.argv[1:] or SETTINGS["cases"]:
        arrays = train(name)
        np.savez_compressed(HERE / f"sft_{name}.npz", **arrays)
        print(name, arrays["losses"].round(4).tolist(), flush=True)


if __name__ == "__main__":
    main()
