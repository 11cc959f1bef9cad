"""State from which steps go on: that of a checkpoint, or that before the first step."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.checkpoint import Checkpoints
from jtrain.checkpoint.local_memory import LocalMemory
from jtrain.checkpoint.restoring import Restored
from jtrain.config.trained_params import check_base, read_base
from jtrain.hf.peft_folders import read_adapter
from jtrain.model.adapters.base_hash import hash_base
from jtrain.model.param import Params, map_params, merge_trees
from jtrain.runtime.multihost import from_process_zero
from jtrain.step.guard import LEFT_OUT, GuardState
from jtrain.step.state import TrainState, abstract_state, init_state, place_params, with_base, without_base
from jtrain.train.setup import Setup


@dataclasses.dataclass(frozen=True)
class RestartPoint:
    """Makes the state of a step, at the start of an attempt and when a run goes back.

    data_may_change: `--allow-change data`: where the data state of a checkpoint no longer fits, the data
      begins anew.
    """

    setup: Setup
    checkpoints: Checkpoints
    data_may_change: bool

    def newest(self, local: LocalMemory | None, *, workdir: Path, from_scratch: bool) -> Restored:
        """Reads the newest whole checkpoint, or a state in local memory that is as new; without any, makes
        the first.

        Its step is 0 and its data state None at the start of a run.

        Args:
          workdir: folder of the run's history, which is moved aside if `from_scratch` gives up all
            checkpoints.
        """
        if local is not None:
            # A copy older than the newest checkpoint is not used.
            saved_step = self.checkpoints.latest_step() or 0
            if (copy := local.start(checkpoint=saved_step, is_wanted=not from_scratch)) is not None:
                step, state, data_state = copy
                state = self._complete(state)
                line = f"the state of step {step} was in local memory"
                return Restored(step, state, self._fit_data_state(data_state), (line,))
        restored = self.checkpoints.start(self.saved_shapes(), workdir=workdir, from_scratch=from_scratch)
        if restored.state is None:
            state, data_state = self.state_at(0)
        else:
            # A checkpoint always has a data state; only `--allow-change data` drops it.
            assert restored.data_state is not None
            state, data_state = self._complete(restored.state), self._fit_data_state(restored.data_state)
        return dataclasses.replace(restored, state=state, data_state=data_state)

    def state_at(self, step: int) -> tuple[TrainState, dict[str, Any] | None]:
        """Returns the state and the data state of the checkpoint of `step`.

        Step 0 is the start, drawn from the seed and without a data state, unless it has a checkpoint, as an
        imported model has.
        """
        # Process 0 decides: a process that does not see the checkpoint would draw its weights from the seed.
        if step == 0 and not from_process_zero(np.asarray(0 in self.checkpoints.steps())):
            return self._first_state(), None
        state, data_state = self.checkpoints.restore(step, self.saved_shapes())
        return self._complete(state), self._fit_data_state(data_state)

    def saved_shapes(self) -> TrainState:
        """Shapes, dtypes and shardings of what a checkpoint holds of a state."""
        return self.saved_part(self._abstract_state())

    def saved_part(self, state: TrainState) -> TrainState:
        """Part of a state that a checkpoint holds: all of it, but for the frozen base of an adapter."""
        return without_base(self.setup.job.layout, state)

    def _first_state(self) -> TrainState:
        setup = self.setup
        parts = setup.job.layout, setup.optimizer, setup.mesh
        if setup.run.adapter is None:
            return init_state(*parts, seed=setup.run.seed)
        base = self._read_base() or {}
        if setup.run.adapter.start is not None:
            base = merge_trees(base, self._read_start(Path(setup.run.adapter.start)))
        state = init_state(*parts, seed=setup.run.seed, base=base)
        return dataclasses.replace(state, base_hash=replicate(setup.mesh, self._hash(state.params)))

    def _complete(self, state: TrainState) -> TrainState:
        """A state that was read, with the base of its adapter.

        Raises:
          UserError: it is not the base with which the adapter was trained.
        """
        setup = self.setup
        if setup.run.adapter is None:
            return state
        base = self._read_base()
        if base is None:
            base = self._first_state().params
        state = with_base(setup.job.layout, state, base)
        check_base(setup.run, state.base_hash, self._hash(state.params))
        return state

    def _read_base(self) -> Params | None:
        layout = self.setup.job.layout
        likes = self._abstract_state().params
        infos = tuple(p.info for p in layout.params if not p.info.is_adapter)
        return read_base(self.setup.run, map_params(lambda _, like: like, infos, likes), layout.layer_order)

    def _read_start(self, folder: Path) -> Params:
        """A and B of a folder of peft, as the state has them."""
        run, likes = self.setup.run, self._abstract_state().params
        assert run.adapter is not None
        arrays = read_adapter(folder, run.model, run.adapter)
        infos = tuple(p.info for p in self.setup.job.layout.params if p.info.is_adapter)
        return place_params(infos, likes, arrays)

    def _hash(self, params: Params) -> np.ndarray:
        return hash_base(tuple(p.info for p in self.setup.job.layout.params), params)

    def _abstract_state(self) -> TrainState:
        return abstract_state(self.setup.job.layout, self.setup.optimizer, self.setup.mesh)

    def _fit_data_state(self, data_state: dict[str, Any]) -> dict[str, Any] | None:
        if self.data_may_change and self.setup.dataset.resume_refusal(data_state) is not None:
            return None  # where it fits, the run goes on: the same command may be started again and again
        return data_state

    def with_decisions(self, state: TrainState, left_out: Sequence[int], since: int) -> TrainState:
        """Returns the state with the steps to leave out, and the step after which bounds begin anew."""
        assert isinstance(state.guard, GuardState)
        steps = np.zeros(LEFT_OUT, np.int32)
        steps[: len(left_out)] = left_out
        guard = dataclasses.replace(
            state.guard,
            left_out=replicate(self.setup.mesh, steps),
            since=replicate(self.setup.mesh, np.asarray(since, np.int32)),
        )
        return dataclasses.replace(state, guard=guard)


def replicate(mesh: jax.sharding.Mesh, value: np.ndarray) -> jax.Array:
    """Returns an array that every device of the mesh holds whole."""
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    # Each process makes the pieces of its own devices.
    return jax.make_array_from_callback(jnp.shape(value), sharding, lambda index: value[index])
