"""Loads of links under a hash: small cases by hand, the published table, random draws and the spine's
slowdown.
"""

import math

import pytest

from jtrain.plan.fabric.fabric import Network, make_fabric
from jtrain.plan.fabric.hashing import effective_queue_pairs, expected_max_load, simulated_max_load
from jtrain.plan.fabric.spine import advised_queue_pairs, incast, senders_to_one, spine_traffic
from jtrain_kernels.device import from_name

MIB = 2**20

TABLE = {
    (8, 8): (2.58, 2.11, 1.76, 1.53, 1.37, 1.26),
    (16, 16): (3.09, 2.41, 1.96, 1.67, 1.47, 1.32),
    (32, 16): (4.82, 3.93, 3.33, 2.92, 2.64, 2.45),
    (64, 16): (7.87, 6.69, 5.86, 5.29, 4.91, 4.64),
}
"""(flows, links) -> load of the fullest link in flows, with 1, 2, 4, 8, 16 and 32 queue pairs; drawn 4,000
times."""


@pytest.mark.parametrize(
    ("flows", "links", "load"),
    [(2, 2, 1.5), (3, 2, 2.25), (2, 3, 4 / 3), (1, 7, 1), (5, 1, 5), (3, 3, (6 * 1 + 18 * 2 + 3 * 3) / 27)],
)
def test_the_exact_load_of_few_flows(flows: int, links: int, load: float) -> None:
    """By counting all ways of the hash."""
    assert expected_max_load(flows, links) == pytest.approx(load, rel=1e-8)


@pytest.mark.parametrize(("flows", "links"), TABLE)
def test_exact_loads_meet_the_table_and_random_draws(flows: int, links: int) -> None:
    """Within 3 % of the table; draws within 1 % of the exact load. More queue pairs are always more even."""
    exact = [expected_max_load(flows, links, 1 << power) for power in range(6)]
    drawn = [simulated_max_load(flows, links, 1 << power) for power in range(6)]
    assert exact == pytest.approx(TABLE[flows, links], rel=0.03)
    assert drawn == pytest.approx(exact, rel=0.01)
    assert exact == sorted(exact, reverse=True)
    assert exact[-1] > flows / links


def test_draws_depend_on_their_seed_alone() -> None:
    """The same seed, the same number."""
    assert simulated_max_load(64, 16, seed=1) == simulated_max_load(64, 16, seed=1)
    assert simulated_max_load(64, 16, seed=1) != simulated_max_load(64, 16, seed=2)


def test_many_flows_are_even() -> None:
    """16,384 flows over 32 links: the fullest has 8 to 12 % more than the mean, by the usual bound."""
    load = expected_max_load(16_384, 32) / 512
    assert 1.08 < load < 1 + math.sqrt(2 * math.log(32) / 512) < 1.12


def test_queue_pairs_without_a_message_carry_nothing() -> None:
    """16 MiB over two connections in chunks of 512 KiB are 16 messages each; 1 KiB is one."""
    assert effective_queue_pairs(32, 16.0 * MIB, 2) == 16
    assert effective_queue_pairs(8, 16.0 * MIB, 2) == 8
    assert effective_queue_pairs(8, 1024.0, 2) == 1


def test_only_what_leaves_a_leaf_crosses_the_spine() -> None:
    """Rails of 32 hosts: 64 hosts in order send 1 adapter's flows over it, in any order all 32 adapters'."""
    hashed = Network(routing="hashed")
    small, large = (make_fabric(from_name("h100"), count, hashed) for count in (256, 512))
    assert spine_traffic(small, "all-reduce", connections=2, scattered=True).flows == 0
    assert spine_traffic(small, "all-reduce", connections=2, scattered=True).slowdown() == 1
    ordered = spine_traffic(large, "all-reduce", connections=2, scattered=False)
    scattered = spine_traffic(large, "all-reduce", connections=2, scattered=True)
    assert (ordered.flows, scattered.flows, scattered.links, scattered.demand) == (2, 64, 32, 0.5)
    assert ordered.slowdown() == 1
    assert scattered.slowdown() == pytest.approx(expected_max_load(64, 32) / 2)
    exchange = spine_traffic(large, "all-to-all", connections=1, scattered=True)
    assert exchange.flows == 32 * 32
    assert exchange.flows * exchange.demand / exchange.links == pytest.approx(32 / 63), (
        "32 of 63 others are elsewhere"
    )


def test_oversubscription_slows_what_crosses_even_without_a_hash() -> None:
    """Half as many uplinks as adapters: half the rate."""
    fabric = make_fabric(from_name("h100"), 512, Network(oversubscription=2.0))
    assert (fabric.uplinks, fabric.uplink_bytes_per_s) == (16, 50e9)
    assert spine_traffic(fabric, "all-reduce", connections=2, scattered=True).slowdown() == pytest.approx(2)
    assert spine_traffic(fabric, "all-reduce", connections=2, scattered=False).slowdown() == 1


def test_advised_queue_pairs_stop_where_they_gain_little() -> None:
    """And at the number of messages."""
    fabric = make_fabric(from_name("h100"), 512, Network(routing="hashed"))
    traffic = spine_traffic(fabric, "all-reduce", connections=2, scattered=True)
    advised = advised_queue_pairs(traffic, limit=32)
    assert advised == 16
    assert traffic.slowdown(advised // 2) / traffic.slowdown(advised) >= 1.1
    assert traffic.slowdown(advised) / traffic.slowdown(advised * 2) < 1.1
    assert advised_queue_pairs(traffic, limit=5) == 4


def test_receivers_that_admit_senders_bound_what_a_switch_holds() -> None:
    """63 senders of 16 MiB: all but one wait; with windows of 4 MiB each waits with a window."""
    found = incast(63, 16.0 * MIB, 64.0 * MIB)
    assert (found.backlog_bytes, found.admitted_bytes) == (62 * 16 * MIB, 62 * 4 * MIB)
    assert found.overflows
    assert found.window_bytes == pytest.approx(64 * MIB / 62)
    assert not incast(63, 1.0 * MIB, 64.0 * MIB).overflows
    assert incast(1, 64.0 * MIB, 1.0).overflows is False
    assert incast(2, 64.0 * MIB, None).overflows is None
    assert [senders_to_one("all-reduce", name, 64) for name in ("Ring", "NVLSTree")] == [1, 2]
    assert senders_to_one("all-to-all", "Ring", 64) == 63
