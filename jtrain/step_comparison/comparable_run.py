"""Real steps of a run on its layout, and all of their results that can be compared, layers in model order."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jtrain.config.run import Run, build_run_optimizer, run_layout
from jtrain.data.constructor.context_order import context_order
from jtrain.layout.dims import Batch
from jtrain.layout.mesh import make_mesh
from jtrain.model.adapters.block_quantization import without_blocks
from jtrain.model.param import Params
from jtrain.optim.state import flatten_by_path
from jtrain.step.guard import GuardState
from jtrain.step.state import TrainState, abstract_state, init_state, shardings_of
from jtrain.step.train_step import BATCH_SPEC, make_eval_step, make_train_step
from jtrain.step.zero import param_tree
from jtrain.telemetry.recompiles import count_programs

GRADIENT_TOLERANCE = 1e-5
"""Largest difference that a layout may make to a gradient in float32, of the largest element of its array."""
LOSS_TOLERANCE = 2e-6
"""Largest relative difference that a layout may make to a loss and to a gradient's norm in float32."""

type BatchArrays = Mapping[str, Any]
"""token_BL, target_BL, position_BL and segment_BL, int32, whole."""
type ArraysByPath = dict[str, np.ndarray]
"""Arrays by path; the optimizer's have the name of the array in front."""


@dataclasses.dataclass
class RunResults:
    """Results of some steps: all that two layouts of one run must have in common.

    first, last: parameters; of a matrix in blocks its numbers.
    moments: state of the optimizer after the first step.
    scaling: histories of 8-bit matmuls at the end.
    exact: metrics that are the same bits in every layout, of each step.
    nats_BL: of an evaluation with the first parameters, in the columns of the batch; None without.
    num_traces: times that the step was traced.
    unchanged: False if a rejected step changed parameters, moments or histories.
    first_state: the whole state before the first step, on the host, as the layout places it.
    last_params: parameters at the end, likewise.
    """

    first: ArraysByPath
    last: ArraysByPath
    moments: ArraysByPath
    scaling: ArraysByPath
    losses: list[float]
    norms: list[float]
    exact: list[tuple[Any, ...]]
    nats_BL: np.ndarray | None
    num_traces: int
    first_state: Any
    last_params: Any = None
    unchanged: bool = True


class ComparableRun:
    """The compiled step of a run, on the first of this process's devices; `train` runs it on any batches."""

    def __init__(self, run: Run, *, checksums: bool = False) -> None:
        self.layout = run_layout(run)
        # A smaller mesh takes the first of the emulated devices.
        self.mesh = make_mesh(run.mesh, jax.devices()[: run.mesh.size])
        self.infos = run.param_infos()
        self.optimizer = build_run_optimizer(run)
        self.model = run.model
        parts = self.model, self.optimizer, self.layout, self.mesh
        self.step = make_train_step(*parts, checksums=checksums, objective=run.objective)
        # Columns in the order in which the context axis has them.
        self.columns = context_order(run.data.seq_len, run.mesh.context, self.layout.context_order)

    @functools.cached_property
    def eval_step(self) -> Any:
        """The compiled evaluation, for all calls of `train`."""
        return make_eval_step(self.model, self.layout, self.mesh)

    def first_state(self, params: Params | None = None) -> TrainState:
        """The whole state before the first step, on the host; drawn, but for `params`."""
        state = jax.device_get(init_state(self.layout, self.optimizer, self.mesh, seed=0))
        return state if params is None else dataclasses.replace(state, params=params)

    def evaluate(self, batch: BatchArrays) -> np.ndarray:
        """Nats of each token by the first weights, in the columns of the batch."""
        nats_BL = np.asarray(self.eval_step(self._draw().params, self._place(batch)))
        # argsort inverts the permutation of the columns.
        return nats_BL[:, np.argsort(self.columns)]

    def _draw(self) -> TrainState:
        return init_state(self.layout, self.optimizer, self.mesh, seed=0)

    def train(
        self,
        batches: Sequence[BatchArrays],
        first_state: Any = None,
        *,
        evaluates: bool = False,
        rejected: int | None = None,
    ) -> RunResults:
        """One step on each batch.

        Args:
          first_state: of the same run on one device; None draws the layout's own.
          evaluates: also evaluates the first parameters on the first batch.
          rejected: number of the step, from 1, whose update is left out.
        """
        if first_state is None:
            # Weights drawn by the layout itself: they must be those of one device.
            state = init_state(self.layout, self.optimizer, self.mesh, seed=0)
        else:
            # Given weights: one device's state, moved to where this layout has it.
            like = abstract_state(self.layout, self.optimizer, self.mesh)
            placed_state = jax.tree_util.tree_map_with_path(self._placed, like, first_state)
            state = jax.device_put(placed_state, shardings_of(like))
        # Kept on the host before the first step donates it.
        drawn_state = jax.device_get(state)
        placed = [self._place(batch) for batch in batches]
        nats_BL = None
        if evaluates:
            nats_BL = np.asarray(self.eval_step(state.params, placed[0]))
            # argsort inverts the permutation of the columns.
            nats_BL = nats_BL[:, np.argsort(self.columns)]
        if rejected is not None:
            assert isinstance(state.guard, GuardState)
            left_out = jax.device_put(
                # The guard's list of steps to leave out has a fixed length; 0 is no step.
                np.array([rejected] + [0] * (len(state.guard.left_out) - 1), np.int32),
                state.guard.left_out.sharding,
            )
            state = dataclasses.replace(state, guard=dataclasses.replace(state.guard, left_out=left_out))
        every_info = param_tree(self.layout, lambda p: p.info)
        first = self._in_order(flatten_by_path(every_info, without_blocks(drawn_state.params)))
        results = RunResults(first, {}, {}, {}, [], [], [], nats_BL, 0, drawn_state)
        for number, batch in enumerate(placed):
            state_before = None
            if number + 1 == rejected:
                # Fetched before the step, which donates the state.
                state_before = jax.device_get((state.params, state.opt_state, state.scaling))
            state, metrics = self.step(state, batch)
            if state_before is not None:
                state_after = jax.device_get((state.params, state.opt_state, state.scaling))
                results.unchanged = all(
                    map(np.array_equal, jax.tree.leaves(state_before), jax.tree.leaves(state_after))
                )
            results.losses.append(float(metrics["loss_nats"]))
            results.norms.append(float(metrics["grad_norm"]))
            results.exact.append(self._exact(metrics))
            # Moments after one step show the gradient itself, before updates mix.
            if number == 0:
                leaves = self.optimizer.leaves(jax.device_get(state.opt_state))
                results.moments = self._in_order(
                    {f"{name} {path}": leaf[name] for path, leaf in leaves.items() for name in leaf}
                )
        results.last_params = jax.device_get(state.params)
        results.last = self._in_order(flatten_by_path(every_info, without_blocks(results.last_params)))
        scaling = jax.tree_util.tree_flatten_with_path(jax.device_get(state.scaling))[0]
        # Histories have no identity layers that must be zero.
        results.scaling = self._in_order(
            {".".join(str(key.key) for key in keys): np.asarray(value) for keys, value in scaling},
            check=False,
        )
        results.num_traces = count_programs(self.step)
        return results

    def _exact(self, metrics: dict[str, Any]) -> tuple[Any, ...]:
        """Batch hash, number of targets, if the update was applied, learning rate, not finite."""
        by_device = np.asarray(metrics["by_device"])
        # A count that is not finite cannot be an int.
        not_finite = int(by_device[:, 1].sum()) if np.isfinite(by_device[:, 1]).all() else -1
        hash_2 = str(np.asarray(metrics["batch_hash"]).tolist())
        rate = float(metrics["learning_rate"])
        return hash_2, int(metrics["tokens"]), bool(metrics["applied"]), rate, not_finite

    def _place(self, batch: BatchArrays) -> Batch:
        sharding = NamedSharding(self.mesh, BATCH_SPEC)
        return Batch(
            # The batch is permuted on the host, then split over the mesh.
            **{
                name: jax.tree.map(lambda x: jax.device_put(x[:, self.columns], sharding), value)
                for name, value in batch.items()
            }
        )

    def _placed(self, keys: Any, like: Any, value: Any) -> np.ndarray:
        """An array of a state on one device, its layers where the layout has them, zeros for identity."""
        order, array = self.layout.pipeline and self.layout.pipeline.order, np.asarray(value)
        if order is None or not any(getattr(key, "key", None) == "layers" for key in keys):
            return array
        # Index -1 of the order is an identity layer: the row of zeros behind the last.
        padded = np.concatenate([array, np.zeros_like(array[:1])])
        assert padded[list(order)].shape == like.shape
        return padded[list(order)]

    def _in_order(self, arrays: dict[str, Any], *, check: bool = True) -> ArraysByPath:
        """Arrays by path with the layers in the model's order.

        Raises:
          AssertionError: an identity layer is not zero any more.
        """
        order = self.layout.pipeline and self.layout.pipeline.order
        flat: ArraysByPath = {}
        for path, value in arrays.items():
            array = np.asarray(value)
            if order is None or not path.rpartition(" ")[2].startswith("layers."):
                flat[path] = array
                continue
            identity = array[[row for row, layer in enumerate(order) if layer < 0]]
            assert not check or not np.any(identity.astype(np.float32)), (
                f"{path}: an identity layer is not zero"
            )
            # Rows of the layout, picked by the model's layer numbers.
            flat[path] = array[[order.index(layer) for layer in range(self.model.num_periods)]]
        return flat
