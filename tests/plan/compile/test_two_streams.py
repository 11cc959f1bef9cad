"""The two-stream model, on schedules short enough to work out by hand: a FLOP and a byte on the wire a
second.
"""

import dataclasses
from typing import Any, Literal

import pytest

from bench import overlap
from jtrain.config.load import load_config
from jtrain.config.run import build_run, build_run_optimizer
from jtrain.plan.compile.compiled_step import compile_step, topology_devices
from jtrain.plan.compile.stream_clock import Timeline, hidden_share
from jtrain.plan.compile.two_streams import Rates, rates_of, two_streams
from jtrain.plan.from_run import plan_job
from jtrain_kernels.device import from_name

# Memory is so fast that a matmul of 2 * 10 * 10 * 10 FLOPs takes 2000 s, and an elementwise operation
# nothing.
RATES = Rates(
    flops_16=1.0,
    flops_8=2.0,
    flops_32=0.5,
    memory=1e12,
    collective=1.0,
    permute=1.0,
    host=1.0,
    links="switch",
)
MESH = {"tensor": 2}

MATMUL = "bf16[10,10]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
TO = "source_target_pairs={{0,1},{1,0}}"
BACK = "source_target_pairs={{1,0},{0,1}}"
SEND = "(bf16[1000]{0}, bf16[1000]{0}) collective-permute-start(%x), "
ARRIVED = "bf16[1000]{0} collective-permute-done"
FETCH = (
    "%h = (bf16[1000]{0}, bf16[1000]{0:S(5)}, u32[]) copy-start(%far)",
    "%hd = bf16[1000]{0} copy-done(%h)",
)
STORE = (
    "%t = (bf16[1000]{0:S(5)}, bf16[1000]{0}, u32[]) copy-start(%x)",
    "%td = bf16[1000]{0:S(5)} copy-done(%t)",
)


def model(
    *schedule: str, rates: Rates = RATES, kernels: dict[tuple[str, str], float] | None = None
) -> Timeline:
    """The model's run of an entry computation of these instructions, with a loop %body of three turns."""
    body = "\n".join(f"  {line}" for line in schedule)
    return two_streams(
        f"""HloModule m, is_scheduled=true

%condition (p: (s32[])) -> pred[] {{
  %p = (s32[]) parameter(0)
  %bound = s32[] constant(3)
  ROOT %less = pred[] compare(%p, %bound), direction=LT
}}

%endless (p: (s32[])) -> pred[] {{
  ROOT %p = (s32[]) parameter(0)
}}

%body (p: (s32[])) -> (s32[]) {{
  %s = {SEND}{TO}
  %m = {MATMUL}
  %d = {ARRIVED}(%s)
}}

%wrapped (w: bf16[1000]) -> bf16[1000] {{
  %w = bf16[1000]{{0}} parameter(0)
  ROOT %g = bf16[1000]{{0}} all-reduce(%w), replica_groups={{{{0,1}}}}, to_apply=%add
}}

ENTRY %main (a: bf16[10,10]) -> bf16[10,10] {{
  %a = bf16[10,10]{{1,0}} parameter(0)
  %f = f32[10,10]{{1,0}} parameter(1)
  %x = bf16[1000]{{0}} parameter(2)
  %far = bf16[1000]{{0:S(5)}} parameter(3)
{body}
}}
""",
        MESH,
        rates,
        kernels,
    )


def start(name: str, pairs: str = TO) -> str:
    return f"%{name} = {SEND}{pairs}"


def done(name: str) -> str:
    return f"%{name}d = {ARRIVED}(%{name})"


@pytest.mark.parametrize(("matmuls", "hidden", "waiting"), [(1, 1.0, 0), (0, 0.0, 2000)])
def test_a_transfer_hides_behind_what_is_computed_between_its_start_and_its_done(
    matmuls: int, hidden: float, waiting: float
) -> None:
    """2000 bytes beside a matmul of 2000 s, or beside nothing; a second matmul comes too late either way."""
    found = model(start("s"), *[f"%m{i} = {MATMUL}" for i in range(matmuls)], done("s"), f"%late = {MATMUL}")
    assert (found.hidden_share, found.waiting_s) == (hidden, waiting)
    assert found.compute_s == pytest.approx(2000 * (matmuls + 1))


def test_what_is_longer_than_the_matmul_beside_it_is_waited_for() -> None:
    """Twice the FLOP/s: half of the transfer; every turn of the loop counts."""
    fast = dataclasses.replace(RATES, flops_16=2.0)
    found = model("%w = (s32[]) while(%t), condition=%condition, body=%body", rates=fast)
    (hop,) = found.hops
    assert (hop.count, hop.bytes, hop.seconds, hop.hidden_s) == (3, 6000, 6000, pytest.approx(3000))
    assert (found.compute_s, found.waiting_s) == (pytest.approx(3000), pytest.approx(3000))
    assert found.hidden_share == pytest.approx(0.5)


@pytest.mark.parametrize(("links", "waiting"), [("switch", 2000), ("torus", 0)])
def test_transfers_queue_for_the_link_that_they_share(
    links: Literal["switch", "torus"], waiting: float
) -> None:
    """Both ways around the ring at once: one link behind a switch, two on a torus."""
    schedule = start("s", TO), start("t", BACK), f"%m = {MATMUL}", done("s"), done("t")
    found = model(*schedule, rates=dataclasses.replace(RATES, links=links))
    assert found.wire_s == 4000
    assert found.waiting_s == pytest.approx(waiting)
    assert found.hidden_share == pytest.approx(1 - waiting / 4000)


def test_copies_of_host_memory_have_a_link_each_way_besides_the_network() -> None:
    """All three at once beside one matmul; two fetches queue, and one that is no pair is waited for."""
    together = model(start("s"), FETCH[0], STORE[0], f"%m = {MATMUL}", done("s"), FETCH[1], STORE[1])
    assert (together.waiting_s, together.hidden_share) == (0, 1.0)
    assert [(hop.kind, hop.bytes) for hop in together.hops[1:]] == [("to device", 2000), ("to host", 2000)]
    again = [line.replace("%h", "%g") for line in FETCH]
    assert model(FETCH[0], again[0], f"%m = {MATMUL}", FETCH[1], again[1]).waiting_s == 2000
    at_once = model("%c = bf16[1000]{0} copy(%far)", f"%m = {MATMUL}")
    assert (at_once.waiting_s, hidden_share(at_once.hops)) == (2000, 0.0)


def test_copies_over_a_link_of_unknown_speed_are_refused() -> None:
    with pytest.raises(
        ValueError, match="copies to or from host memory, but the speed of that link is not published"
    ):
        model(*FETCH, rates=dataclasses.replace(RATES, host=None))


def test_a_collective_that_is_not_in_flight_hides_nothing() -> None:
    """Synchronous: an instruction of its own, or a pair that the compiler says is none."""
    gather = "bf16[2000]{0} all-gather(%x), replica_groups={{0,1}}, dimensions={0}"
    both = f"{SEND}{TO}" + ', backend_config={"is_sync":true}'
    for schedule in ((f"%g = {gather}", f"%m = {MATMUL}"), (f"%s = {both}", f"%m = {MATMUL}", done("s"))):
        found = model(*schedule)
        assert (found.waiting_s, found.hidden_share) == (2000, 0)


def test_a_collective_inside_a_call_counts_where_the_call_starts() -> None:
    """Sparse cores: an all-reduce sends twice (n - 1) / n of its array, on all links."""
    found = model(
        "%c = ((), (), (s32[1]{0})) call-start(), to_apply=%wrapped",
        f"%m = {MATMUL}",
        "%cd = bf16[1000]{0} call-done(%c), to_apply=%wrapped",
    )
    assert [(hop.kind, hop.bytes, hop.hidden_s) for hop in found.hops] == [("all-reduce", 2000, 2000)]


@pytest.mark.parametrize(("matmul_first", "waiting"), [(True, 2000), (False, 0)])
def test_a_sparse_core_sends_when_it_is_given_the_data(matmul_first: bool, waiting: float) -> None:
    """Its start has no operands: what is computed before the update hides nothing."""
    begin = "%c = ((), (), (s32[1]{0})) call-start(), to_apply=%wrapped"
    update = "%cu = ((bf16[1000]{0}), bf16[1000]{0}, (s32[1]{0})) call-update(%c, %x), to_apply=%wrapped"
    end = "%cd = bf16[1000]{0} call-done(%cu), to_apply=%wrapped"
    matmul = f"%m = {MATMUL}"
    found = model(begin, *((matmul, update) if matmul_first else (update, matmul)), end)
    assert found.waiting_s == waiting
    assert found.hidden_share == 1 - waiting / 2000


def test_seconds_of_the_network_may_be_given() -> None:
    """By kind, mesh axes, bytes of the whole array and size of a group; without them bytes over the link's
    rate.
    """
    asked: list[tuple[str, tuple[str, ...], int, int]] = []

    def network(*what: Any) -> float:
        asked.append(what)
        return 7.0

    found = model(
        "%g = bf16[2000]{0} all-gather(%x), replica_groups={{0,1}}, dimensions={0}",
        rates=dataclasses.replace(RATES, network=network),
    )
    assert asked == [("all-gather", ("tensor",), 4000, 2)]
    assert found.waiting_s == 7


def test_each_dtype_has_its_rate_and_kernels_share_their_seconds() -> None:
    """float32 operands at half of bfloat16's FLOP/s; two kernels of one place have 300 s together."""
    assert model(f"%m = {MATMUL.replace('%a', '%f')}").compute_s == pytest.approx(4000)
    scope = 'metadata={op_name="jvp(layers)/attention"}'
    kernel = f'bf16[10]{{0}} custom-call(%a), custom_call_target="mosaic_gpu_v2", {scope}'
    twice = f"%k = {kernel}", f"%l = {kernel}"
    assert model(*twice, kernels={("forward", "layers/attention"): 300.0}).compute_s == pytest.approx(300)
    slow = dataclasses.replace(RATES, memory=0.001)
    assert model(
        *twice, kernels={("forward", "layers/attention"): 300.0}, rates=slow
    ).compute_s == pytest.approx(300)
    lines = kernel.replace(", metadata", ', frontend_attributes={kernel_metadata={\n"a":1\n}}, metadata')
    assert model(
        f"%k = {lines}", kernels={("forward", "layers/attention"): 300.0}
    ).compute_s == pytest.approx(300)
    assert model(*twice).compute_s < 1, "without their seconds, their bytes"


def test_a_loop_of_unknown_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a loop's trip count is not in the HLO"):
        model("%w = (s32[]) while(%t), condition=%endless, body=%body")


def test_rates_are_those_of_the_device_table() -> None:
    """An H200's links are one each way; a v5p's ring has both directions of one of three dimensions."""
    h200, v5p = (rates_of(from_name(name), 8) for name in ("h200", "v5p"))
    assert (h200.collective, h200.permute, h200.links) == (450e9, 450e9, "switch")
    assert (v5p.collective, v5p.permute, v5p.links) == (180e9, 90e9, "torus")
    assert (h200.host, v5p.host) == (64e9, 15e9)
    assert h200.flops_8 == pytest.approx(2 * h200.flops_16, rel=1e-3)


@pytest.mark.parametrize(("name", "devices"), [("cpu", 1), ("h200", 16)])
def test_devices_without_peaks_or_links_are_refused(name: str, devices: int) -> None:
    with pytest.raises(
        ValueError, match=f"{name}: the two-stream model needs published peaks and links that join"
    ):
        rates_of(from_name(name), devices)


@pytest.mark.slow
@pytest.mark.aot
def test_groups_hide_more_of_the_wire_than_pieces_on_gpus() -> None:
    """Two layers of llama8b over 8 H200, where embedding and loss are a tenth of the wire's seconds.

    Groups cost no pass over memory; pieces do, so that a step in pieces is not shorter than the plain one.
    """
    forms = {"plain": (), "pieces": ("layout.tensor_overlap=True",), "groups": ("layout.sequence_groups=4",)}
    found: dict[str, Timeline] = {}
    for form, sets in forms.items():
        built = build_run(load_config("llama8b", sets=(*overlap.SETTINGS, "model.num_layers=2", *sets)))
        job = plan_job(built)
        program = compile_step(job, build_run_optimizer(built), devices=topology_devices("h200:8"))
        rates, kernels = rates_of(from_name("h200"), 8), overlap.attention_s("h200")
        found[form] = two_streams(program.hlo, job.layout.mesh.shape, rates, kernels)
    assert found["plain"].hidden_share < 0.3 < 0.7 < found["groups"].hidden_share
    assert found["groups"].compute_s == pytest.approx(found["plain"].compute_s, rel=0.03)
    assert found["groups"].waiting_s < 0.4 * found["plain"].waiting_s
    assert found["pieces"].compute_s > 1.1 * found["plain"].compute_s
