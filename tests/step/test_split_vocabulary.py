"""A vocabulary over `tensor` whose columns come in parts, as one of 128256 does under ZeRO-3."""

import pytest

from jtrain.model import unembedding
from tests.step.test_train_step import SIZES, assert_same, trained


@pytest.mark.slow
@pytest.mark.parametrize("tied", (True, False), ids=("tied", "untied"))
def test_columns_in_parts_on_each_device_are_the_same_model(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three parts of a device's columns, which do not divide them: losses, gradients and weights of one
    device.
    """
    sizes = SIZES | {"tie_embeddings": tied}
    want = trained({}, sizes=sizes)
    assert want.losses[-1] < want.losses[0] - 0.1
    columns = SIZES["vocab_size"] // 2
    monkeypatch.setattr(unembedding, "PART_COLUMNS", -(-columns // 3))
    assert unembedding.num_parts(SIZES["vocab_size"], 2) == 3
    assert columns % 3
    assert_same(trained(dict(data=4, tensor=2), sizes=sizes, zero_stage=3, microbatches=2), want)
