"""Makes docs/families.md: how far each family of models is from transformers' own class.

    python docs/make_families_page.py [CASE ...]

Compares each case with its golden arrays, as tests/families/test_golden.py does, and writes its row; other rows
stay. Takes about 10 s of a core for each case, and 20 minutes for all.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402 - after JAX_PLATFORMS and the path

from jtrain.hf.prove import PEER, SMALL  # noqa: E402 - after JAX_PLATFORMS and the path
from jtrain.model.families import FAMILIES, LACKING  # noqa: E402 - after JAX_PLATFORMS and the path
from tests.families.test_golden import CONFIGS, SUPPORTED, golden, results  # noqa: E402 - after JAX_PLATFORMS and the path

PAGE = ROOT / "docs" / "families.md"
HEAD = f"""# Families beside transformers

For cases of `tests/families/cases.json`, those that were measured last, the largest distance in float32 from what
transformers 5.23 computes with the same weights, each document alone there, in packed rows here: of logits relative
to the largest, of the loss, and of the norm of each parameter's gradient, relative to that norm (or {SMALL} of all
together, where a gradient is smaller). `tests/families/test_golden.py` asks for {PEER} of each. Of rows with one
document and of packed ones, the larger is here.

`python docs/make_families_page.py` writes this page.

| case | family | logits | loss | gradients |
|---|---|---|---|---|
"""


def distances(name: str) -> tuple[float, float, float]:
    """Largest distance of logits, loss and gradients of a case, over both batches."""
    largest = np.zeros(3)
    for label, got in results(name).items():
        want: dict[str, Any] = {key: golden(name)[f"{label}/{key}"] for key in got}
        logits = np.abs(got["logits"] - want["logits"]).max() / np.abs(want["logits"]).max()
        loss = abs(got["loss"] / want["loss"] - 1)
        norms = want["gradients"][:, 0]
        bounds = np.maximum(norms, SMALL * np.linalg.norm(norms))
        gradients = (np.abs(got["gradients"][:, 0] - norms) / bounds).max()
        largest = np.maximum(largest, [logits, loss, gradients])
    return float(largest[0]), float(largest[1]), float(largest[2])


def main() -> None:
    """Compares the named cases, or all, and writes the page after each."""
    text = PAGE.read_text() if PAGE.is_file() else ""
    matches = re.finditer(r"^\| `(\w+)` \| `.*$", text, re.MULTILINE)
    rows = {match[1]: match[0] for match in matches}
    for name in sys.argv[1:] or SUPPORTED:
        logits, loss, gradients = distances(name)
        kind = CONFIGS[name]["model_type"]
        rows[name] = f"| `{name}` | `{kind}` | {logits:.0e} | {loss:.0e} | {gradients:.0e} |"
        print(rows[name], flush=True)
        kept = [rows[case] for case in sorted(rows) if case in SUPPORTED]
        lacking = [f"| `{kind}` | {reason} |" for kind, reason in sorted(LACKING.items())]
        tail = f"{len(FAMILIES)} families are there. What jtrain lacks for others:"
        table = "| model_type | lacks |\n|---|---|"
        PAGE.write_text("\n".join([HEAD.rstrip(), *kept, "", tail, "", table, *lacking]) + "\n")


if __name__ == "__main__":
    main()
