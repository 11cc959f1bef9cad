"""Makes docs/images/report.png, the README's picture: the top of the page that a profiled run of `tiny`
leaves.

    python docs/make_report_picture.py

Trains for half a minute on an idle machine, and needs a headless Chromium on PATH.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PICTURE = Path(__file__).parent / "images" / "report.png"
BROWSERS = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome-stable",
    "google-chrome",
)
MOST_BYTES = 200_000
STEPS = 40  # the fiddler `profile` traces steps 21 to 25


def main() -> None:
    """Trains, opens the page in a browser without a window, and keeps the picture."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        sys.exit(f"needs a headless browser on PATH, one of {', '.join(BROWSERS)}")
    with tempfile.TemporaryDirectory() as folder:
        train = [sys.executable, "-m", "jtrain.launch", "--config=tiny", "--with", "profile"]
        subprocess.run([*train, "--set", f"num_steps={STEPS}", "--workdir", folder], check=True)
        page = Path(folder, "profile", "20", "report.html")
        PICTURE.parent.mkdir(exist_ok=True)
        # Root may not use Chromium's sandbox; the page is our own and loads nothing.
        look = [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--window-size=1000,1100",
        ]
        subprocess.run(
            [*look, f"--screenshot={PICTURE}", page.as_uri()], check=True, stderr=subprocess.DEVNULL
        )
    size = PICTURE.stat().st_size
    if size > MOST_BYTES:
        sys.exit(f"{PICTURE} has {size:,} bytes, over {MOST_BYTES:,}: take a smaller --window-size")
    print(f"{PICTURE}: {size:,} bytes")


if __name__ == "__main__":
    main()
