"""Prints how long the page of a run of 100,000 logged steps takes, and how many frames a second it moves at.

    python tests/dashboard/programs/measure.py [STEPS]

First paint is that of the browser, from its navigation on; "drawn" is the first curve. `cold` is a server that has
just begun to read, `warm` one that has read all lines.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.dashboard.made_up import make_run
from tests.profile.report import browser

DRAWN = """new Promise((done) => {
  const look = () => document.querySelector("figure.chart:not([hidden]) .legend li")
    ? done(performance.now()) : requestAnimationFrame(look);
  look();
})"""
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
FRAMES = """new Promise((done) => {{
  const start = performance.now();
  let frames = 0;
  const move = () => {{
    {move}
    frames += 1;
    const spent = performance.now() - start;
    spent > 3000 ? done(1000 * frames / spent) : requestAnimationFrame(move);
  }};
  requestAnimationFrame(move);
}})"""
CLICK = "document.querySelector('[data-{}=\"{}\"]').click();"
MOVES = {
    "scrolling the page": "scrollTo(0, 40 * frames % 1200);",
    "zooming and panning": f"if (frames % 80 < 40) {CLICK.format('zoom', 0.5)} else {CLICK.format('zoom', 2)}"
    f"if (frames % 20 < 10) {CLICK.format('pan', 0.3)} else {CLICK.format('pan', -0.3)}",
    "moving the cursor": "document.querySelector('figure.chart canvas').dispatchEvent(new PointerEvent("
    "'pointermove', { clientX: 100 + frames % 400, clientY: 300 }));",
}


def main() -> None:
    """Makes the run, serves it and measures."""
    num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with tempfile.TemporaryDirectory() as folder, browser.page() as page:
        workdir = make_run(Path(folder) / "long", num_steps)
        size = (workdir / "metrics.jsonl").stat().st_size
        print(f"{num_steps:,} lines, {size / 2**20:.0f} MiB")
        started_s = time.monotonic()
        words = [sys.executable, "-m", "jtrain.dashboard", "--port", "0", str(workdir)]
        server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        address = server.stdout.readline().split()[0]
        print(f"process start to address: {time.monotonic() - started_s:.2f} s")
        for state in ("cold", "warm"):
            page.open(address, width=1400, height=900)
            drawn_ms = page.value(DRAWN)
            print(f"{state}: first paint {page.value(PAINT) / 1e3:.2f} s, drawn {drawn_ms / 1e3:.2f} s")
        for name, move in MOVES.items():
            print(f"{name}: {page.value(FRAMES.format(move=move)):.0f} frames/s")
        server.terminate()
        print(f"exit code {server.wait()}; problems: {page.problems}")


if __name__ == "__main__":
    main()
