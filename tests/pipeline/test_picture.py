"""Pictures of schedules as text."""

import pytest

from jtrain.pipeline.clocks import dataflow, unit_costs
from jtrain.pipeline.picture import memory_rows, text_rows
from jtrain.pipeline.published_schedules import PUBLISHED_SCHEDULES, make_schedule


def test_operations_stand_where_they_happen() -> None:
    """1F1B of 2 stages and 3 microbatches, by hand: F takes one unit of 4 columns, B two."""
    schedule = make_schedule("1f1b", 2, 3)
    rows = [row.plain for row in text_rows(dataflow(schedule, unit_costs(schedule)), stages=2, width=80)]
    assert rows == [
        "worker 0  F0--F1--........B0------F2--B1------....B2------    2 in flight",
        "worker 1  ....F0--B0------F1--B1------F2--B2------........    1 in flight",
    ]


@pytest.mark.parametrize("name", PUBLISHED_SCHEDULES)
@pytest.mark.parametrize("width", (40, 80, 300))
def test_every_line_is_as_wide_as_the_time(name: str, width: int) -> None:
    """Also where operations are shorter than a column."""
    schedule = make_schedule(name, 4, 16)
    timeline = dataflow(schedule, unit_costs(schedule))
    rows = [row.plain for row in text_rows(timeline, stages=4, width=width)]
    columns = {len(row.removesuffix(" in flight")) for row in rows}
    assert len(columns) == 1
    assert columns.pop() <= max(width, 46)
    assert {len(row.plain) for row in memory_rows(timeline, width=width)} == {len(rows[0]) - 15}
