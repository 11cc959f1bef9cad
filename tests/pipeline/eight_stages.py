"""Program of `test_executor.test_eight_stages`: trains every schedule over eight stages with an option by
name.
"""

import sys

from jtrain.pipeline.published_schedules import PUBLISHED_SCHEDULES
from tests.pipeline.pipelined_runs import assert_composes

if __name__ == "__main__":
    for name in PUBLISHED_SCHEDULES:
        assert_composes(8, name, sys.argv[1])
        print(f"{name}: equal", flush=True)
