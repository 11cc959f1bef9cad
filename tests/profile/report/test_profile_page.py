"""HTML report in a real browser: its numbers are those of breakdown.json, it fits a phone, it loads no other
file.
"""

import dataclasses
import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from jtrain.profile.analysis import figures
from jtrain.profile.analysis.breakdown import analyse
from jtrain.profile.analysis.lanes import MAX_DRAWN
from jtrain.profile.analysis.records import Breakdown
from jtrain.profile.report import profile_page
from jtrain.profile.report.ops_section import MAX_OPS
from tests.profile import example
from tests.profile.report import browser
from tests.profile.traced import traced

SECTIONS = [
    "waterfall",
    "advice",
    "path",
    "lanes",
    "steps",
    "communication",
    "layers",
    "ops",
    "clocks",
    "goodput",
    "devices",
    "memory",
    "notes",
]

UNITS = {"s": 1, "ms": 1e-3, "µs": 1e-6, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}
UNITS |= {"GB/s": 1e9, "MB/s": 1e6, "kB/s": 1e3, "B/s": 1, "J": 1, "%": 0.01, "": 1}


def show(
    page: browser.Page, breakdown: Breakdown, folder: Path, *, width: int = 1200, dark: bool = False
) -> Path:
    """Writes the page and opens it; fails on any problem and on any request but its own."""
    file = folder / "report.html"
    profile_page.write(breakdown, file)
    page.problems.clear()
    page.requests.clear()
    page.open(file, width=width, dark=dark)
    assert page.problems == []
    assert page.requests == [file.as_uri()]
    return file


def at(values: Any, path: str) -> Any:
    """Value at a path such as `steps.0.parts.idle` in nested dicts and lists."""
    for key in path.split("."):
        values = values[int(key)] if isinstance(values, list) else values[key]
    return values


def parsed(shown: str) -> float:
    """Parses `561.2 ms` as 0.5612."""
    number, unit = re.fullmatch(r"(-?[\d,.]+) ?(\S*)", shown).groups()  # pyright: ignore[reportOptionalMemberAccess]
    return float(number.replace(",", "")) * UNITS[unit]


@pytest.mark.parametrize("of", [example.breakdown, example.unknown], ids=lambda of: of.__name__)
def test_every_number_on_the_page_is_the_one_in_breakdown_json(
    page: browser.Page, tmp_path: Path, of: Any
) -> None:
    """`<data>` elements have the path and all digits; the displayed text has four digits, or "unknown"."""
    breakdown = of()
    show(page, breakdown, tmp_path)

    embedded = json.loads(page.value("document.getElementById('breakdown').textContent"))
    assert embedded == json.loads(json.dumps(breakdown.to_dict()))
    found = page.value(
        "[...document.querySelectorAll('data')].map(d => [d.dataset.path, d.value, d.textContent])"
    )
    assert len(found) > 10 * len(breakdown.steps)
    for path, value, shown in found:
        exact = at(embedded, path)
        assert json.loads(value) == exact, path
        if exact is None:
            assert shown == "unknown", path
        else:
            assert parsed(shown) == pytest.approx(
                exact, rel=6e-3 if "GiB" in shown or "/s" in shown else 6e-4
            ), path
    paths = {path for path, _, _ in found}
    for i, step in enumerate(breakdown.steps):
        assert {f"steps.{i}.parts.{key}" for key in step.parts} <= paths
    for i in range(len(breakdown.communication)):
        names = ("exposed_s", "total_s", "wire_bytes", "planned_bytes", "bytes_per_s")
        assert {f"communication.{i}.{name}" for name in names} <= paths
    assert {path for path in paths if path.startswith("goodput")} == {
        f"goodput.{key}" for key, spent in breakdown.goodput.items() if spent
    }


def test_the_waterfall_ends_where_the_step_does(page: browser.Page, tmp_path: Path) -> None:
    """Each bar starts where the previous one ends, and together they are as long as the step's bar."""
    show(page, example.breakdown(), tmp_path)
    chosen = "document.querySelector('[data-panel=\"2\"]')"
    page.value(
        "(() => {const s = document.getElementById('step'); s.value = 2; s.dispatchEvent(new "
        "Event('change'))})()"
    )

    shown = page.value("[...document.querySelectorAll('[data-panel]')].filter(w => !w.hidden).length")
    bars = page.value(
        f"[...{chosen}.querySelectorAll('rect')].map(r => r.getBoundingClientRect()).map(b => [b.x, b.width])"
    )

    assert shown == 1
    *parts, whole = bars
    assert len(parts) == len(figures.PARTS)
    assert sum(width for _, width in parts) == pytest.approx(whole[1], rel=1e-3)
    for (start, width), (following, _) in itertools.pairwise(parts):
        assert following == pytest.approx(start + width, abs=0.5)
    assert parts[0][1] / whole[1] == pytest.approx(example.SHARES["theoretical"], abs=1e-3)


def test_a_click_on_a_heading_sorts_the_ops(page: browser.Page, tmp_path: Path) -> None:
    """Numbers start with the largest, words with A, a second click reverses; 25 rows are shown until "show
    all".
    """
    breakdown = example.breakdown()
    many = [
        dataclasses.replace(op, name=f"x.{i}", lost_s=op.lost_s / 2) for i, op in enumerate(breakdown.ops)
    ]
    breakdown = dataclasses.replace(breakdown, ops=[*breakdown.ops, *many])
    show(page, breakdown, tmp_path)
    names = (
        "[...document.querySelectorAll('#ops-table tbody tr')].filter(r => !r.hidden).map(r => "
        "r.cells[0].querySelector('span').textContent)"
    )
    click = (
        "[...document.querySelectorAll('#ops-table thead button')].find(b => b.textContent === '{}').click()"
    )

    by_lost = [op.name for op in sorted(breakdown.ops, key=lambda op: -op.lost_s)]
    assert page.value(names) == by_lost[:25]
    page.value(click.format("total"))
    totals = {op.name: op.total_s for op in breakdown.ops}
    first = [totals[name] for name in page.value(names)]
    assert first == sorted(totals.values(), reverse=True)[:25]
    assert page.value("document.querySelector('[aria-sort]').getAttribute('aria-sort')") == "descending"
    page.value(click.format("op"))
    assert page.value(names) == sorted(totals)[:25]
    page.value(click.format("op"))
    assert page.value(names) == sorted(totals, reverse=True)[:25]
    page.value("document.querySelector('#ops .more').click()")
    assert page.value(names) == sorted(totals, reverse=True)
    assert page.problems == []


def test_the_timeline_reads_out_the_samples_of_the_device_in_front(
    page: browser.Page, tmp_path: Path
) -> None:
    """At 80% of the window, for device 2: clocks, power, temperature and reasons of the last sample before
    it.
    """
    breakdown = example.breakdown()
    show(page, breakdown, tmp_path)
    change = (
        "(() => {{const c = document.getElementById('{}'); c.value = {}; c.dispatchEvent(new "
        "Event('{}'))}})()"
    )
    page.value(change.format("track", 2, "change"))
    page.value(change.format("moment", 800, "input"))

    track = breakdown.clocks[2]
    end_s = max(track.time_s[-1], sum(step.duration_s for step in breakdown.steps))
    index = max(i for i, time_s in enumerate(track.time_s) if time_s <= 0.8 * end_s)
    shown = page.value("document.getElementById('readout').textContent")
    assert f"{track.time_s[index]:.3f} s, step 24:" in shown
    assert f"core {track.sm_mhz[index]:,.0f} MHz, memory 2,619 MHz" in shown
    watts = re.search(r"([\d.]+) W", shown)
    assert watts is not None
    assert float(watts[1]) == pytest.approx(track.power_w[index], abs=1e-3)
    assert "throttled by power_cap" in shown
    front = page.value("[...document.querySelectorAll('#timeline path.front')].map(p => p.dataset.track)")
    assert front == ["2"] * 4


def test_a_cpu_s_page_has_no_unknown_figure_and_no_backtick(page: browser.Page, tmp_path: Path) -> None:
    """Nor has the line of values at the cursor; what stands between backticks is code."""
    breakdown = dataclasses.replace(example.on_cpu(), advice=["Run `jtrain plan <b>` & look."])
    show(page, breakdown, tmp_path, width=390)
    words, notes = page.value("document.body.innerText").split("Unknown values, with the reason")
    assert "unknown" not in words
    assert "measured on this machine on 2026-11-28" in words
    assert "reads none" in notes
    assert "`" not in words + notes
    assert page.value("document.querySelector('#advice li code').textContent") == "jtrain plan <b>"
    assert page.value("document.querySelectorAll('#timeline svg.plot').length") == 1
    assert "core 1,980 MHz, not throttled" in page.value("document.getElementById('readout').textContent")


def test_where_nothing_is_known_the_page_says_so(page: browser.Page, tmp_path: Path) -> None:
    """Without peak, clocks and collectives, the sections are there and give the reason."""
    show(page, example.unknown(), tmp_path, width=390)

    words = page.value("document.body.innerText")
    # Without a trace there is no path and there are no lanes.
    sections = [name for name in SECTIONS if name not in ("path", "lanes")]
    assert page.value("[...document.querySelectorAll('section')].map(s => s.id)") == sections
    assert page.value("document.querySelectorAll('svg.roofline').length") == 0
    for expected in (
        "No clock was sampled",
        "No collective ran",
        "no peak of this device is known",
        "idle: 300.0 ms",
    ):
        assert expected in words
    assert "NaN" not in words
    assert "undefined" not in words


def test_a_real_runs_page_holds_together(page: browser.Page, tmp_path: Path) -> None:
    """Three steps on eight emulated devices, on a phone: shares sum to 100%, and all sections are filled."""
    breakdown = analyse(traced(data=8))
    show(page, breakdown, tmp_path, width=390)

    shares = page.value(
        "[...document.querySelectorAll('[data-panel=\"1\"] tbody tr')].map(r => r.cells[3].textContent)"
    )
    known = [parsed(shown) for shown in shares[:-1] if shown != "unknown"]
    assert sum(known) == pytest.approx(1, abs=0.0005 * len(known))
    assert page.value("document.documentElement.scrollWidth") <= 390
    assert page.value("document.querySelectorAll('#devices tbody tr').length") == 8
    assert "all-gather over data" in page.value("document.getElementById('communication').innerText")
    words = page.value("document.body.textContent")
    assert "NaN" not in words.partition('{"')[0]


def test_names_out_of_a_program_cannot_become_markup(page: browser.Page, tmp_path: Path) -> None:
    """An op named `</script><b id=x>` is shown literally."""
    breakdown = example.breakdown()
    bad = '</script><b id="bad">&amp;"'
    op = dataclasses.replace(breakdown.ops[0], name=bad, layer=bad)
    show(page, dataclasses.replace(breakdown, ops=[op], device_kind=bad, notes=[bad]), tmp_path)

    assert page.value("document.getElementById('bad')") is None
    assert page.value("document.querySelector('#ops-table tbody th span').textContent") == bad
    assert page.value("document.querySelector('#notes li').textContent") == bad


def test_a_large_window_stays_a_file_that_a_phone_opens(page: browser.Page, tmp_path: Path) -> None:
    """Eight devices with 2,000 samples each, 3,000 ops, 20,000 executions and 20 steps make under 3 MB."""
    small = example.breakdown()
    ops = [dataclasses.replace(small.ops[i % 24], name=f"op.{i}") for i in range(3000)]
    steps = [example.step(i) for i in range(20)]
    clocks = [example.track(device, points=2000) for device in range(8)]
    lanes = example.lanes(executions=MAX_DRAWN // 8)
    breakdown = dataclasses.replace(small, ops=ops, steps=steps, clocks=clocks, lanes=lanes)
    file = show(page, breakdown, tmp_path, width=390)

    assert file.stat().st_size < 3e6
    assert page.value("document.querySelectorAll('#ops-table tbody tr').length") == MAX_OPS
    assert "3,000 ops" in page.value("document.getElementById('ops').innerText")
    assert page.value("document.documentElement.scrollWidth") <= 390


def test_without_a_browser_ci_fails_and_others_skip_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a browser the page is untested, so CI must fail."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="chromium-headless-shell"):
        browser.find()
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="no headless browser"):
        browser.find()


HOSTILE = (
    "<script>owned = 1</script>",
    '"onmouseover="owned = 1" x="',
    "</script><img src=x onerror=owned=1>",
    "'><svg onload=owned=1>",
    "<!--<script>\u2028\u202e",
)
"""Names that would run a script, or end the element that holds the page's data, if they were not shown as
text."""


def hostile() -> Breakdown:
    """Returns the example breakdown with hostile text in every field that comes from a compiled program or a
    driver.
    """
    found = example.breakdown()
    assert found.live is not None
    words = itertools.cycle(HOSTILE)
    ops = [
        dataclasses.replace(op, name=f"{next(words)}{i}", opcode=next(words), layer=next(words))
        for i, op in enumerate(found.ops)
    ]
    live = dataclasses.replace(
        found.live, bytes={f"{next(words)}{k}": v for k, v in found.live.bytes.items()}
    )
    return dataclasses.replace(
        found,
        ops=ops,
        live=live,
        device_kind="".join(HOSTILE),
        communication=[dataclasses.replace(row, kind=next(words)) for row in found.communication],
        memory=[dataclasses.replace(row, name=next(words)) for row in found.memory],
        clocks=[dataclasses.replace(one, reasons=[next(words)] * len(one.reasons)) for one in found.clocks],
        steps=[dataclasses.replace(one, clocks_lost_s={next(words): 0.1}) for one in found.steps],
        advice=list(HOSTILE),
        notes=list(HOSTILE),
    )


def test_hostile_names_are_shown_as_text(page: browser.Page, tmp_path: Path) -> None:
    """No script of a name runs, no name becomes an element or attribute, and the names are on the page as
    they are.
    """
    breakdown = hostile()
    show(page, breakdown, tmp_path)
    page.value("document.querySelectorAll('*').forEach(e => e.dispatchEvent(new MouseEvent('mouseover')))")
    page.value("document.querySelector('#ops .more').click()")

    assert page.value("typeof owned") == "undefined"
    assert page.value("document.querySelectorAll('img, script:not([id]) ~ script').length") == 0
    handlers = (
        "[...document.querySelectorAll('*')].flatMap(e => [...e.attributes]).filter(a => /^on/.test(a.name))"
    )
    assert page.value(f"{handlers}.length") == 0
    shown = page.value(
        "[...document.querySelectorAll('#ops-table tbody tr')].map(r => r.cells[0].querySelector('span').textContent)"
    )
    assert sorted(shown) == sorted(op.name for op in breakdown.ops)
    assert page.value("[...document.querySelectorAll('#notes li')].map(l => l.textContent)") == list(HOSTILE)
    embedded = page.value("document.getElementById('breakdown').textContent")
    assert json.loads(embedded) == json.loads(json.dumps(breakdown.to_dict()))
    assert page.problems == []
