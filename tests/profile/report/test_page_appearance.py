"""The look of the HTML report in a real browser: widths, colours, contrast, and names of charts."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from jtrain.profile.analysis import figures
from jtrain.report import page as page_module
from tests.profile import example
from tests.profile.report import browser
from tests.profile.report.test_profile_page import SECTIONS, show

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
SEEN_BY = {
    "all": np.eye(3),
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritan": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 700, 1400])
def test_a_phone_and_a_desk_show_the_whole_page(
    page: browser.Page, tmp_path: Path, width: int, dark: bool
) -> None:
    """All sections are there in both colour schemes; nothing is wider than the screen; a screenshot is
    small.
    """
    show(page, example.breakdown(), tmp_path, width=width, dark=dark)

    assert page.value("[...document.querySelectorAll('section')].map(s => s.id)") == SECTIONS
    assert page.value("innerWidth") == width
    assert page.value("document.documentElement.scrollWidth") <= width
    # The instructions of a pipeline alone may be wider than their frame, which scrolls then.
    frames = (
        "[...document.querySelectorAll('.frame:not(.gantt)')].filter(e => e.scrollWidth > e.clientWidth + 1)"
    )
    assert page.value(f"{frames}.map(e => e.ariaLabel)") == []
    outside = (
        "[...document.querySelectorAll('main *')].filter(e => !e.closest('.frame') && !e.closest('svg') && "
    )
    assert (
        page.value(f"{outside} e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML)") == []
    )
    sizes = page.value(
        "[...document.querySelectorAll('td, p, li, dd, .side')].map(e => getComputedStyle(e).fontSize)"
    )
    assert min(float(text.removesuffix("px")) for text in sizes) >= 11
    for css in ("body", ".soft", "dt"):
        assert contrast(page, css) >= 4.5, css
    page.screenshot(tmp_path / "page.jpg")
    assert 20_000 < (tmp_path / "page.jpg").stat().st_size < 600_000


def contrast(page: browser.Page, css: str) -> float:
    """Contrast of an element's text with the page, as defined by WCAG."""
    colours = page.value(
        f"[getComputedStyle(document.querySelector('{css}')).color, "
        "getComputedStyle(document.body).backgroundColor]"
    )
    found = [linear([int(word) for word in re.findall(r"\d+", colour)[:3]]) for colour in colours]
    dark, light = sorted(float(rgb @ [0.2126, 0.7152, 0.0722]) for rgb in found)
    return (light + 0.05) / (dark + 0.05)


def linear(rgb: list[int]) -> np.ndarray:
    """Converts sRGB of 0..255 to linear light of 0..1."""
    share = np.array(rgb) / 255
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


def test_every_chart_and_control_has_a_name(page: browser.Page, tmp_path: Path) -> None:
    """Each chart has a name for screen readers, with its unit."""
    show(page, example.breakdown(), tmp_path)

    assert page.value("document.querySelectorAll('svg:not([role=img])').length") == 0
    names = page.value("[...document.querySelectorAll('svg')].map(s => s.ariaLabel)")
    assert len(names) > 60
    assert all(names)
    parts = (
        "exposed communication: 158.6 ms, 13.0% of the step",
        "temporaries over step 22, up to 24.00 GiB",
    )
    for expected in (*parts, "core clock in MHz", "power in W", "°C"):
        assert any(expected in name for name in names), expected
    unnamed = (
        "[...document.querySelectorAll('select, input')].filter(c => !c.labels.length && !c.ariaLabel).length"
    )
    assert page.value(unnamed) == 0


def test_the_colours_of_the_parts_differ_for_every_kind_of_eye() -> None:
    """Colours are at least 15 apart in CIE Lab (1 is just visible), also for protan, deutan and tritan
    vision.
    """
    css = (Path(page_module.__file__).parent / "page.css").read_text()
    colours = dict(re.findall(r"^\.([a-z_]+) \{ fill: #(\w{6}); background", css, re.MULTILINE))
    assert set(colours) == {part.key for part in figures.PARTS} - {"idle"}
    for eye, matrix in SEEN_BY.items():
        seen = {
            name: lab(np.clip(np.array(matrix) @ linear(list(bytes.fromhex(code))), 0, 1))
            for name, code in colours.items()
        }
        for a, b in itertools.combinations(seen, 2):
            assert np.linalg.norm(seen[a] - seen[b]) > 15, (eye, a, b)


def lab(rgb: np.ndarray) -> np.ndarray:
    """Converts linear sRGB to CIE Lab under D65."""
    to_xyz = [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
    xyz = np.array(to_xyz) @ rgb / np.array([0.95047, 1.0, 1.08883])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])
