"""The expert exchange of the shipped mixture, as compiled for eight H200."""

import pytest

from bench.overlap import mixture_run, mixture_step
from jtrain.plan.estimate.collectives import collectives
from jtrain.plan.from_run import plan_job


@pytest.mark.aot
@pytest.mark.slow
def test_the_expert_exchange_is_beside_matmuls() -> None:
    """Three quarters of its bytes or more, and the planner counts the same arrays.

    Of four pieces, the first sending and the last return of each pass have none beside them: 18 of 24
    exchanges do.
    """
    program = mixture_step("h200")
    (sent,) = (t for t in program.traffic if t.kind == "ragged-all-to-all")
    assert sent.async_bytes == sent.array_bytes
    assert sent.hidden_bytes / sent.array_bytes >= 0.75

    job = plan_job(mixture_run())
    (rows,) = (c for c in collectives(job) if c.kind == "ragged-all-to-all")
    assert sent.count == rows.count == 48 * 32 * 6 * 4
    assert sent.array_bytes == rows.array_bytes
