"""Sizes of a model that is built from Python: what a config's own checks refuse before."""

import pytest

from jtrain.errors import UserError
from jtrain.model.transformer import Transformer


@pytest.mark.parametrize("size", [0, True])
def test_a_size_is_a_whole_number_from_1_on(size: int) -> None:
    """True would be one layer."""
    with pytest.raises(UserError, match=rf"model\.num_layers={size} must be at least 1, as a whole number"):
        Transformer(num_layers=size, d_model=8, num_heads=1, num_kv_heads=1, head_dim=8, d_ff=8, vocab_size=8)
