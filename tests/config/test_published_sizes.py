"""Parameters of shipped configs against the published ones."""

import pytest

from jtrain.config.load import load_config
from jtrain.config.run import build_run


@pytest.mark.parametrize(
    ("name", "num_params"),
    [
        ("llama1b", 1_235_814_400),
        ("llama8b", 8_030_261_248),
        ("llama70b", 70_553_706_496),
        ("qwen3_8b", 8_190_735_360),
        ("qwen25_7b", 7_615_616_512),
        ("mistral_7b", 7_248_023_552),
        ("olmo3_7b", 7_298_011_136),
        # Of 12,187,325,040, less 416,866,032 of the vision tower and 4,424,832 of its projection.
        ("gemma3_12b", 11_766_034_176),
        # Of 110,468,824,832, less 3,616,573,568 of the layer that predicts a second token.
        ("glm45_air", 106_852_251_264),
        # Of 228,703,644,928, less 13,880,064 scales of weights in 8 bits.
        ("minimax_m2", 228_689_764_864),
    ],
)
def test_a_shipped_model_has_the_published_number_of_parameters(name: str, num_params: int) -> None:
    """What Hugging Face shows for the published weights, to the last one."""
    assert sum(info.size for info in build_run(load_config(name)).model.param_infos()) == num_params
