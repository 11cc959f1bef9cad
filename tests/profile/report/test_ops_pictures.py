"""Pictures of ops in a real browser: the lanes of devices, the roofline, and the table of layers beside it."""

from pathlib import Path

import pytest

from tests.profile import example
from tests.profile.report import browser
from tests.profile.report.test_profile_page import show


def test_the_lanes_are_zoomed_moved_and_read(page: browser.Page, tmp_path: Path) -> None:
    """By buttons and keys; an op under the pointer says its name, its time, its layer, its shape and its line."""
    breakdown = example.breakdown()
    show(page, breakdown, tmp_path)
    whole_us = breakdown.steps[2].duration_s * 1e6

    def shown() -> list[float]:
        return [
            float(text)
            for text in page.value("document.getElementById('lanes-canvas').dataset.shown").split()
        ]

    def press(key: str) -> None:
        page.value(
            f"document.getElementById('lanes-canvas').dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}'}}))"
        )

    assert shown() == [0, pytest.approx(whole_us, abs=0.1)]
    page.value("document.querySelector('[data-lanes=\"+\"]').click()")
    assert shown() == [pytest.approx(whole_us / 4, abs=0.1), pytest.approx(whole_us * 3 / 4, abs=0.1)]
    press("ArrowRight")
    assert shown() == [pytest.approx(whole_us * 0.35, abs=0.1), pytest.approx(whole_us * 0.85, abs=0.1)]
    press("0")
    # The third op of device 1's lane of computing, which is the third from above.
    point = (
        "(() => {const c = document.getElementById('lanes-canvas'); const b = c.getBoundingClientRect();"
        "c.dispatchEvent(new PointerEvent('pointermove', {clientX: b.x + b.width * 2.5 / 60, clientY: b.y + 50}))})()"
    )
    page.value(point)
    lane = breakdown.lanes and breakdown.lanes.lanes[2]
    assert lane
    words = page.value("document.getElementById('lanes-readout').textContent")
    assert words == (
        f"device 1, {example.OPS[2][0]}: {lane.duration_us[2] / 1e3:.3f} ms from {lane.start_us[2] / 1e3:.3f} ms, "
        "layers/mlp, backward, bf16[8192,4096], jtrain/model/mlp.py:88"
    )
    # Something is drawn: the colours of computing and of collectives, beside the background.
    colours = (
        "(() => {const c = document.getElementById('lanes-canvas'); const d = c.getContext('2d').getImageData(0, 0, "
        "c.width, c.height).data; const s = new Set(); for (let i = 0; i < d.length; i += 4) if (d[i + 3] === 255) "
        "s.add([d[i], d[i + 1], d[i + 2]].join()); return [...s]})()"
    )
    assert {"0,114,178", "230,159,0", "213,94,0"} <= set(page.value(colours))
    assert page.problems == []


def test_the_roofline_and_the_layers_have_the_numbers_of_the_ops(page: browser.Page, tmp_path: Path) -> None:
    """Ops of 60 % of the peak's seconds are at 60 % of the roof; each layer's FLOP/s are its ops'."""
    breakdown = example.breakdown()
    show(page, breakdown, tmp_path)
    titles = page.value("[...document.querySelectorAll('svg.roofline .dot title')].map(t => t.textContent)")
    computing = [op for op in breakdown.ops if op.kind != "communication"]
    assert len(titles) == len(computing)
    assert all(": 60% of the roof, 593.6TFLOP/s" in title for title in titles)
    rows = page.value(
        "[...document.querySelectorAll('#layers tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    )
    mlp = next(row for row in rows if row[:2] == ["layers/mlp", "backward"])
    # 0.27 s of computing, 0.21 s of collectives, in a step of 1.22 s.
    assert mlp[3:5] == ["480.0 ms", "39.3%"]
    assert mlp[6] == "593.6T"
