"""CSV of schedules: what is written is read back, and errors name line and cell."""

import random
from pathlib import Path

import pytest

from jtrain.errors import FileError, UserError
from jtrain.pipeline.cells import parse_csv, read_csv, to_csv
from jtrain.pipeline.checker import check
from jtrain.pipeline.published_schedules import PUBLISHED_SCHEDULES, make_schedule
from tests.pipeline.toy import random_schedule


@pytest.mark.parametrize("name", PUBLISHED_SCHEDULES)
def test_a_published_schedule_survives_the_file(name: str, tmp_path: Path) -> None:
    """Streams, chunks and placement; the numbers of the run are checked on the way."""
    schedule = make_schedule(name, 4, 8)
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(schedule))
    read = read_csv(path, stages=4, microbatches=8)
    assert read.streams == schedule.streams
    assert (read.chunks, read.placement) == (schedule.chunks, schedule.placement)
    check(read)


def test_random_schedules_survive_the_text() -> None:
    """Also those that split only some backward passes."""
    for seed in range(20):
        schedule = random_schedule(random.Random(seed))
        assert parse_csv(to_csv(schedule), "mine").streams == schedule.streams


def test_columns_are_units_of_time() -> None:
    """1F1B as people draw it; B is followed by an empty cell, since it takes two units."""
    assert to_csv(make_schedule("1f1b", 2, 2)) == "0F0,0F1,,,0B0,,,0B1,\n,1F0,1B0,,1F1,1B1,,,\n"


def test_idle_cells_spaces_and_empty_lines_mean_nothing() -> None:
    """As people write and spreadsheets export."""
    read = parse_csv("0F0, ,,0I0 , 0W0\r\n\r\n,1F0,1B0,\r\n,,\r\n , \r\n", "mine")
    assert [" ".join(map(str, stream)) for stream in read.streams] == ["0F0 0I0 0W0", "1F0 1B0"]
    check(read)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "schedule mine is empty. Write a row of operations per worker, such as 0F0,0B0."),
        (",,\n", "schedule mine is empty."),
        (" , \n", "schedule mine is empty."),
        (
            "0F0,0B0\n1F0,,1G0\n",
            "schedule mine, line 2, cell 3: '1G0' is not an operation. Write virtual stage, F, I",
        ),
        ("0F0,0B0\n\n1F0,B0\n", "schedule mine, line 3, cell 2: 'B0' is not an operation."),
        ("0F0,0SEND_F0,0B0\n", "schedule mine, line 1, cell 2: '0SEND_F0' is not an operation."),
        ("0F0,0B0\n0F1,0B1\n1F0\n", "virtual stages 0 to 1 in 3 rows. .* a multiple of 3"),
        ("0F0,0B0\n0F1\n1F0\n2F0\n", "virtual stages 0 to 2 in 4 rows"),
        (
            "1F0,1B0\n0F0,0B0\n",
            r"schedule mine, line 1, cell 1: 1F0 is in the row of worker 0, .* belongs in line 2",
        ),
        (
            "0F0,3F0,3B0\n1F0,,2F0,0B0\n",
            r"line 2, cell 4: 0B0 is in the row of worker 1, .* belongs in line 1",
        ),
    ],
)
def test_what_does_not_parse_is_refused_with_line_and_cell(text: str, message: str) -> None:
    """One message each."""
    with pytest.raises(UserError, match=message):
        parse_csv(text, "mine")


def test_a_schedule_for_other_numbers_is_refused(tmp_path: Path) -> None:
    """Both numbers, and the field to set; a missing file and bytes that are no text are files' errors."""
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(make_schedule("zbv", 2, 4)))
    with pytest.raises(
        UserError, match=r"is for 2 stages, one per row, but stages=4. Set stages to 2 \(mesh.stage"
    ):
        read_csv(path, stages=4)
    with pytest.raises(
        UserError, match=r"has 4 microbatches, but microbatches=8. Set microbatches to 4 \(layout.micr"
    ):
        read_csv(path, microbatches=8)
    with pytest.raises(FileError, match=r"schedule .*none\.csv cannot be read: No such file"):
        read_csv(tmp_path / "none.csv")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileError, match="cannot be read: it is not text"):
        read_csv(path)
