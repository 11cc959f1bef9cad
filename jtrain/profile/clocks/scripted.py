"""Scripted clock source for tests: replays clocks from a file, so that the clock loss is known exactly.

    {"ref_mhz": 1000, "max_mhz": 1000, "period_s": 0.01,
     "points": [{"time_s": 0, "sm_mhz": 1000, "power_w": 300}, {"time_s": 2, "sm_mhz": 500, "reasons": 4}]}

A point holds from `time_s` after the start to the next point, for all devices or for its `device`; its other
fields are those of `clocks.Reading`.
"""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from jtrain.errors import UserError
from jtrain.profile.clocks.reading import ClockSource, Reading

FIELDS = {field.name: int if field.type is int else float for field in dataclasses.fields(Reading)}


class Scripted(ClockSource):
    """Clock source that replays a script, starting when it is opened."""

    name = "scripted"

    def __init__(self, path: Path) -> None:
        super().__init__()
        try:
            script = json.loads(path.read_text())
            self.ref_mhz, self.max_mhz = script.get("ref_mhz"), script.get("max_mhz")
            self.period_s = self.fast_period_s = self.slow_period_s = float(script.get("period_s", 0.02))
            points = [
                (float(point.pop("time_s")), int(point.pop("device", -1)), _reading(point))
                for point in script["points"]
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path} is not a script of clocks: {error!r}. Write {{points: [{{time_s, ...}}]}}; a point "
                f"may have {', '.join(FIELDS)}."
            ) from error
        # A stable sort: of two points at one time the later in the file wins.
        self._points = sorted(points, key=lambda point: point[0])
        # Points without a device are those of device -1, which stands for all.
        self.devices = tuple(sorted({device for _, device, _ in points}))
        self._start = time.monotonic()

    def read(self, device: int, slow: bool) -> Reading:
        """The device's latest point up to now; unknown before its first point."""
        return self.reading_at(device, time.monotonic() - self._start)

    def reading_at(self, device: int, time_s: float) -> Reading:
        """The device's reading at `time_s` after the start."""
        readings = [
            reading
            for point_s, point_device, reading in self._points
            if point_device == device and point_s <= time_s
        ]
        return readings[-1] if readings else Reading()


def _reading(point: dict[str, Any]) -> Reading:
    fields: dict[str, Any] = {name: FIELDS[name](value) for name, value in point.items()}
    return Reading(**fields)
