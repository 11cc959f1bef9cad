"""State from which steps go on: that of a checkpoint, or that before the first step."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jtrain.checkpoint import Checkpoints
from jtrain.data import TextDataset
from jtrain.layout import Layout
from jtrain.optim import Optimizer
from jtrain.runtime.multihost import from_process_zero
from jtrain.step.guard import LEFT_OUT, GuardState, first_guard
from jtrain.step.state import TrainState, abstract_state, init_state


@dataclasses.dataclass(frozen=True)
class RestartPoint:
    """Makes the state of a step, at the start of an attempt and when a run goes back.

    data_may_change: `--allow-change data`: where the data state of a checkpoint no longer fits, the data begins anew.
    """

    layout: Layout
    optimizer: Optimizer
    mesh: Mesh
    seed: int
    checkpoints: Checkpoints
    dataset: TextDataset
    data_may_change: bool

    def state_at(self, step: int) -> tuple[TrainState, dict[str, Any] | None]:
        """Returns the state and the data state of the checkpoint of `step`.

        Step 0 is the start, drawn from the seed and without a data state, unless it has a checkpoint, as an imported
        model has.
        """
        if step == 0 and not from_process_zero(np.asarray(0 in self.checkpoints.steps())):
            return init_state(self.layout, self.optimizer, self.mesh, seed=self.seed), None
        like = abstract_state(self.layout, self.optimizer, self.mesh)
        has_guard = self.checkpoints.has_branch(step, "guard")
        # A checkpoint of a version without the guard: its history begins empty.
        state, data_state = self.checkpoints.restore(step, like if has_guard else dataclasses.replace(like, guard={}))
        if not has_guard:
            first = jax.tree.map(np.asarray, first_guard())
            state = dataclasses.replace(state, guard=jax.tree.map(self._replicated, first))
        if self.data_may_change and self.dataset.misfit(data_state) is not None:
            data_state = None  # where it fits, the run goes on: the same command may be started again and again
        return state, data_state

    def with_decisions(self, state: TrainState, left_out: Sequence[int], since: int) -> TrainState:
        """Returns the state with the steps to leave out, and the step after which bounds begin anew."""
        assert isinstance(state.guard, GuardState)
        steps = np.zeros(LEFT_OUT, np.int32)
        steps[: len(left_out)] = left_out
        guard = dataclasses.replace(
            state.guard, left_out=self._replicated(steps), since=self._replicated(np.asarray(since, np.int32))
        )
        return dataclasses.replace(state, guard=guard)

    def _replicated(self, value: np.ndarray) -> jax.Array:
        sharding = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())
        return jax.make_array_from_callback(jnp.shape(value), sharding, lambda index: value[index])
