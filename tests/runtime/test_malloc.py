import subprocess
import sys

import pytest

from tests.processes import program


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_a_step_reuses_the_pages_of_the_step_before() -> None:
    """Compares page faults per step in a process with the setting and one without: 64 MiB are 16384 pages."""

    def faults(mode: str) -> int:
        command = program(__file__, "count_page_faults", mode)
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return int(done.stdout)

    without = faults("default")
    assert without > 10_000, "nothing to save, so the next line would prove nothing"
    assert faults("keep") < without / 10
