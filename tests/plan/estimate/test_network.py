"""Collectives' times: NCCL's own latencies, and what joins whom."""

import dataclasses
import math

import pytest

from jtrain.layout.mesh import AXES, MeshSpec
from jtrain.plan.estimate.collectives import Collective
from jtrain.plan.estimate.machine import make_machine
from jtrain.plan.estimate.network import Ring, collective_s, nccl_latency_s, ring, seconds


@pytest.mark.parametrize(
    ("hosts", "ring_us", "tree_us"),
    [(1, 56, 64.4), (2, 131.6, 92.4), (8, 585.2, 148.4), (128, 9657.2, 260.4), (2048, 154809.2, 372.4)],
)
def test_nccl_latencies(hosts: int, ring_us: float, tree_us: float) -> None:
    """All-reduce, Simple protocol, eight devices a host: what tuning.cc computes."""
    ring_s = nccl_latency_s("all-reduce", "ring", devices=8 * hosts, hosts=hosts)
    tree_s = nccl_latency_s("all-reduce", "tree", devices=8 * hosts, hosts=hosts)
    assert (1e6 * ring_s, 1e6 * tree_s) == pytest.approx((ring_us, tree_us), rel=1e-9)


def test_gpus_of_a_host_use_links_and_those_of_several_the_network() -> None:
    """Eight GPUs of a host each have an adapter: a flat ring has eight of them, a ring of one GPU per host
    one.
    """
    machine = make_machine("h200", 16)
    flat = ring(machine, MeshSpec(data=16).shape, ("data",))
    assert flat == Ring(16, 2, 8 * 50e9)
    mesh = MeshSpec(data=2, tensor=8).shape
    assert ring(machine, mesh, ("tensor",)) == Ring(8, 1, 450e9)
    assert ring(machine, mesh, ("data",)) == Ring(2, 2, 50e9)
    assert ring(machine, MeshSpec(replica=4, data=4).shape, ("data",)) == Ring(4, 1, 450e9)
    assert ring(machine, MeshSpec(replica=4, data=4).shape, ("replica", "data")) == Ring(16, 2, 400e9)


def test_a_torus_gives_an_axis_its_dimensions() -> None:
    """v5p: 1.8e11 bytes/s for an axis of the torus, three times that for the whole of a 4 x 4 x 4; less
    unwrapped.
    """
    cube = make_machine("v5p", 64)
    assert ring(cube, MeshSpec(data=64).shape, ("data",)).bytes_per_s == pytest.approx(5.4e11)
    mesh = MeshSpec(data=16, tensor=4).shape
    assert ring(cube, mesh, ("tensor",)).bytes_per_s == pytest.approx(1.8e11)
    assert ring(cube, mesh, ("data",)).bytes_per_s == pytest.approx(3.6e11)
    assert ring(make_machine("v5p", 4), MeshSpec(data=4).shape, ("data",)).bytes_per_s == pytest.approx(
        1.8e11
    )


def test_an_exchange_on_a_torus_goes_as_far_as_its_block_is_wide() -> None:
    """v5p: on rings of 4 half of an array goes each way: 1.8e11 bytes/s of it; in 8 x 8 x 8 half, as much in
    2 x 2.
    """
    cube, large = make_machine("v5p", 64), make_machine("v5p", 512)
    assert ring(cube, MeshSpec(data=16, expert=4).shape, ("expert",)).exchanged_bytes_per_s == pytest.approx(
        1.8e11
    )
    whole = ring(large, MeshSpec(data=512).shape, ("data",))
    assert whole.exchanged_bytes_per_s == pytest.approx(0.9e11)
    assert collective_s("all-to-all", 9 * 10**9, whole) == pytest.approx(0.1, rel=1e-3)
    small = make_machine("v5p", 4)
    assert ring(small, MeshSpec(expert=4).shape, ("expert",)).exchanged_bytes_per_s == pytest.approx(1.8e11)
    assert ring(make_machine("h200", 8), MeshSpec(expert=8).shape, ("expert",)).exchanged_bytes_per_s is None


def test_slices_of_tpus_are_joined_by_the_network() -> None:
    """Two v5e pods: a replica each, over 3.1 GB/s a chip; within them the torus."""
    machine = make_machine("v5e", 512)
    mesh = MeshSpec(replica=2, data=256).shape
    assert ring(machine, mesh, ("replica",)).bytes_per_s == 3.125e9
    assert ring(machine, mesh, ("data",)).bytes_per_s == pytest.approx(1.8e11)


def test_more_bytes_more_devices_and_slower_networks_take_longer() -> None:
    """And one device needs no network at all."""
    over = Ring(8, 1, 450e9)
    one = collective_s("all-gather", 10**9, over)
    assert one < collective_s("all-gather", 2 * 10**9, over) < collective_s("all-reduce", 2 * 10**9, over)
    assert one < collective_s("all-gather", 10**9, over, efficiency=0.5)
    assert one < collective_s("all-gather", 10**9, over, count=1000)
    assert collective_s("all-gather", 10**9, dataclasses.replace(over, devices=1)) == 0
    assert math.isclose(one, 1e9 * 7 / 8 / 450e9 + 8.4e-6 + 7 * 3.4e-6)


def test_a_device_without_published_peaks_is_refused() -> None:
    """A CPU's step time would be a guess."""
    with pytest.raises(
        ValueError, match=r"--device cpu: its peaks are not published.*Choose one of: a100, h100"
    ):
        make_machine("cpu", 8)


def test_an_unknown_device_lists_those_that_exist() -> None:
    """With the nearest."""
    with pytest.raises(ValueError, match=r"No device is called 'h2000'\. Did you mean h200, "):
        make_machine("h2000", 8)


@pytest.mark.parametrize(
    ("count", "match"), [(0, "must be at least 1"), (12, "a host has 8 x h200. Use 8, 16,")]
)
def test_a_count_that_is_no_machine_is_refused(count: int, match: str) -> None:
    """Half a host is not rented."""
    with pytest.raises(ValueError, match=f"--count {count}.*{match}"):
        make_machine("h200", count)


def test_a_network_that_nobody_publishes_is_asked_for() -> None:
    """Rather than taken to be infinitely fast."""
    with pytest.raises(ValueError, match=r"links join only 8 x mi300x.*Give --network GBIT"):
        ring(make_machine("mi300x", 16), MeshSpec(data=16).shape, ("data",))
    machine = make_machine("mi300x", 16, network_bytes_per_s=50e9)
    assert ring(machine, MeshSpec(data=16).shape, ("data",)).bytes_per_s == 400e9


@pytest.mark.parametrize(
    ("chip", "axes", "passes"), [("v5p", 8, 2), ("v5p", 4, 1), ("v5p", 64, 1), ("h200", 8, 1)]
)
def test_a_reduce_scatter_over_a_slice_below_a_cube_is_an_all_reduce(
    chip: str, axes: int, passes: int
) -> None:
    """As XLA:TPU compiles it for 8 chips; half a slice's worth, a cube and GPUs scatter."""
    machine, mesh = (
        make_machine(chip, max(axes, 8)),
        {**dict.fromkeys(AXES, 1), "data": axes, "replica": max(1, 8 // axes)},
    )
    sent = Collective("gradients", "reduce-scatter", ("data",), axes, "float32", 1, 10**12)
    gathered = dataclasses.replace(sent, kind="all-gather")
    assert seconds(sent, machine, mesh) == pytest.approx(passes * seconds(gathered, machine, mesh), rel=1e-3)
