"""What goes to host memory: shares, the order of arrays, slices, and settings that are refused."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jtrain.layout.layout import OffloadSpec, largest_first
from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.optim import AdamW, Muon
from jtrain.step import host_offload
from jtrain.step.host_offload import (
    Slices,
    StreamedParam,
    check_host_memory,
    stream_updates,
    to_device,
    to_host,
)
from tests.step.test_host_offload import setting


@pytest.mark.parametrize(
    ("name", "spec"), (("optimizer", OffloadSpec(optimizer=0.001)), ("params", OffloadSpec(params=0.01)))
)
def test_a_share_below_the_smallest_array_is_refused(name: str, spec: OffloadSpec) -> None:
    """It would move nothing, and say nothing."""
    with pytest.raises(
        ValueError, match=rf"layout.offload.{name}=0.0+1 moves nothing: the smallest array is"
    ):
        setting({}, offload=spec).like()


@pytest.mark.parametrize("stacked", (True, False))
@pytest.mark.parametrize("rows", (1, 2, 6))
def test_slices_cover_everything_once(rows: int, stacked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three layers of 6 x 4, or of one, with a scale for two rows: each slice sees its own rows, once."""
    monkeypatch.setattr(host_offload, "SLICE_ELEMENTS", rows * 4)
    shape, scale_shape = ((3, 6, 4), (3, 3, 4)) if stacked else ((6, 4), (3, 4))
    rng = np.random.default_rng(0)
    grad, param, mu = (rng.standard_normal(shape).astype(np.float32) for _ in range(3))
    scale = rng.standard_normal(scale_shape).astype(np.float32)

    def update(index: Any, pieces: dict[str, jax.Array]) -> dict[str, jax.Array]:
        del index
        count = pieces["seen"] + 1
        wide = jnp.repeat(pieces["scale"], 2, axis=1 if stacked else 0)
        mu = pieces["mu"] * wide + pieces["grad"]
        return {"param": pieces["param"] + mu, "mu": mu, "scale": -pieces["scale"], "seen": count}

    @jax.jit
    def run(grad: Any, param: Any, mu: Any, scale: Any) -> Any:
        arrays = {"grad": grad, "param": param, "mu": to_host(mu), "scale": to_host(scale)}
        arrays["seen"] = jnp.zeros_like(param)
        slices = Slices(arrays, stacked=stacked)
        leaf = StreamedParam(arrays, frozenset({"mu", "scale"}), slices, update)
        assert slices.count == (3 if stacked else 1) * 6 // max(rows, 2), (
            "a slice holds whole blocks of two rows"
        )
        return jax.tree.map(to_device, stream_updates([leaf, leaf], after=jnp.zeros(())))

    wide = np.repeat(scale, 2, axis=1 if stacked else 0)
    for new in run(grad, param, mu, scale):
        np.testing.assert_array_equal(new["seen"], np.ones(shape))
        np.testing.assert_allclose(new["mu"], mu * wide + grad, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(new["param"], param + mu * wide + grad, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(new["scale"], -scale)


def test_the_largest_go_first_and_the_budget_holds() -> None:
    """Ties in the order given; an array too large for what is left makes room for a smaller one."""
    sizes = {"a": 40, "b": 30, "c": 20, "d": 10}
    assert largest_first(0.0, sizes) == frozenset()
    assert largest_first(0.0, {"large": 10**9, "small": 1}) == frozenset(), "a share of nothing moves nothing"
    assert largest_first(100.0, sizes) == frozenset(sizes)
    assert largest_first(55.0, sizes) == {"a", "d"}
    assert largest_first(0.3 * 100, sizes) == {"b"}
    assert largest_first(30.0, {"x": 30, "y": 30}) == {"x"}


BAD: tuple[tuple[dict[str, Any], str], ...] = (
    (dict(optimizer=1.2), r"layout\.offload\.optimizer=1\.2 must be a share from 0\.0 to 1\.0"),
    (dict(params=-0.1), r"layout\.offload\.params=-0\.1 must be a share"),
    (dict(activations=math.nan), r"layout\.offload\.activations=nan must be a share"),
    (
        dict(update="host"),
        r"layout\.offload\.update=host .* layout\.offload\.optimizer=none keeps none there",
    ),
    (
        dict(update="host", optimizer=0.0),
        r"Set layout\.offload\.optimizer=1\.0, or layout\.offload\.update=device",
    ),
    (
        dict(unified_memory=True, params=0.5),
        r"unified_memory=True .* layout\.offload\.params=0\.5 places arrays",
    ),
)


@pytest.mark.parametrize(("fields", "message"), BAD, ids=str)
def test_a_share_out_of_range_is_refused(fields: dict[str, Any], message: str) -> None:
    """Each names the field, its value and the way out."""
    with pytest.raises(ValueError, match=message):
        OffloadSpec(**fields)


def test_as_needed_is_resolved_before_the_layout() -> None:
    """A layout holds numbers."""
    with pytest.raises(ValueError, match=r"layout\.offload\.params=as_needed has to be resolved first"):
        setting({}, offload=OffloadSpec(params="as_needed"))


def test_what_cannot_stream_is_refused() -> None:
    """Muon takes whole matrices; random bits are not for the host's cores."""
    muon = setting({}, offload=OffloadSpec(), optimizer=Muon(3e-3)).layout
    spec = dataclasses.replace(muon.spec, offload=OffloadSpec(optimizer=0.5))
    with pytest.raises(
        ValueError, match=r"layout\.offload\.optimizer=0\.5 with Muon: its update takes whole matrices"
    ):
        setting({}, offload=spec.offload, optimizer=Muon(3e-3))
    host = OffloadSpec(optimizer=1.0, update="host")
    with pytest.raises(ValueError, match=r"layout\.offload\.update=host with optimizer\.moment_dtype=int8"):
        setting({}, offload=host, optimizer=AdamW(3e-3, moment_dtype="int8"))


def test_a_backend_without_host_memory_is_refused() -> None:
    """With what it has instead. A GPU to compile for lists no memories at all, and has one."""
    check_host_memory({"device", "pinned_host"}, "tpu", "TPU v5")
    check_host_memory(set(), "gpu", "NVIDIA H200")
    with pytest.raises(
        ValueError, match=r"Some chip \(odd\) has no memory `pinned_host` .* it has device\. Set"
    ):
        check_host_memory({"device"}, "odd", "Some chip")
    with pytest.raises(ValueError, match=r"it has none\. Set"):
        check_host_memory(set(), "odd", "Some chip")


def test_a_sharding_keeps_its_memory() -> None:
    """On devices that are here, and spec by spec."""
    mesh = make_mesh(MeshSpec(data=8), jax.devices())
    assert host_offload.sharding(mesh, P("data"), "device") == NamedSharding(mesh, P("data"))
    assert host_offload.sharding(mesh, P("data"), "pinned_host").memory_kind == "pinned_host"
