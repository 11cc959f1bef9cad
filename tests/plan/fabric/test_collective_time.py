"""Collectives level by level, by hand; fabrics that cannot be."""

import pytest

from jtrain.plan.fabric.collective_time import collective_algorithms
from jtrain.plan.fabric.fabric import Network, make_fabric
from jtrain_kernels.device import from_name
from jtrain_kernels.errors import UserError

GB = 10**9


def test_a_hierarchical_all_reduce_sends_each_adapter_its_part() -> None:
    """64 x H100: 7/8 of the array over 370.8 GB/s of NVLink, twice; 2 * 7/8 of an eighth over 50 GB/s, at 92
    %.
    """
    fabric = make_fabric(from_name("h100"), 64)
    found = {
        algorithm.name: algorithm for algorithm in collective_algorithms(fabric, "all-reduce", GB, share=0.92)
    }
    assert set(found) == {"ring", "double tree", "hierarchical"}
    scatter, middle, gather = found["hierarchical"].phases
    assert scatter.us == gather.us == pytest.approx(7 * 3.4 + 7 / 8 * 1e6 / 370.8)
    assert middle.us == pytest.approx(8.4 + 14 * 14 + 2 * 7 / 8 / 8 * 1e6 / 46)
    assert found["hierarchical"].us == pytest.approx(scatter.us + middle.us + gather.us)
    ring = found["ring"].phases[0]
    assert ring.us == pytest.approx(585.2 + 2 * 63 / 64 * 1e6 / (8 * 46))
    assert ring.level == "network"


def test_a_slow_network_turns_the_order_round() -> None:
    """At 10 Gbit/s per host of eight, what matters is what the adapters send."""
    slow = make_fabric(from_name("h100"), 64)
    names = [algorithm.name for algorithm in collective_algorithms(slow, "all-gather", GB, share=0.01)]
    assert names == ["hierarchical", "ring"]
    assert (
        collective_algorithms(slow, "all-gather", GB, share=0.01)[0].us
        > 50 * collective_algorithms(slow, "all-gather", GB, share=1.0)[0].us
    )


def test_an_all_to_all_is_as_slow_as_its_slower_level() -> None:
    """Of 64 parts 7 stay in the host and 56 leave it."""
    (direct,) = collective_algorithms(make_fabric(from_name("h100"), 64), "all-to-all", GB, share=1.0)
    inside, outside = direct.phases
    assert inside.sent_bytes == pytest.approx(7 / 64 * GB)
    assert outside.us == pytest.approx(22.4 + 56 / 64 * 1e6 / 50)
    assert direct.us == outside.us


def test_slices_of_tpus_reduce_on_their_torus_and_between_slices() -> None:
    """A cube of 64 x v5p: all links at once; 512 x v5e are two slices, joined by the data centre's
    network.
    """
    (cube,) = collective_algorithms(make_fabric(from_name("v5p"), 64), "all-reduce", GB, share=1.0)
    assert cube.us == pytest.approx(2 * 6 + 2 * 63 / 64 * 1e6 / 540)
    found = {
        algorithm.name: algorithm
        for algorithm in collective_algorithms(
            make_fabric(from_name("v5e"), 512), "all-reduce", GB, share=1.0
        )
    }
    assert set(found) == {"rings of the torus", "hierarchical"}
    scatter, middle, _ = found["hierarchical"].phases
    assert scatter.us == pytest.approx(16 + 255 / 256 * 1e6 / 180)
    assert middle.us == pytest.approx(2 * 14 + 2 / 2 / 256 * 1e6 / 3.125)


def test_an_nvl72_rack_is_one_domain() -> None:
    """72 GPUs in 18 hosts: nothing goes over the network."""
    rack, two = make_fabric(from_name("gb200"), 72), make_fabric(from_name("gb200"), 144)
    assert (rack.hosts, rack.domains, two.domains) == (18, 1, 2)
    assert {
        phase.level
        for algorithm in collective_algorithms(rack, "all-reduce", GB, share=1.0)
        for phase in algorithm.phases
    } == {"links"}


@pytest.mark.parametrize(
    ("device", "count", "network", "message"),
    [
        ("h100", 1, Network(), "--count 1: a collective has at least 2 devices."),
        (
            "gb200",
            128,
            Network(),
            "--count 128 is no whole number of domains: links join 72 x gb200. Use 72 or 144, or",
        ),
        (
            "h100",
            16,
            Network(rails=3),
            "network.rails=3 does not divide the 8 adapters of a host. Set it to a divisor",
        ),
        (
            "mi300x",
            16,
            Network(),
            "16 x mi300x span 2 domains of 8, .* Use --count 8 at most, or set host.network_gbit",
        ),
        (
            "rtx4090",
            8,
            Network(),
            "8 x rtx4090 span 8 domains of 1, .* not published. Set host.network_gbit_per_s",
        ),
    ],
)
def test_fabrics_that_cannot_be(device: str, count: int, network: Network, message: str) -> None:
    """Each refusal has the numbers and the algorithm out."""
    with pytest.raises(UserError, match=message):
        make_fabric(from_name(device), count, network)
