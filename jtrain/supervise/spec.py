"""Settings of the supervisor: time limits by phase, and how often it restarts."""

import dataclasses
import math

from jtrain.errors import UserError


@dataclasses.dataclass(frozen=True)
class SuperviseSpec:
    """How `--supervise` watches a run. A phase that lasts longer than its limit in every process is a hang.

    step_s: shortest limit of a step, from the third on.
    step_factor: a step may also take this many median step times.
    data_s: limit of a wait for a batch; longer than data.read_timeout_s, so that the data plane can name its
      source.
    compile_s: limit of a compilation, and of the first two steps.
    setup_s: limit of everything before the first step: start-up, joining the other processes, restoring; and
      of the time between the last step and the end of the process.
    evaluation_s: limit of an evaluation, and of the profiler's own work.
    checkpoint_s: limit of a save.
    stopped_s: a process stopped by a signal (SIGSTOP) for longer than this is a hang.
    save_s: after a hang, the time in which processes that still answer must begin to save.
    peer_s: jax ends a process if another one sends no sign of life for longer than this; also without a
      supervisor.
    max_restarts: restarts in a row without a new checkpoint, before the supervisor gives up; 0 never
      restarts.
    backoff_s: pause before the second restart in a row; four times as long before each further one, at most a
      minute.
    """

    step_s: float = 20.0
    step_factor: float = 10.0
    data_s: float = 120.0
    compile_s: float = 3600.0
    setup_s: float = 3600.0
    evaluation_s: float = 3600.0
    checkpoint_s: float = 3600.0
    stopped_s: float = 10.0
    save_s: float = 20.0
    peer_s: float = 30.0
    max_restarts: int = 5
    backoff_s: float = 1.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            # isfinite refuses nan and infinity: every hang must be found some time.
            min_value = 0 if field.name in ("max_restarts", "backoff_s", "save_s") else 1
            if not (math.isfinite(value) and value >= min_value):
                raise UserError(f"supervise.{field.name}={value} must be at least {min_value}.")
