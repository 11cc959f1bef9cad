"""What each chip's compiler is told."""

import pytest

from jtrain.compiler import compiler_options
from jtrain.mesh import MeshSpec, make_mesh
from jtrain.plan.aot import topology_devices


@pytest.mark.aot
@pytest.mark.parametrize(
    ("topology", "count", "sparse_cores", "sums"),
    [
        ("v5p:2x2x1", 4, True, True),
        ("v5e:2x2", 4, False, True),
        ("v5p:2x2x1", 1, False, False),
        ("h200:8", 8, False, False),
    ],
)
def test_options_are_those_of_the_chip(topology: str, count: int, sparse_cores: bool, sums: bool) -> None:
    """Sparse cores where a chip has them; sums of gradients stay split on any TPU; one device and GPUs need nothing."""
    options = compiler_options(make_mesh(MeshSpec(data=count), topology_devices(topology)[:count]))
    assert any("sparse_core" in name for name in options) == sparse_cores
    assert ("while-loop-all-reduce" in str(options.get("xla_disable_hlo_passes"))) == sums
    assert bool(options) == (sparse_cores or sums)
