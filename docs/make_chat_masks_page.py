"""Makes docs/chat_masks.md of the rows that `python -m jtrain.bench chat_masks` measured.

python -m jtrain.bench chat_masks --trl T/trl-1.16.0-*.whl --json bench/results/chat_masks-epyc.json
python docs/make_chat_masks_page.py
"""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "chat_masks.md"
RESULTS = ROOT / "bench" / "results" / "chat_masks-epyc.json"
KINDS = ("two turns", "system", "thinking", "tools")
HEAD = """# Masks beside TRL's

For the {templates} chat templates of the trl 1.16.0 wheel and {count} conversations each, four kinds of them: what
jtrain learns against a scripted model that samples each turn token by token, from the generation prompt through the
stop token. `equal` is learned exactly as it is sampled, `a record a turn` as well, with `on_rewritten_turn=split`;
everything else is refused with the reason that stands there. None of {conversations:,} conversations is learned
otherwise.

The last column is what TRL trains on: the blocks `{{% generation %}}` of its training templates, counted in turns
that jtrain learns, against the same rule. A template without blocks has no such mask.

| all conversations | equal | a record a turn | refused | otherwise |
|---|---|---|---|---|
{totals}

`python docs/make_chat_masks_page.py` writes this page, of {commit}.

| template | two turns | system | thinking | tools | TRL's blocks |
|---|---|---|---|---|---|
"""


def main() -> None:
    """Writes the page."""
    results = json.loads(RESULTS.read_text())
    rows = {row["what"]: row for row in results["rows"]}
    names = sorted({what.partition(",")[0] for what in rows} - {"all"})
    totals = []
    for rule in ("refuse", "split"):
        counts = [
            rows[f"all, {rule}: {v}"]["value"] for v in ("equal", "split equal", "refused", "different")
        ]
        totals.append(
            f"| `on_rewritten_turn={rule}` | " + " | ".join(f"{count:,.0f}" for count in counts) + " |"
        )
    first = rows[f"{names[0]}, refuse, two turns: equal"]
    per_template = len(KINDS) * int(first["unit"].removeprefix("of "))
    head = HEAD.format(
        templates=len(names),
        count=per_template,
        conversations=per_template * len(names),
        totals="\n".join(totals),
        commit=results["commit"][:8],
    )
    lines = [
        f"| {name} | "
        + " | ".join([*(_cell(rows, name, kind) for kind in KINDS), _blocks(rows, name)])
        + " |\n"
        for name in names
    ]
    PAGE.write_text(head + "".join(lines))


def _cell(rows: dict[str, dict[str, Any]], name: str, kind: str) -> str:
    """Returns what becomes of the conversations of one kind, without the counts where all are alike."""
    prefix, cells = f"{name}, split, {kind}: ", []
    for what, row in rows.items():
        if what.startswith(prefix):
            verdict = what.removeprefix(prefix).replace("split equal", "a record a turn")
            verdict = re.sub(r"^refused \((.*)\)$", r"\1", verdict)
            share = f"{row['value']:.0f} {row['unit']}"
            alike = share == f"{row['value']:.0f} of {row['value']:.0f}"
            cells.append(verdict if alike else f"{verdict}: {share}")
    return "; ".join(cells).replace("|", "\\|")


def _blocks(rows: dict[str, dict[str, Any]], name: str) -> str:
    """Returns how the template's own blocks differ from what is sampled."""
    prefix = f"{name}, its blocks: "
    cells = [(what.removeprefix(prefix), row) for what, row in rows.items() if what.startswith(prefix)]
    if not cells:
        return "-"
    if [verdict for verdict, _ in cells] == ["equal"]:
        return "equal"
    return "; ".join(f"{verdict} ({row['value']:.0f} {row['unit']})" for verdict, row in cells)


if __name__ == "__main__":
    main()
