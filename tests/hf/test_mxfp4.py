"""Weights of 4 bits: numbers and shapes as in the format, read from a file."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jtrain.errors import UserError
from jtrain.hf.model_files import open_tensors
from jtrain.hf.mxfp4 import VALUES, dequantize


def test_every_code_is_its_number_times_its_scale() -> None:
    """All 16 codes in both halves of a byte, with scales of 1, 4 and 1/8; nothing is rounded."""
    codes = np.arange(96, dtype=np.uint8).reshape(3, 2, 16) * 7 % 16
    blocks = codes[:, 0] | codes[:, 1] << 4
    numbers = dequantize(blocks[None], np.array([[127, 129, 124]], np.uint8))
    assert numbers.dtype == ml_dtypes.bfloat16
    assert numbers.shape == (1, 96)
    want = np.array([1.0, 4.0, 0.125])[:, None, None] * VALUES[codes]
    np.testing.assert_array_equal(numbers.astype(np.float64).reshape(3, 16, 2), want.swapaxes(1, 2))
    assert set(VALUES[codes].ravel()) == set(VALUES), "every code is met"


def test_a_directory_with_blocks_has_the_transposed_tensor(tmp_path: Path) -> None:
    """`NAME_blocks` and `NAME_scales` are read as `NAME`, with inputs before outputs."""
    random = np.random.RandomState(0)
    blocks = random.randint(0, 256, (2, 6, 1, 16)).astype(np.uint8)
    scales = random.randint(120, 130, (2, 6, 1)).astype(np.uint8)
    save_file({"up_blocks": blocks, "up_scales": scales, "bias": scales}, tmp_path / "model.safetensors")
    with open_tensors(tmp_path) as tensors:
        assert set(tensors) == {"up", "bias"}
        up = tensors["up"]()
    assert up.shape == (2, 32, 6)
    low = VALUES[blocks[1, 4, 0, 3] & 15] * 2.0 ** (int(scales[1, 4, 0]) - 127)
    assert float(up[1, 6, 4]) == low


def test_blocks_without_scales_are_named(tmp_path: Path) -> None:
    """A file of a pair that is missing is no other model."""
    save_file({"up_blocks": np.zeros((1, 1, 16), np.uint8)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="tensor up_blocks has no up_scales"), open_tensors(tmp_path):
        pass
