"""llama8b over 128 v5p, as libtpu compiles it."""

import pytest

from bench.tpu_memory import UNKNOWN_CYCLES, estimated_cycles, run
from jtrain.bench import Options, meets_bar

HLO = f"""HloModule m, is_scheduled=true

%cond (p: (s32[])) -> pred[] {{
  %p = (s32[]) parameter(0)
  %bound = s32[] constant(5)
  ROOT %lt = pred[] compare(%p, %bound), direction=LT
}}

%body (p: (s32[])) -> (s32[]) {{
  %dot = f32[8]{{0}} fusion(%x), kind=kOutput, calls=%fused, backend_config={{"estimated_cycles":"100"}}
}}

%fused (x: f32[8]) -> f32[8] {{
  ROOT %x = f32[8]{{0}} parameter(0)
}}

%sent (x: f32[8]) -> f32[8] {{
  ROOT %add = f32[8]{{0}} add(%x, %x), backend_config={{"estimated_cycles":"3000"}}
}}

ENTRY %main (a: f32[8]) -> f32[8] {{
  %w = (s32[]) while(%t), condition=%cond, body=%body
  %copy = f32[8]{{0}} copy(%a), backend_config={{"estimated_cycles":"20"}}
  %kernel = f32[8]{{0}} custom-call(%a), backend_config={{"estimated_cycles":"{UNKNOWN_CYCLES}"}}
  %start = ((f32[8]{{0}}), f32[8]{{0}}) async-start(%a), calls=%sent
  %done = f32[8]{{0}} async-done(%start)
}}
"""


def test_cycles_are_added_up_as_often_as_they_are_spent() -> None:
    """Five iterations and a copy; neither what is asynchronous nor an estimate that is none."""
    assert estimated_cycles(HLO) == 5 * 100 + 20


def test_a_loop_of_unknown_length_is_refused() -> None:
    """A sum would be wrong without a word."""
    with pytest.raises(RuntimeError, match="dot is in a loop whose number of iterations is not known"):
        estimated_cycles(HLO.replace("constant(5)", "parameter(1)"))


@pytest.mark.aot
@pytest.mark.slow
def test_llama8b_over_128_v5p_stays_small_and_fast() -> None:
    """Every bar but that of this machine's own speed: temporaries, network, asynchronous share, the estimate."""
    rows = [row for row in run(Options()) if "whole process" not in row["what"]]
    assert [row["what"] for row in rows if meets_bar(row) is False] == []
    temporaries = next(row["value"] for row in rows if row["what"].endswith("temporaries"))
    assert temporaries is not None
    assert 3.0 < temporaries < 4.5
