"""The live page in a real browser: it follows a run, shows what is small, and fits a phone and a desk."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from jtrain.profile.analysis.breakdown_json import write_breakdown
from tests.dashboard.conftest import Serve
from tests.dashboard.made_up import make_run, train_lines, wall_lines
from tests.dashboard.test_command_line import started
from tests.dashboard.test_run_folder import append
from tests.profile import example
from tests.profile.report import browser
from tests.profile.report.test_page_appearance import contrast

WAIT = """new Promise((done) => {{
  const start = performance.now();
  const look = () => {{
    if ({condition}) done(true); else if (performance.now() - start > 60000) done(false); else setTimeout(look, 20);
  }};
  look();
}})"""
LEGEND = "document.querySelector('#loss_nats .legend')?.textContent.includes('{}')"


def open_page(
    page: browser.Page, address: str, *, width: int = 1200, height: int = 900, dark: bool = False
) -> None:
    """Opens the page, and waits for its first curve."""
    page.problems.clear()
    page.requests.clear()
    page.open(address, width=width, height=height, dark=dark)
    wait(page, LEGEND.format(":"))


@pytest.fixture(autouse=True)
def leave(page: browser.Page, serve: Serve) -> Iterator[None]:
    """Leaves the page before its server ends: it would ask for news in the browser of all later tests."""
    yield
    page.open("about:blank", width=1200)
    page.problems.clear()
    page.requests.clear()


def wait(page: browser.Page, condition: str) -> None:
    """Waits until a condition holds; a minute is what a busy machine may need."""
    assert page.value(WAIT.format(condition=condition)), condition


def columns_of(page: browser.Page, chart: str, *, above: float) -> list[int]:
    """Columns of a canvas, in pixels, that have the first run's colour in the upper part of the chart."""
    script = f"""(() => {{
      const canvas = document.querySelector('#{chart} canvas'), width = canvas.width;
      const height = Math.round(canvas.height * {above});
      const pixels = canvas.getContext('2d').getImageData(0, 0, width, height).data;
      const columns = new Set();
      for (let i = 0; i < pixels.length; i += 4)
        if (pixels[i] < 40 && Math.abs(pixels[i + 2] - 178) < 40 && pixels[i + 3] > 200)
          columns.add((i / 4) % width);
      return [...columns].sort((a, b) => a - b);
    }})()"""
    return page.value(script)


def test_a_new_line_appears_without_a_reload(page: browser.Page, tmp_path: Path, serve: Serve) -> None:
    """Also that the run went on, and nothing but the server is asked."""
    workdir = make_run(tmp_path / "run", 30)
    address = serve(workdir)
    open_page(page, address)
    assert page.value("document.querySelector('#runs table').textContent").count("finished") == 1
    assert page.value("innerWidth") == 1200
    append(workdir / "metrics.jsonl", train_lines([31], loss_nats=7.77))
    append(workdir / "data.log", "step 31: the file b.txt is damaged\n")
    wait(page, LEGEND.format("7.77"))
    wait(page, "document.querySelector('#events').textContent.includes('b.txt is damaged')")
    assert page.value("document.querySelectorAll('#events h2').length") == 1
    assert page.value("performance.getEntriesByType('navigation').length") == 1
    assert page.problems == []
    assert all(request.startswith((address, "data:")) for request in page.requests)


@pytest.mark.slow
def test_a_spike_of_one_step_is_seen_among_100_000(page: browser.Page, tmp_path: Path) -> None:
    """In its column of pixels, and nowhere else; a chosen part shows its step."""
    workdir = make_run(tmp_path / "run", 100_000)
    text = (workdir / "metrics.jsonl").read_text().splitlines(keepends=True)
    text[59_999] = train_lines([60_000], loss_nats=40.0)
    (workdir / "metrics.jsonl").write_text("".join(text))
    # In a process of its own: this one checks types at each of millions of calls.
    with started(str(workdir), "--port", "0") as (_, printed):
        open_page(page, printed.split()[0])
        wait(page, "document.querySelector('#runs table').textContent.includes('100,000 of 100,000')")
        left, right = 58, page.value("document.querySelector('#loss_nats canvas').width") - 4
        columns = columns_of(page, "loss_nats", above=0.4)
        assert columns, "the spike is drawn"
        expected = left + 0.6 * (right - left)
        assert all(abs(column - expected) <= 3 for column in columns), (columns, expected)
        # A quarter of the steps, around the middle, and then to the spike.
        for button in ('[data-zoom="0.5"]',) * 2 + ('[data-pan="0.3"]',) * 1:
            page.value(f"document.querySelector('{button}').click()")
        wait(page, "charts.chosen[0] < 60000 && charts.chosen[1] > 60000")
        first, last = page.value("charts.chosen")
        page.value("new Promise((done) => setTimeout(done, 600))")
        columns = columns_of(page, "loss_nats", above=0.4)
        expected = left + (60_000 - first) / (last - first) * (right - left)
        assert columns
        assert all(abs(column - expected) <= 3 for column in columns), (columns, expected)


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_a_phone_and_a_desk_show_the_whole_page(
    page: browser.Page, tmp_path: Path, serve: Serve, width: int, dark: bool
) -> None:
    """Two runs with all that a run may have: nothing is wider than the screen, and no table is cut off."""
    rich, plain = (
        make_run(tmp_path / "a_run_with_a_long_name_of_a_folder", 60),
        make_run(tmp_path / "plain", 40),
    )
    append(rich / "goodput.jsonl", wall_lines(range(50, 61), start_s=1.7e9 + 500.0))
    append(rich / "bad_steps.jsonl", '{"step": 7, "action": "found", "bad": ["loss_nats"]}\n')
    append(
        rich / "alerts.jsonl", '{"step": 9, "kind": "spike", "message": "' + 20 * "a long message " + '"}\n'
    )
    append(
        rich / "generations.jsonl",
        '{"step": 9, "of": "prompts", "prompt": "Once", "answer": "' + 400 * "e" + '"}\n',
    )
    (rich / "profile" / "20").mkdir(parents=True)
    write_breakdown(example.breakdown(), rich / "profile" / "20" / "breakdown.json")
    open_page(page, serve(rich, plain), width=width, height=5000, dark=dark)

    hidden = page.value("[...document.querySelectorAll('figure[hidden]')].map(f => f.id)")
    assert hidden == ["parts-1", "power_w"], "of which no file tells"
    assert page.value("document.documentElement.scrollWidth") <= width
    frames = "[...document.querySelectorAll('.frame')].filter(e => e.scrollWidth > e.clientWidth + 1)"
    assert page.value(f"{frames}.map(e => e.ariaLabel)") == []
    outside = "[...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1)"
    assert page.value(f"{outside}.map(e => e.outerHTML)") == []
    assert page.value("[...document.querySelectorAll('canvas')].filter(c => !c.ariaLabel).length") == 0
    sizes = page.value(
        "[...document.querySelectorAll('td, p, li, figcaption')].map(e => getComputedStyle(e).fontSize)"
    )
    assert min(float(text.removesuffix("px")) for text in sizes) >= 11
    for css in ("body", "dt, small, .soft", "button", "#readout"):
        assert contrast(page, css) >= 4.5, css
    assert page.problems == []
    page.screenshot(tmp_path / "page.jpg")


@pytest.mark.slow
def test_a_part_of_the_steps_is_chosen_in_all_charts(
    page: browser.Page, tmp_path: Path, serve: Serve
) -> None:
    """By a drag across one of them; all steps come back by a click, and a page without its server says so."""
    workdir = make_run(tmp_path / "run", 400)
    address = serve(workdir)
    open_page(page, address)
    rectangle = "document.querySelector('#loss_nats canvas').getBoundingClientRect()"
    box = page.value(f"(({{ left, top, width }}) => ({{ left, top, width }}))({rectangle})")
    inner = box["width"] - 62
    for kind, part in (("mousePressed", 0.25), ("mouseMoved", 0.5), ("mouseReleased", 0.5)):
        x, y = box["left"] + 58 + part * inner, box["top"] + 50
        page.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)
    first, last = page.value("charts.chosen")
    assert (first, last) == (pytest.approx(100, abs=2), pytest.approx(200, abs=2))
    wait(page, "document.getElementById('readout').textContent.startsWith('step ')")
    page.value("document.querySelector('[data-zoom=\"1e9\"]').click()")
    assert page.value("charts.chosen") is None
    shutil.rmtree(workdir)
    page.value("new Promise((done) => setTimeout(done, 2500))")
    assert page.value("document.querySelector('#loss_nats .legend').textContent").startswith("run:"), (
        "as it was read"
    )
    assert page.problems == []
