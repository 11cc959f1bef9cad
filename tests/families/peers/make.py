"""Makes the golden arrays of every family with torch and transformers; the tests that read them need neither.

    PYTHONPATH=jtrain/hf/peers PYTHON_WITH_TORCH tests/families/peers/make.py [--full FOLDER] [NAME]...

Each case of cases.json is a `model_type` of transformers with its default config, shrunk by
jtrain/hf/peers/shrink.py, and fields set so that what a family can do shows: multipliers that are not 1,
biases, several groups of experts. A case with a name of its own sets what the defaults of a class leave
alone.

configs.json gets its config.json; golden/NAME.npz what transformers computes with weights that follow from
the names of the tensors: of both batches the mean loss, logits and gradients as `summary` in
jtrain/hf/peers/draw.py has them. With --full FOLDER the whole directory with config.json, model.safetensors
and reference.npz is left in FOLDER/NAME. tests/golden/hf/setup.sh makes the Python and runs this script. Made
with torch 2.13.0 and transformers 5.23.0.
"""

import argparse
import json
import sys
import tempfile
import traceback
from pathlib import Path

import numpy as np
import reference
import torch
from draw import summary

HERE = Path(__file__).parents[1]
CASES = json.loads((HERE / "cases.json").read_text())


def golden(folder: Path) -> dict[str, np.ndarray]:
    """The arrays of one golden file."""
    full = np.load(folder / "reference.npz")
    out = {"recipe": np.array((folder / "recipe.json").read_text())}
    for label in ("unpacked", "packed"):
        prefix = f"{label}/grad/"
        grads = {key.removeprefix(prefix): full[key] for key in full if key.startswith(prefix)}
        arrays = summary(full[f"{label}/logits"], full[f"{label}/loss"], grads)
        out |= {"names": np.array(json.dumps(sorted(grads)))}
        out |= {f"{label}/{key}": value for key, value in arrays.items()}
    return out


def main() -> None:
    """Makes the cases named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--full", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    configs_path = HERE / "configs.json"
    failed = {}
    for name in args.names or CASES:
        fields = dict(CASES[name])
        kind = fields.pop("model_type")
        with tempfile.TemporaryDirectory() as scratch:
            folder = args.full / name if args.full else Path(scratch)
            try:
                facts = reference.write_reference(reference.small_config(kind, fields), folder, 0)
                arrays = golden(folder)
            except Exception as error:  # the other cases are made all the same
                failed[name] = f"{type(error).__name__}: {error}"
                print(f"{name}: FAILED {failed[name][:300]}", flush=True)
                (HERE / f"golden/{name}.npz").unlink(missing_ok=True)
                traceback.print_exc()
                continue
            configs = json.loads(configs_path.read_text()) if configs_path.is_file() else {}
            configs[name] = json.loads((folder / "config.json").read_text())
            configs_path.write_text(json.dumps(configs, indent=1, sort_keys=True) + "\n")
            np.savez_compressed(HERE / "golden" / f"{name}.npz", **arrays)
        print(f"{name}: {json.dumps(facts)}", flush=True)
    sys.exit(f"{len(failed)} failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
