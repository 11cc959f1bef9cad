"""Commands of the kits as they are written, and the options that let this machine run them."""

import re
import shlex
from pathlib import Path

from tests.launch.hosts import ROOT

PLACES = [
    *(path for path in sorted((ROOT / "launch").rglob("*")) if path.is_file()),
    ROOT / "docs/clusters.md",
]
"""Files with commands of kits: scripts, manifests and their documentation."""

_COMMAND = re.compile(r"--config=\w+(?:,? --(?:set|with),? [\w.]+(?:=[\w.]+)?)*")


def commands() -> dict[str, list[str]]:
    """`file: text` -> config, fiddlers and sets of each training command in a kit, as words.

    A manifest's list of arguments has commas between them.
    """
    return {
        f"{path.relative_to(ROOT)}: {text}": shlex.split(text.replace(",", ""))
        for path in PLACES
        for text in _COMMAND.findall(path.read_text())
    }


def documented(script: str) -> list[str]:
    """Lines of docs/clusters.md with a command that starts `script`, continued lines joined."""
    text = (ROOT / "docs" / "clusters.md").read_text().replace("\\\n", " ")
    lines = [
        line.strip() for line in text.splitlines() if re.search(rf"{re.escape(script)} .*--config=", line)
    ]
    assert lines, script
    return lines


def shrunk(devices: int, workdir: Path) -> list[str]:
    """Options behind a kit's own arguments: small dimensions, as many CPU devices in each process as the kit has
    accelerators there, and a workdir on this machine.
    """
    return ["--with", "small", "--emulate-devices", str(devices), "--workdir", str(workdir)]


def check_trained(workdir: Path, output: str, *, devices: int) -> None:
    """Checks that a kit's run took all devices, and has its last checkpoint."""
    assert f"on all {devices} devices" in output, output
    assert (workdir / "checkpoints" / "5").is_dir(), output
