"""Check of a step's metrics for NaN and infinity before its state is saved."""

import math
from collections.abc import Mapping

from jtrain.errors import UserError


class NotFinite(UserError):
    """A metric of a step is NaN or infinite.

    step: completed updates, this one included.
    names: the metrics that are not finite.
    """

    def __init__(self, message: str, *, step: int, names: tuple[str, ...]) -> None:
        super().__init__(message)
        self.step = step
        self.names = names


def check_finite(step: int, metrics: Mapping[str, float], *, batch_hash: str, last_checkpoint_step: int | None) -> None:
    """Ends the run at a step with NaN or infinite metrics; call it before the step's state is saved.

    Args:
      step: completed updates, this one included.
      metrics: name -> value, such as loss_nats, grad_norm and learning_rate.
      batch_hash: hex hash of the batch that fed this step.
      last_checkpoint_step: step of the newest checkpoint, whose metrics were finite; None without a checkpoint.

    Raises:
      NotFinite: a metric is not finite; gives the step, all metrics, the batch and settings to try.
    """
    names = tuple(name for name, value in metrics.items() if not math.isfinite(value))
    if not names:
        return
    values = ", ".join(f"{name}={float(value):.6g}" for name, value in metrics.items())
    good = (
        "No checkpoint was written before it."
        if last_checkpoint_step is None
        else f"The checkpoint of step {last_checkpoint_step} is from before it; the same command resumes from there, "
        "but reaches the same numbers again: data and arithmetic repeat bit for bit."
    )
    raise NotFinite(
        f"{' and '.join(names)} not finite at step {step}: {values}; batch_hash={batch_hash}. "
        f"The state after it was not saved. {good} Try, with another --workdir: a lower optimizer.peak_lr (half), more "
        "optimizer.warmup_steps, a smaller optimizer.clip_norm, precision.compute_dtype=float32 to see whether "
        "precision is the cause.",
        step=step,
        names=names,
    )
