"""Builds a small model of any causal language model of transformers with drawn weights, and writes what it
computes.

    PYTHON_WITH_TORCH reference.py SOURCE OUT [--set FIELD=JSON]... [--seed N] [--whole]

SOURCE is a config.json, a folder that has one, or a `model_type`. OUT gets config.json (shrunk; see
shrink.py), model.safetensors and reference.npz: two batches, `unpacked` (one document per row) and `packed`
(several, then padding), each with token_BL, target_BL, position_BL, segment_BL, logits, the mean cross
entropy of the targets, and its gradient for each saved tensor. Every document goes through the model alone,
so nothing of packing is believed. All is float32 on a CPU, with eager attention and eager experts.

Weights follow from the names of the saved tensors alone (`draw`), so that a test can draw them again without
torch. Norms, biases, sinks, decay rates and correction biases are drawn like everything else: as transformers
makes them they are ones and zeros, with which a missing one shows nowhere.
"""

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from draw import IGNORED, batches, draw
from safetensors.numpy import load_file, save_file
from shrink import VOCABULARY, shrink
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_PRETRAINING_MAPPING


def main() -> int:
    """Writes OUT; returns the exit code, 2 with one line on stderr where the user can mend something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("out", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=JSON", dest="sets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--whole", action="store_true", help="the config as it is, not shrunk")
    args = parser.parse_args()
    try:
        sets = dict(split_set(text) for text in args.sets)
        config = small_config(args.source, sets, shrinks=not args.whole)
        facts = write_reference(config, args.out, args.seed)
    except Refused as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(facts))
    return 0


class Refused(Exception):
    """Raised with a line for the user."""


def split_set(text: str) -> tuple[str, object]:
    """Field and value of `FIELD=JSON`."""
    field, _, value = text.partition("=")
    try:
        return field, json.loads(value)
    except ValueError:
        raise Refused(f"--set {text}: give FIELD=JSON, like --set attention_bias=true.") from None


def small_config(source: str, sets: dict, *, shrinks: bool = True) -> dict:
    """The contents of config.json to prove: of a file, a folder or a `model_type`.

    The text part of a model that sees or hears is taken.
    """
    if source in CONFIG_MAPPING:
        config = json.loads(CONFIG_MAPPING[source]().to_json_string(use_diff=True))
    else:
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise Refused(
                f"{source} is no file, no folder with a config.json, and no model_type of transformers "
                f"{transformers.__version__}."
            )
        config = json.loads(path.read_text())
    if isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    config = {**config, **sets}
    full = build_config(config).to_dict()
    if shrinks:
        config = {**shrink(config, full), **sets}
    config["architectures"] = [model_class(build_config(config)).__name__]
    return config


def build_config(config: dict) -> transformers.PretrainedConfig:
    """The config object of transformers."""
    model_type = config.get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise Refused(
            f"config.json: model_type={model_type!r} is unknown to transformers {transformers.__version__}."
        )
    # transformers writes an infinite number as an object, and reads it back only with a file.
    numbers = json.loads(
        json.dumps(config), object_hook=lambda o: float(o["__float__"]) if "__float__" in o else o
    )
    return CONFIG_MAPPING[model_type].from_dict(numbers)


def model_class(config: transformers.PretrainedConfig) -> type[transformers.PreTrainedModel]:
    """The causal language model of a config."""
    if (kind := MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)) is not None:
        return kind
    # Mistral 4 is only on the list of models that are pretrained.
    kind = MODEL_FOR_PRETRAINING_MAPPING.get(type(config), None)
    if kind is not None and kind.__name__.endswith("ForCausalLM"):
        return kind
    raise Refused(f"transformers has no causal language model of model_type={config.model_type!r}.")


def center_and_scale(name: str, initial: np.ndarray, tied: bool) -> tuple[float, float]:
    """Mean and deviation of a tensor: vectors move from what transformers makes them, matrices keep the size
    of activations.
    """
    if initial.ndim < 2 or "bias" in name:
        # Correction biases are added to scores between 0 and 1: larger ones would choose the experts alone.
        return round(
            2 * float(initial.mean())
        ) / 2, 0.05 if "correction" in name or "expert_bias" in name else 0.2
    if ("embed" in name and "out" not in name) or name.endswith("wte.weight"):
        return 0.0, 0.3 if tied else 1.0
    return 0.0, 1.2 * initial.shape[-1] ** -0.5


def build_model(config: dict, out: Path, seed: int) -> tuple[transformers.PreTrainedModel, dict]:
    """Saves config.json and model.safetensors, loads them, returns the model and how tensors were drawn."""
    settings = build_config(config)
    kind = model_class(settings)
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        kind(settings).float().save_pretrained(folder)
        initial = as_published(load_all(Path(folder)))
    tied = bool(config.get("tie_word_embeddings", settings.to_dict().get("tie_word_embeddings")))
    recipe = {
        name: (list(array.shape), *center_and_scale(name, array, tied))
        for name, array in initial.items()
        if np.issubdtype(array.dtype, np.floating)
    }
    drawn = {name: draw(name, tuple(shape), *how, seed) for name, (shape, *how) in recipe.items()}
    out.mkdir(parents=True, exist_ok=True)
    save_file({**initial, **drawn}, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    model, report = kind.from_pretrained(
        out, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    for kind_of_key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[kind_of_key], (kind_of_key, report[kind_of_key])
    if hasattr(model, "set_experts_implementation"):
        with contextlib.suppress(ValueError, AttributeError):
            model.set_experts_implementation("eager")
    compute_decays_exactly(model)
    return model.eval(), recipe


RECURRENT = {
    "torch_chunk_gated_delta_rule": "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention": "recurrent_kimi_delta_attention",
}
"""transformers' delta rules in chunks, and token by token. Decays between tokens of a chunk are differences
of sums there, with errors of 1e-4 for fast heads; those of single tokens are exact."""


def compute_decays_exactly(model: transformers.PreTrainedModel) -> None:
    """Lets a model compute delta rules token by token."""
    module = sys.modules[type(model).__module__]
    for chunked, recurrent in RECURRENT.items():
        if hasattr(module, chunked):
            setattr(module, chunked, getattr(module, recurrent))


def as_published(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors as published checkpoints have them, which transformers reads and saves otherwise.

    Convolutions of OLMo Hybrid have the channels of their projections, not a third of all, and its layers of
    attention name their norms as OLMo 2; dense layers of Kimi Linear are no `block_sparse_moe`.
    """
    out = dict(tensors)
    for name in tensors:
        if name.endswith(".q_conv1d.weight"):
            names = [name.replace(".q_conv", f".{x}_conv") for x in "qkv"]
            channels = [len(tensors[x.replace("_conv1d", "_proj")]) for x in names]
            parts = np.split(np.concatenate([tensors[x] for x in names]), np.cumsum(channels)[:-1])
            out |= dict(zip(names, parts, strict=True))
        layer, suffix, _ = name.partition(".post_feedforward_layernorm")
        if suffix and (norm := out.pop(f"{layer}.feedforward_layer_norm.weight", None)) is not None:
            out[f"{layer}.post_attention_layernorm.weight"] = norm
        layer, suffix, projection = name.partition(".block_sparse_moe.")
        if projection in ("gate_proj.weight", "up_proj.weight", "down_proj.weight"):
            out[f"{layer}.mlp.{projection}"] = out.pop(name)
    return out


def load_all(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor that `save_pretrained` wrote."""
    return {
        name: array
        for path in sorted(folder.glob("*.safetensors"))
        for name, array in load_file(path).items()
    }


def evaluate(model: transformers.PreTrainedModel, batch: dict[str, np.ndarray]) -> tuple[np.ndarray, float]:
    """Logits and mean loss, each document alone; the gradients are added up in the model."""
    num_targets = int((batch["target_BL"] != IGNORED).sum())
    logits, total = None, 0.0
    model.zero_grad(set_to_none=True)
    for row, segments in enumerate(batch["segment_BL"]):
        for segment in range(1, segments.max() + 1):
            columns = np.flatnonzero(segments == segment)
            tokens = torch.from_numpy(batch["token_BL"][row, columns]).long()[None]
            got = model(input_ids=tokens, use_cache=False).logits[0]
            if logits is None:
                logits = np.zeros((*batch["token_BL"].shape, got.shape[-1]), np.float32)
            logits[row, columns] = got.detach().numpy()
            if len(columns) > 1:
                loss = (
                    torch.nn.functional.cross_entropy(got[:-1], tokens[0, 1:], reduction="sum") / num_targets
                )
                loss.backward()
                total += loss.item()
    return logits, total


def gradients(model: transformers.PreTrainedModel) -> dict[str, np.ndarray]:
    """Gradients by the names and in the forms of the saved tensors, which are others than those in memory.

    The weights are replaced by the gradients and saved: whatever transformers joins, splits or transposes on
    the way to a file it does to them as well. Buffers have no gradient: they are saved as NaN, and left out.
    """
    weights = {name: value.detach().clone() for name, value in model.state_dict(keep_vars=True).items()}
    parameters = dict(model.named_parameters())
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for name, value in model.state_dict(keep_vars=True).items():
            if name in parameters or value.requires_grad:
                value.copy_(torch.zeros_like(value) if value.grad is None else value.grad)
            elif value.is_floating_point():
                value.fill_(torch.nan)
        model.save_pretrained(folder)
        saved = as_published(load_all(Path(folder)))
        for name, value in model.state_dict(keep_vars=True).items():
            value.copy_(weights[name])
    return {name: array for name, array in saved.items() if not np.isnan(array).all()}


def write_reference(config: dict, out: Path, seed: int) -> dict:
    """Writes OUT, and returns what is worth a line."""
    model, recipe = build_model(config, out, seed)
    arrays = {}
    facts = {
        "class": type(model).__name__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    for label, batch in batches(seed, min(VOCABULARY, model.config.vocab_size)).items():
        logits, loss = evaluate(model, batch)
        grads = gradients(model)
        arrays |= {f"{label}/{name}": array for name, array in batch.items()}
        arrays |= {f"{label}/logits": logits, f"{label}/loss": np.float64(loss)}
        arrays |= {f"{label}/grad/{name}": array for name, array in grads.items()}
        facts[label] = {"loss": loss, "logits": float(logits.std())}
        facts["zero"] = sorted(name for name, array in grads.items() if not array.any())
    facts |= {
        "layers": config.get("num_hidden_layers"),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    facts["buffers"] = sorted(set(recipe) - set(grads))
    np.savez(out / "reference.npz", **arrays)
    (out / "recipe.json").write_text(json.dumps(recipe))
    return facts


if __name__ == "__main__":
    sys.exit(main())
