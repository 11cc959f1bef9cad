"""Callback for runs in tests: flips one bit of the state in a device's memory before a step."""

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

from jtrain.step.checksums import summed_arrays
from jtrain.train.callbacks import Callback, LoopPhase
from tests.step.bit_flips import flip


class Flipper(Callback):
    """Flips as the environment variable JTRAIN_TEST_FLIP says: JSON of phase, step, array, device, byte and
    bit.
    """

    @contextlib.contextmanager
    def during(self, phase: LoopPhase, step: int, arguments: tuple[Any, ...]) -> Iterator[None]:
        planted = json.loads(os.environ["JTRAIN_TEST_FLIP"])
        if phase == "dispatch" and step == planted["step"]:
            array = dict(summed_arrays(arguments[0]))[planted["array"]]
            device = sorted(array.sharding.device_set, key=lambda device: device.id)[planted["device"]]
            flip(array, device, planted["byte"], planted["bit"])
        yield
