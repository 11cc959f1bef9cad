"""Page of a plan in a real browser: its numbers are those of its JSON, its pictures agree, and it fits a
phone.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jtrain.cli.plan import main
from jtrain.plan.estimate.collectives import collectives
from jtrain.plan.estimate.memory import memory
from jtrain.plan.estimate.step_time import step_time
from jtrain.plan.report.fabric_loads import loads
from jtrain.plan.report.interconnect_table import STATED, job_of
from tests.profile.report import browser

SUFFIXES = {"": 1, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "%": 0.01, "s": 1, "ms": 1e-3, "µs": 1e-6}
SUFFIXES |= {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "GB/s": 1e9, "MB/s": 1e6}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Page of the toy on two hosts of H100; its odd vocabulary splits over no axis, so nothing runs on 32 and
    more.
    """
    path = tmp_path_factory.mktemp("page") / "plan.html"
    words = ["--config=tiny", "--device", "h100", "--count", "16", "--price", "2.5", "--html", str(path)]
    words += ["--tokens", "1e12", "--set", "model.vocab_size=257"]
    assert main(words) == 0
    return path


def show(page: browser.Page, file: Path, *, width: int = 1200, dark: bool = False) -> None:
    """Opens the page; fails on any problem and on any request but its own."""
    page.problems.clear()
    page.requests.clear()
    page.open(file, width=width, dark=dark)
    assert page.problems == []
    assert page.requests == [file.as_uri()]


def at(values: Any, path: str) -> Any:
    """Value at a path such as `curve.0.days` in nested dicts and lists."""
    for key in path.split("."):
        values = values[int(key)] if isinstance(values, list) else values[key]
    return values


def test_every_number_on_the_page_is_the_one_in_the_plan(page: browser.Page, file: Path) -> None:
    """With all its digits in the page, and three of them displayed."""
    show(page, file)
    plan = json.loads(page.value("document.getElementById('plan').textContent"))
    assert (plan["device"], plan["count"]) == ("h100", 16)
    found = page.value(
        "[...document.querySelectorAll('data')].map(d => [d.dataset.path, d.value, d.textContent])"
    )
    assert len(found) > 50
    for path, value, shown in found:
        exact = at(plan, path)
        assert json.loads(value) == exact, path
        if exact is not None:
            parts = re.fullmatch(r"\$?(-?[\d,.]+(?:e-?\d+)?) ?(\D*)", shown)
            assert parts is not None, shown
            number, unit = parts.groups()
            displayed = float(number.replace(",", "")) * SUFFIXES[unit]
            assert displayed == pytest.approx(exact, rel=6e-3, abs=6e-4 if unit == "%" else 0), path
    paths = {path for path, _, _ in found}
    assert {f"step.parts_s.{name}" for name, took in plan["step"]["parts_s"].items() if took} <= paths
    assert {f"curve.{i}.days" for i, row in enumerate(plan["curve"]) if row["fits"]} <= paths
    assert {f"fabric.{i}.busy_s" for i in range(3)} <= paths


def test_the_pictures_agree_with_the_numbers(page: browser.Page, file: Path) -> None:
    """Parts fill the step's bar; classes end where the peak is; the network's line is as wide as it is
    busy.
    """
    show(page, file)
    plan = json.loads(page.value("document.getElementById('plan').textContent"))

    def widths(section: str) -> list[float]:
        bars = f"[...document.querySelector('#{section} svg.bar').querySelectorAll('rect')]"
        return page.value(f"{bars}.map(r => parseFloat(r.getAttribute('width')))")

    parts = [took for took in plan["step"]["parts_s"].values() if took]
    assert widths("step") == pytest.approx([1000 * took / plan["step"]["step_s"] for took in parts], abs=0.01)
    assert sum(widths("memory")) == pytest.approx(
        1000 * plan["formula"]["peak_bytes"] / 80e9, rel=0.01, abs=0.05
    )
    _, network, host = plan["fabric"]
    assert network["busy_s"] > 0 == host["busy_s"]
    lines = page.value(
        "[...document.querySelectorAll('.fabric line')].map(l => [l.dataset.level, "
        "l.getAttribute('stroke-width')])"
    )
    drawn: dict[str, Any] = dict(lines)
    assert float(drawn["network"]) == pytest.approx(
        1.5 + 10 * network["busy_s"] / plan["step"]["step_s"], abs=0.01
    )
    assert drawn["host"] is None
    assert [level for level, _ in lines].count("links") == 8
    assert "links between 8 devices" in page.value("document.querySelector('.fabric').textContent")
    counts = page.value(
        "document.querySelectorAll('#cost svg.plot')[0].querySelectorAll('path.border').length"
    )
    assert counts == sum(row["fits"] for row in plan["curve"]) == 3
    assert "Nothing fits on 32, 64, 128 devices" in page.value("document.getElementById('cost').textContent")


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1200, False)])
def test_a_phone_and_a_desk_show_the_whole_page(
    page: browser.Page, file: Path, width: int, dark: bool
) -> None:
    """All four sections; only tables and the fabric scroll, each in its own frame; every chart has a name."""
    show(page, file, width=width, dark=dark)
    assert page.value("[...document.querySelectorAll('section')].map(s => s.id)") == [
        "step",
        "memory",
        "fabric",
        "cost",
    ]
    assert page.value("document.documentElement.scrollWidth") <= width
    outside = (
        "[...document.querySelectorAll('main *')].filter(e => !e.closest('.frame') && !e.closest('svg') && "
    )
    assert (
        page.value(f"{outside} e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML)") == []
    )
    assert (
        page.value("[...document.querySelectorAll('svg')].filter(s => !s.getAttribute('aria-label')).length")
        == 0
    )


def test_loads_are_what_the_collectives_send() -> None:
    """ZeRO-3 over two hosts of eight: rings send all bytes over the links, an eighth of them over each
    adapter.
    """
    job = job_of(STATED, 3200.0)
    timed = step_time(job, memory(job))
    links, network, host = loads(job, timed)
    sent = sum(one.wire_bytes for one in collectives(job))
    assert links.wire_bytes == sent > 60e9
    assert network.wire_bytes == pytest.approx(sent / 8, rel=1e-6)
    assert links.busy_s == network.busy_s == pytest.approx(sum(one.total_s for one in timed.network))
    assert (host.wire_bytes, host.busy_s) == (0, 0)
