"""Decisions about bad steps that earlier attempts of a run have written to `bad_steps.jsonl` in its workdir.

    {"step": 7, "action": "went back", "to": 4}
    {"step": 7, "action": "repeats", "since": 8, "left_out": [7]}

say that the batch of step 7 is left out from now on, that bounds begin anew after step 8, and that the run
has gone back once. The file may end in the middle of a line, or hold damaged ones, after a kill or on a full
disk.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jtrain.runtime.multihost import from_process_zero
from jtrain.step.guard import LEFT_OUT
from jtrain.telemetry.append_file import WriteTrouble, check_is_file, damaged_text, keep_lines, parse_line


def read_decisions(file: Path, say: Callable[[str], None]) -> tuple[tuple[int, ...], int, list[int]]:
    """Reads the decisions of earlier attempts: batches to leave out, `since`, and the steps of recent
    returns.
    """
    # One array for all decisions, so that one exchange carries them: since, LEFT_OUT steps, LEFT_OUT returns.
    encoded = np.zeros(2 * LEFT_OUT + 1, np.int32)
    if jax.process_index() == 0 and file.exists():
        check_is_file(file)  # an OSError too, so before the `try`
        try:
            if damaged := keep_lines(file, lambda entry: True if _is_entry(entry) else None):
                say(damaged_text(file, damaged))
        except OSError as error:  # a full disk: bad lines stay in the file for now
            WriteTrouble(file, say).report_failure(error, "its damaged lines are left out")
        parsed_lines = (parse_line(line) for line in file.read_bytes().splitlines())
        entries = [entry for entry in parsed_lines if entry is not None and _is_entry(entry)]
        repeats = [entry for entry in entries if entry["action"] == "repeats"]
        if repeats:
            # The last line holds all decisions so far; earlier ones need not be added up.
            newest = repeats[-1]["left_out"][-LEFT_OUT:]
            encoded[0], encoded[1 : 1 + len(newest)] = repeats[-1]["since"], newest
        returned_steps: list[int] = []
        for entry in entries:
            if entry["action"] == "went back":
                returned_steps = [*returned_steps, entry["step"]][-LEFT_OUT:]
            elif entry["action"] == "differs":  # the fault was the host's, which has been replaced since
                returned_steps = []
        encoded[1 + LEFT_OUT : 1 + LEFT_OUT + len(returned_steps)] = returned_steps
    # In every process, though only process 0 has read the file.
    encoded = from_process_zero(encoded)
    # 0 fills the places that are free: step 0 has no update.
    left_out, returns = ([int(number) for number in half if number] for half in np.split(encoded[1:], 2))
    return tuple(left_out), int(encoded[0]), returns


def _is_entry(entry: dict[str, Any]) -> bool:
    """True if a line has all that a start reads of it."""

    def are_steps(*values: object) -> bool:
        # Not isinstance: True is an int in Python. The array of decisions has 32 bits.
        return all(type(value) is int and 0 <= value < 2**31 for value in values)

    if not isinstance(entry.get("action"), str) or not are_steps(entry.get("step")):
        return False
    left_out = entry.get("left_out")
    return entry["action"] != "repeats" or (
        are_steps(entry.get("since")) and isinstance(left_out, list) and are_steps(*left_out)
    )
