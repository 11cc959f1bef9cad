"""NCCL's own model: its published latencies, its choices, and published measurements."""

import pytest

from bench import nccl_model
from jtrain.plan.fabric.fabric import Network, make_fabric
from jtrain.plan.fabric.nccl_channels import SLOWEST, Channels, Node
from jtrain.plan.fabric.nccl_model import (
    Group,
    bus_bandwidth,
    estimates,
    nccl_group,
    on_network,
    time_us,
    timed,
)
from jtrain_kernels.device import from_name


def group_of(device: str, count: int, network: Network | None = None) -> Group:
    group = nccl_group(make_fabric(from_name(device), count, network))
    assert group is not None
    return group


def choice(group: Group, array_bytes: int) -> tuple[str, str]:
    best = timed(group, "all-reduce", array_bytes)[0].estimate
    return best.algorithm, best.protocol


@pytest.mark.parametrize(
    ("hosts", "ring_us", "tree_us"),
    [(1, 56, 64.4), (2, 131.6, 92.4), (8, 585.2, 148.4), (128, 9657.2, 260.4), (2048, 154809.2, 372.4)],
)
def test_latencies_of_simple_are_those_of_the_sources(hosts: int, ring_us: float, tree_us: float) -> None:
    """All-reduce over hosts of eight H100, before the factor for sizes."""
    found = {
        (one.algorithm, one.protocol): one.latency_us
        for one in estimates(group_of("h100", 8 * hosts), "all-reduce")
    }
    assert found["Ring", "Simple"] == pytest.approx(ring_us, rel=1e-9)
    assert found["Tree", "Simple"] == pytest.approx(tree_us, rel=1e-9)


@pytest.mark.parametrize(
    ("node", "ring", "nvls"),
    [
        (Node(8, "hopper", 370.8, None), Channels(12, 30.0), Channels(8, 40.0)),
        (Node(8, "hopper", 370.8, 48.0), Channels(8, 45.0), Channels(8, 40.0)),
        (Node(8, "ampere", 240.0, None), Channels(12, 20.0), Channels(7, 30.0)),
        (Node(8, "blackwell", 721.8, None), Channels(16, 45.0), Channels(8, 80.0)),
        (Node(8, "hopper", 370.8, 0.1), SLOWEST, SLOWEST),
    ],
    ids=str,
)
def test_channels_are_those_that_nccl_logs(node: Node, ring: Channels, nvls: Channels) -> None:
    """H100: 24 channels on a host and 16 between hosts, each found channel used twice; A100: 12 of 20
    GB/s.
    """
    assert (node.ring(), node.nvls()) == (ring, nvls)


def test_a_host_of_eight_h100_changes_from_ring_ll_to_nvls_between_one_and_two_mib() -> None:
    """As NCCL 2.26.2 said of itself: NVIDIA/nccl-tests issue 309."""
    group = group_of("h100", 8)
    assert {choice(group, 1 << power) for power in range(3, 21)} == {("Ring", "LL")}
    assert {choice(group, 1 << power) for power in range(21, 35)} == {("NVLS", "Simple")}


def test_choices_between_hosts_go_from_trees_to_nvls_trees_to_rings() -> None:
    """Over four hosts, by size; over two hosts NVLSTree stays the best, as NVIDIA says of its own tests."""
    assert [choice(group_of("h100", 32), 1 << power) for power in (10, 20, 26, 33)] == [
        ("Tree", "LL"),
        ("Tree", "LL128"),
        ("NVLSTree", "Simple"),
        ("Ring", "Simple"),
    ]
    assert choice(group_of("h100", 16), 1 << 33) == ("NVLSTree", "Simple")


def test_published_tables_are_met_within_fifteen_percent_on_average() -> None:
    """162 times over 1 to 32 hosts of 8 x H100, nothing fitted; the other network's latency is its
    plugin's.
    """
    tables = nccl_model.published_tables()
    errors = {what: [one.error for one in rows] for what, rows in tables}
    assert sum(map(len, errors.values())) == 162
    assert {rows[0].hosts for _, rows in tables} == {1, 2, 4, 8, 16, 32}
    every = [abs(error) for rows in errors.values() for error in rows]
    assert sum(every) / len(every) < 0.15
    assert max(sum(map(abs, rows)) / len(rows) for rows in errors.values()) < 0.2
    longest = [rows[-1] for rows in errors.values()]
    assert max(map(abs, longest)) < 0.15, "the largest size of each table"


def test_the_plugins_latency_counts_twice_with_simple_and_once_otherwise() -> None:
    """Two hops of a tree over two hosts, up and down; AWS EFA says 75 us."""
    plain, slow = group_of("h100", 16), group_of("h100", 16, Network(latency_us=75.0))
    for before, after in zip(estimates(plain, "all-reduce"), estimates(slow, "all-reduce"), strict=True):
        hops = 2 * (2 if before.protocol == "Simple" else 1)
        assert after.latency_us - before.latency_us == pytest.approx(75.0 * hops), before


def test_a_congested_network_slows_what_sends_most_over_it() -> None:
    """At a quarter of the rate a ring over 16 hosts is limited by the adapters, and NCCL chooses as
    before.
    """
    group, size = group_of("h100", 128), 1 << 32
    ring = next(
        one for one in estimates(group, "all-reduce") if one.algorithm == "Ring" and one.protocol == "Simple"
    )
    sent_us = 2 * 127 / 128 * size / 8 / (1000 * 50 * 0.25)
    assert on_network(ring, group, "all-reduce", size, share=0.25) == pytest.approx(ring.latency_us + sent_us)
    assert on_network(ring, group, "all-reduce", size, share=1.0) == time_us(ring, group, "all-reduce", size)
    congested, free = (timed(group, "all-reduce", size, share=share) for share in (0.25, 1.0))
    assert [row.estimate for row in congested] == [row.estimate for row in free]
    assert congested[0].network_us > 3 * free[0].network_us


def test_gathers_have_rings_nvls_in_a_domain_and_pat_for_single_gpus() -> None:
    """NVLS gathers within one domain of up to 32 GPUs; PAT is for hosts of one GPU."""
    assert {one.algorithm for one in estimates(group_of("h100", 8), "all-gather")} == {"Ring", "NVLS"}
    assert {one.algorithm for one in estimates(group_of("h100", 16), "all-gather")} == {"Ring"}
    assert {one.algorithm for one in estimates(group_of("gb200", 72), "reduce-scatter")} == {"Ring"}
    single = Group(Node(1, "hopper", float("inf"), 50.0), 16, 50.0)
    assert {one.algorithm for one in estimates(single, "all-gather")} == {"Ring", "PAT"}
    assert {one.algorithm for one in estimates(group_of("a100", 16), "all-reduce")} == {"Ring", "Tree"}
    sharp = estimates(group_of("h100", 16, Network(sharp=True)), "all-reduce")
    assert {one.algorithm for one in sharp} >= {"NVLS", "NVLSTree"}


def test_an_nvl72_rack_reduces_in_its_switch_at_a_published_rate() -> None:
    """846.8 GB/s of bus bandwidth at 8 GiB were published (coreweave/nccl-tests pull request 43); 18 %
    less.
    """
    best = timed(group_of("gb200", 72), "all-reduce", 1 << 33)[0]
    assert best.estimate.algorithm == "NVLS"
    assert bus_bandwidth("all-reduce", 72, 1 << 33, best.nccl_us) == pytest.approx(846.8, rel=0.2)


def test_other_makers_have_no_model_of_nccl() -> None:
    """TPUs and AMD's GPUs."""
    for device, count in (("v5p", 64), ("mi300x", 8)):
        assert nccl_group(make_fabric(from_name(device), count)) is None
