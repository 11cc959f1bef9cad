"""Builds the C core of the data plane into the package: `python hatch_build.py`, or with any wheel.

Without a C compiler nothing is built and nothing fails: NumPy does the core's work, and the first lines of a
run say so. The library uses no header of Python, so a wheel serves every version of Python on its platform.
"""

import hashlib
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "jtrain" / "data" / "native"
LIBRARY = FOLDER / "_core.so"


def build(library: Path = LIBRARY) -> str | None:
    """Builds the core; returns why it could not be built, None if it was."""
    sources = sorted(FOLDER.glob("*.c"))
    built_from = hashlib.blake2b(b"".join(s.read_bytes() for s in sources), digest_size=8).hexdigest()
    flags = ["-std=c11", "-O3", "-shared", "-fPIC", "-fvisibility=hidden", f'-DCORE_SOURCE="{built_from}"']
    # Renamed when it is whole: runs that have the old library mapped go on with it.
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="_core-") as folder:
        command = [os.environ.get("CC", "cc"), *flags, "-o", f"{folder}/core.so", *map(str, sources)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except OSError as error:
            return f"no C compiler: {error}"
        except subprocess.CalledProcessError as error:
            return f"{' '.join(command)} failed:\n{error.stderr}"
        Path(folder, "core.so").replace(library)
    return None


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script where hatchling is not installed
    BuildHookInterface = None

if BuildHookInterface is not None:

    class CoreBuildHook(BuildHookInterface[Any]):
        """Adds the core to a wheel, or builds it in place for an editable installation."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            if (reason := build()) is not None:
                LIBRARY.unlink(missing_ok=True)  # one of another source must not end up in the wheel
                self.app.display_warning(f"jtrain is built without its C core: {reason}")
                return
            if version == "editable":
                return
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["artifacts"].append(f"/{LIBRARY.relative_to(self.root)}")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"


if __name__ == "__main__":
    sys.exit(build())
