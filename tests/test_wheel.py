import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"


def test_an_installed_wheel_finds_its_configs_outside_the_checkout(tmp_path: Path) -> None:
    """Built and unpacked elsewhere, --config=llama8b works as in the checkout."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("jtrain-*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    assert (site / "jtrain_kernels").is_dir()
    code = "import jtrain; from jtrain import launch; print(jtrain.__file__);"
    code += "launch.main(['--config=llama8b', '--print-config'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    where, _, text = done.stdout.partition("\n")
    assert where == str(site / "jtrain" / "__init__.py")
    assert text == (GOLDEN / "llama8b.txt").read_text()
