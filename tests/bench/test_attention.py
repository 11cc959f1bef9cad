"""What the benchmark of attention does without a GPU: it refuses, and what it would check first is right
here.
"""

import pytest

from jtrain.bench import Options, attention


def test_it_refuses_to_time_a_cpu() -> None:
    """With one line that says what it needs."""
    with pytest.raises(ValueError, match="attention needs an NVIDIA GPU, but the device here is 'cpu'"):
        list(attention.run(Options(calls=1, only=None, shape=None, rehearse=False)))


def test_its_check_tells_right_from_wrong() -> None:
    """Plain JAX in bfloat16 passes, on packed documents; given other values, it does not."""
    arrays = attention.draw_arrays(attention.Shape(1, 64, 2, 1, 8, documents=3))
    assert 0 < attention.largest_error("xla", arrays) < attention.TOLERANCE
    assert len(set(arrays["segment_BL"][0].tolist())) == 3
