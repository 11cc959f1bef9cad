import mmap

import numpy as np

from jtrain.runtime.platform import resident_bytes


def test_the_memory_of_a_process_is_counted() -> None:
    """A new mapping of 64 MiB whose pages are all written; mapped by hand, because malloc may reuse memory it
    holds.
    """
    before = resident_bytes()
    assert before is not None
    more = np.frombuffer(mmap.mmap(-1, 64 << 20), np.uint8)
    more[:] = 1
    after = resident_bytes()
    assert after is not None
    assert 60 << 20 < after - before < 80 << 20
    assert more[-1] == 1
