"""Lookups and verdicts of made-up figures."""

from typing import Any

import pytest

from jtrain.plan.survey.evidence import Claim, ClaimVerdict, Evidence, Figure, Lookup
from jtrain.plan.survey.sheet import page_of, to_json
from jtrain.report.table import Table, text_of

CONTENT: dict[str, Any] = {
    "step_s": {"slow": 8.0, "fast": 2.0},
    "rows": [
        {"what": "plain", "value": 3.0, "ratio": None},
        {"what": "plain, full loop (0.9 .. 1.1)", "value": 5.0, "ratio": 0.5},
        {"what": "plain, fits", "value": True, "ratio": 2.0},
    ],
}


@pytest.mark.parametrize(
    ("lookup", "figure"),
    [
        (Lookup("", ("step_s", "slow")), 8.0),
        (Lookup("", ("step_s", "slow"), ("step_s", "fast")), 4.0),
        (Lookup("", ("step_s", "slow"), ("step_s", "fast"), scale=0.5), 2.0),
        # A whole value wins over parts of others; a part has to be of one text.
        (Lookup("", ("rows", "plain", "value")), 3.0),
        (Lookup("", ("rows", "full loop", "ratio")), 0.5),
        (Lookup("", ("rows", "3.0", "value"), ("rows", "full loop", "value")), 0.6),
    ],
    ids=str,
)
def test_a_figure_is_a_number_or_one_over_another(lookup: Lookup, figure: float) -> None:
    assert lookup.read(CONTENT) == figure


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (("rows", "plain,", "value"), "2 entries have 'plain,'"),
        (("rows", "tiled", "value"), "0 entries have 'tiled'"),
        (("rows", "plain", "ratio"), "rows > plain > ratio is None, no number"),
        (("rows", "plain, fits", "value"), "is True, no number"),
        (("step_s", "middle"), "'middle'"),
    ],
)
def test_what_is_not_there_is_no_figure(path: tuple[str, ...], message: str) -> None:
    """Also where two rows could be meant, or a machine left a number out."""
    with pytest.raises(LookupError, match=message):
        Lookup("", path).read(CONTENT)


@pytest.mark.parametrize(
    ("bounds", "decided_by", "values", "verdict"),
    [
        ((2.0, 4.0), "measured", {"measured": 2.0}, "reproduced"),
        ((2.0, 4.0), "measured", {"measured": 4.0}, "reproduced"),
        ((2.0, 4.0), "measured", {"measured": 1.999}, "not reproduced"),
        ((2.0, 4.0), "measured", {"measured": 4.001}, "not reproduced"),
        # A prediction that agrees is no measurement, and one that differs does not refute it.
        ((2.0, 4.0), "measured", {"predicted": 3.0, "compiled": 3.0}, "not decidable here"),
        ((2.0, 4.0), "measured", {"predicted": 1.0, "measured": 3.0}, "reproduced"),
        ((2.0, 4.0), "compiled", {"predicted": 3.0, "measured": 3.0}, "not decidable here"),
        ((2.0, 4.0), "compiled", {"compiled": 5.0, "predicted": 3.0}, "not reproduced"),
        ((2.0, 4.0), "predicted", {"predicted": None}, "not decidable here"),
        ((2.0, float("inf")), "predicted", {"predicted": 1e9}, "reproduced"),
        # The survey gives no figure.
        ((float("-inf"), float("inf")), "measured", {"measured": 3.0}, "not decidable here"),
        ((2.0, 4.0), "measured", {}, "not decidable here"),
    ],
)
def test_the_one_kind_of_figure_that_decides_decides(
    bounds: tuple[float, float],
    decided_by: Evidence,
    values: dict[Evidence, float | None],
    verdict: ClaimVerdict,
) -> None:
    low, high = bounds
    claim = Claim("speed", "a step", "2x to 4x", low=low, high=high, decided_by=decided_by, needs="a GPU")
    figures: dict[Evidence, Figure] = {
        kind: Figure("jtrain plan", value, missing="needs a GPU") for kind, value in values.items()
    }
    assert claim.verdict(figures) == verdict


def test_a_row_says_its_verdict_and_what_it_needs() -> None:
    """The cells of a page are those of its JSON; an open row says which figures agree."""
    open_claim = Claim("speed", "a step", "2x", low=2.0, needs="8 GPUs")
    lost = Claim("memory", "bytes", "4", low=4.0, high=4.0, unit="", decided_by="compiled", needs="[aot]")
    closed = Claim("wall", "FLOP", "2e+28", low=1e28, high=3e28, unit="", decided_by="predicted")
    figures: dict[str, dict[Evidence, Figure]] = {
        "speed": {
            "predicted": Figure("jtrain a", 1.5, "this call"),
            "compiled": Figure("jtrain b", 2.25, "f.json"),
        },
        "memory": {"compiled": Figure("jtrain b", missing="exit code 2: error: no [aot]")},
        "wall": {"predicted": Figure("jtrain c", 1.25e28, "this call")},
    }
    content = to_json({"All of it": (open_claim, lost, closed)}, figures)
    assert content["verdicts"] == {"reproduced": 1, "not reproduced": 0, "not decidable here": 2}
    assert content["claims"][0]["figures"]["compiled"] == {
        "command": "jtrain b",
        "value": 2.25,
        "source": "f.json",
        "missing": "",
        "agrees": True,
    }
    page = page_of(content)
    claims, commands = (block for section in page.sections for block in section.blocks)
    assert isinstance(claims, Table)
    assert isinstance(commands, Table)
    verdict = "not decidable here; predicted differs; compiled agrees; needs 8 GPUs"
    assert [[text_of(cell) for cell in row.cells] for row in claims.rows] == [
        ["speed: a step", "2x", "1.5x", "2.25x", "", verdict],
        ["memory: bytes", "4", "", "", "", "not decidable here; exit code 2: error: no [aot]"],
        ["wall: FLOP", "2e+28", "1.25e+28", "", "", "reproduced, predicted"],
    ]  # fmt: skip
    assert [text_of(row.cells[0]) for row in commands.rows] == [
        "jtrain a",
        "jtrain b",
        "jtrain b",
        "jtrain c",
    ]
