"""Numbers of one step that say if its update is good: loss, gradient norm, each device's share in them."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

NAMES = ("loss_nats", "grad_norm")
"""Metrics that are compared with a bound."""


@dataclasses.dataclass(frozen=True)
class StepNumbers:
    """Numbers of one step, as the devices computed them.

    values: loss and gradient norm.
    bounds: the largest good values of both; infinite where there is no bound.
    applied: True if the update was applied.
    by_device: [devices, 2], as in `make_train_step`.
    """

    step: int
    values: np.ndarray
    bounds: np.ndarray
    applied: bool
    by_device: np.ndarray
    batch_hash: str

    @classmethod
    def of(cls, step: int, metrics: Mapping[str, Any], batch_hash: str) -> "StepNumbers":
        values = np.asarray([metrics[name] for name in NAMES], np.float32)
        bounds, by_device = (np.asarray(metrics[name]) for name in ("bounds", "by_device"))
        return cls(step, values, bounds, bool(metrics["applied"]), by_device, batch_hash)

    @property
    def bad(self) -> tuple[str, ...]:
        """Names of the bad numbers; `state` if the new state is not finite."""
        names = [
            name
            for name, value, bound in zip(NAMES, self.values, self.bounds, strict=True)
            # Not `value > bound`: NaN compares as false with everything, and counts as bad this way.
            if not value <= bound
        ]
        names += [name for name, value in zip(NAMES, self.values, strict=True) if math.isinf(value)]
        # Names once each, in a fixed order, so that all processes write the same line.
        return tuple(dict.fromkeys(names + ["state"] * bool(self.by_device[:, 1].any())))

    @property
    def strange_devices(self) -> list[int]:
        """Devices, in the order of the mesh, whose share of the loss or new state is not finite."""
        # Either is enough: a device may hold a bad weight while its share of the loss is still finite.
        return np.flatnonzero(~np.isfinite(self.by_device[:, 0]) | (self.by_device[:, 1] > 0)).tolist()

    @property
    def shown(self) -> str:
        parts = [
            f"{name}={value:.6g}" + (f" (bound {bound:.6g})" if math.isfinite(bound) else "")
            for name, value, bound in zip(NAMES, self.values.tolist(), self.bounds.tolist(), strict=True)
        ]
        if "state" in self.bad:
            parts.append(f"{int(self.by_device[:, 1].sum())} elements of the new state not finite")
        return ", ".join(parts)

    def same_bits(self, other: "StepNumbers") -> bool:
        """True if two passes over a step computed the same."""
        pairs = ((self.values, other.values), (self.by_device, other.by_device))
        # As bytes: NaN is not equal to itself, and 0.0 equals -0.0.
        return all(a.tobytes() == b.tobytes() for a, b in pairs) and self.applied == other.applied
