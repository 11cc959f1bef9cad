"""`kernels` reaches the compiled step: elementwise kernels of TPUs, and vocabularies split over GPUs."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from jtrain.layout.dims import Batch
from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.model.param import map_params
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, build
from jtrain.step.state import abstract_state
from jtrain.step.train_step import BATCH_SPEC, make_train_step
from jtrain_kernels.compat import no_compile_cache
from jtrain_kernels.compile_only.targets import topology_devices
from tests.layouts import layout_from

SIZES: dict[str, Any] = dict(
    num_layers=2, d_model=512, num_heads=4, num_kv_heads=4, head_dim=128, d_ff=1024, vocab_size=4096
)
FORCED = (("rms_norm_branch", "pallas_tpu"), ("rope", "pallas_tpu"))


def lowered(devices: list[jax.Device], mesh: dict[str, int], **layout: Any) -> Any:
    model, mesh_spec = Transformer(**SIZES), MeshSpec(**mesh)
    lay = layout_from(layout, mesh_spec, model.param_infos())
    optimizer = build(
        AdamW(peak_lr=1e-3), num_steps=10, params=map_params(lambda info: info, model.param_infos())
    )
    there = make_mesh(mesh_spec, devices)
    ids = jax.ShapeDtypeStruct((8, 512), jnp.int32, sharding=NamedSharding(there, BATCH_SPEC))
    step: Any = make_train_step(model, optimizer, lay, there)
    return step.lower(abstract_state(lay, optimizer, there), Batch(ids, ids, ids, ids))


def compiled(topology: str, mesh: dict[str, int], **layout: Any) -> str:
    with no_compile_cache():
        return lowered(topology_devices(topology), mesh, **layout).compile().as_text()


def kernels(text: str) -> list[str]:
    """Lines that call a Pallas kernel."""
    return [line for line in text.splitlines() if "tpu_custom_call" in line and "custom-call(" in line]


@pytest.mark.slow
@pytest.mark.aot
@pytest.mark.parametrize("mesh", (dict(data=4), dict(data=2, tensor=2)), ids=str)
def test_a_step_for_tpus_runs_the_kernels_that_are_forced(mesh: dict[str, int]) -> None:
    """Rotations of queries and keys, forwards and backwards, and the backward pass of both norms of a
    layer.
    """
    text = compiled("v5p:2x2x1", mesh, kernels=FORCED, zero_stage=1)
    names = kernels(text)
    assert sum("rms_norm_backward" in name for name in names) == 2
    assert sum("splash" in name for name in names) == 3
    assert len(names) == 2 + 3 + 4
    unforced = kernels(compiled("v5p:2x2x1", mesh, zero_stage=1))
    assert len(unforced) == 3
    assert all("splash" in name for name in unforced), "attention alone has a kernel by default"


def test_a_kernel_for_other_devices_is_refused_when_the_step_is_traced() -> None:
    """With the device, and with what there is for it."""
    with pytest.raises(
        ValueError, match=r"kernels\.rms_norm_branch=pallas_tpu: it is for TPUs, not for a cpu\. There"
    ):
        lowered(jax.devices()[:4], dict(data=4), kernels=FORCED)


@pytest.mark.slow
@pytest.mark.aot
def test_a_step_for_gpus_gathers_no_unembedding() -> None:
    """Over `tensor` go hidden states and their gradients; nothing has all columns."""
    text = compiled("h200:8", dict(data=2, tensor=4))
    assert "[512,1024]" in text
    assert "[512,4096]" not in text
