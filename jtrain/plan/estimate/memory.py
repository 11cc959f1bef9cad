"""Bytes per device of a train step, by class.

The step's arguments (parameters, optimizer state, batch) are exact, on the device and in host memory: they
equal the compiler's argument bytes, except for its padding of scalars. The temporaries are those of the peak
moment in `peak_memory.py`; `python -m jtrain.bench plan_compiled` measures how far they are from compilers'
figures.
"""

import collections
import dataclasses
import math

import jax
import jax.numpy as jnp

from jtrain.layout.layout import Layout
from jtrain.layout.mesh import BATCH_AXES
from jtrain.layout.precision import itemsize
from jtrain.model.adapters.block_quantization import stored_arrays
from jtrain.model.fp8_scaling import fp8_weights, history_shape
from jtrain.optim import AdamW, Muon
from jtrain.optim.state import arrays
from jtrain.plan.estimate.peak_memory import worst_moment
from jtrain.plan.estimate.pipeline import kept_layers
from jtrain.plan.estimate.tpu_padding import local_elements
from jtrain.plan.job import Job
from jtrain.step.guard import LEFT_OUT, WINDOW
from jtrain.step.objective import abstract_batch
from jtrain_kernels.device import Platform


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one device at the peak of a step.

    parameters, optimizer, batch: arguments of the step; exact. The batch includes counters, and the amax
      histories of 8-bit matmuls.
    gradients: gradients of all parameters, as they accumulate.
    weights: copies of weights for matmuls, gathered or in the compute dtype, and layer gradients not yet
      reduced.
    activations: arrays that the forward pass keeps for the backward pass.
    loss: logits of a chunk with their gradients; after the loss, the unembedding's gradient.
    workspace: other temporaries of one layer's backward pass, the embedding's gradient, or slices of an
      update.
    moment: the part of the step with the peak: `loss`, `layer`, `embedding` or `update`.
    host_parameters, host_optimizer, host_activations, host_gradients: bytes in host memory per device, not
      counted in the others.
    host_copies: more host memory under layout.offload.update=host: XLA's host programs write results beside
      their arguments.
    """

    parameters: int
    optimizer: int
    batch: int
    gradients: int
    weights: int
    activations: int
    loss: int
    workspace: int
    moment: str
    host_parameters: int = 0
    host_optimizer: int = 0
    host_activations: int = 0
    host_gradients: int = 0
    host_copies: int = 0

    @property
    def host_argument_bytes(self) -> int:
        """Bytes of arguments in host memory."""
        return self.host_parameters + self.host_optimizer

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory, per device."""
        return self.host_argument_bytes + self.host_activations + self.host_gradients + self.host_copies

    @property
    def argument_bytes(self) -> int:
        """Bytes of arguments in device memory."""
        return self.parameters + self.optimizer + self.batch

    @property
    def temp_bytes(self) -> int:
        """Bytes of temporaries in device memory."""
        return self.gradients + self.weights + self.activations + self.loss + self.workspace

    @property
    def total_bytes(self) -> int:
        """Peak bytes in device memory."""
        return self.argument_bytes + self.temp_bytes

    def temporaries(self) -> dict[str, int]:
        """Class -> bytes of the step's temporaries."""
        return {
            name: getattr(self, name) for name in ("gradients", "weights", "activations", "loss", "workspace")
        }

    def classes(self) -> dict[str, int]:
        """Class -> bytes of the step's arguments and temporaries."""
        return {
            name: getattr(self, name) for name in ("parameters", "optimizer", "batch")
        } | self.temporaries()


# The step, then the guard's state: histories, steps left out, `skipped` and `since`, 4 bytes each. On a TPU
# the histories fill 1,024 bytes, and each of the other four arrays takes 128 lanes.
_COUNTERS_BYTES = {"gpu": 4 + 4 * (2 * WINDOW + LEFT_OUT + 2), "tpu": 512 + 1024 + 3 * 512}
"""Bytes of the step counter and of the guard's state; TPUs lay out each array in whole tiles."""


def memory(job: Job) -> MemoryPlan:
    """Memory plan of a job; takes a millisecond for any model whose class of layouts has been traced.

    Raises:
      UserError: the batch does not split evenly over the mesh and the microbatches.
    """
    layout, mesh, platform = job.layout, job.layout.mesh, job.platform
    parameters, host_parameters = _parameters(layout, platform)
    state, host_state, host_copies = _state(layout, job.optimizer, platform)
    # Rows split over the batch axes, positions over `context`.
    shards = math.prod(mesh.shape[axis] for axis in (*BATCH_AXES, "context"))
    token = abstract_batch(jax.ShapeDtypeStruct((1, 1), jnp.int32), job.objective)
    token_bytes = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(token))
    # Counters of a CPU take what those of a GPU do.
    batch = token_bytes * job.tokens // shards + _COUNTERS_BYTES.get(platform, _COUNTERS_BYTES["gpu"])
    batch += _scaling(layout, platform)

    # Arguments live for the whole step, so the peak is theirs and that of the worst moment together.
    peak = worst_moment(job)
    return MemoryPlan(
        parameters,
        state,
        batch,
        gradients=peak.gradients,
        weights=peak.weights,
        activations=peak.activations,
        loss=peak.loss,
        workspace=peak.workspace,
        moment=peak.name,
        host_parameters=host_parameters,
        host_optimizer=host_state,
        host_copies=host_copies,
        host_activations=kept_layers(layout, job.model.num_periods)
        * sum(array.bytes for array in job.step.saved if array.memory == "pinned_host"),
        host_gradients=_gradients_on_host(layout, platform),
    )


def _scaling(layout: Layout, platform: Platform) -> int:
    """Bytes of one device's amax histories, [Y, 3, S] in float32 for each 8-bit weight; 0 without delayed
    scaling.
    """
    if layout.precision.matmul_dtype != "fp8_delayed":
        return 0
    infos = fp8_weights([p.info for p in layout.params])
    return 4 * sum(
        local_elements(layout, layout.per_layer, history_shape(info.shape[0]), platform) for info in infos
    )


def _parameters(layout: Layout, platform: Platform) -> tuple[int, int]:
    """Bytes of one device's parameters: in its memory, and in host memory."""
    memory_bytes = collections.Counter[str]()
    for p in layout.params:
        for array in jax.tree.leaves(stored_arrays(p.info, p.dtype(layout.precision))):
            elements = local_elements(layout, p.param_partition, array.shape, platform)
            memory_bytes[p.param_memory] += elements * array.dtype.itemsize
    # A Counter: 0 for a memory without parameters.
    return memory_bytes["device"], memory_bytes["pinned_host"]


def _state(layout: Layout, optimizer: AdamW | Muon, platform: Platform) -> tuple[int, int, int]:
    """Bytes of one device's optimizer state: in its memory, in host memory, and of copies in host memory."""
    param_arrays = [(p, arrays(optimizer, p.info)) for p in layout.trained]
    # The layout chooses whole arrays by their global sizes until the share of the state is reached.
    host_arrays = layout.host_state(
        {
            (p.info.path, name): math.prod(x.shape) * x.dtype.itemsize
            for p, state_arrays in param_arrays
            for name, x in state_arrays.items()
        }
    )
    # Index 0 is device memory, 1 is host memory: a test of membership picks the one.
    state_bytes = [0, 0]
    for p, state_arrays in param_arrays:
        for name, x in state_arrays.items():
            elements = local_elements(layout, p.optimizer_partition, x.shape, platform)
            state_bytes[(p.info.path, name) in host_arrays] += elements * x.dtype.itemsize
    if not layout.updates_on_host:
        return state_bytes[0], state_bytes[1], 0
    # Copies: the state once more, float32 gradients, and the parameters before and after the update.
    host_paths = {path for path, _ in host_arrays}
    elements = sum(
        layout.local_size(p.optimizer_partition, p.info.shape)
        for p, _ in param_arrays
        if p.info.path in host_paths
    )
    copies = state_bytes[1] + elements * (4 + 2 * itemsize(layout.precision.param_dtype))
    return state_bytes[0], state_bytes[1], copies


def _gradients_on_host(layout: Layout, platform: Platform) -> int:
    """Bytes of one device's sums of gradients in host memory."""
    host_params = [p for p in layout.params if p.gradient_memory == "pinned_host"]
    elements = sum(
        local_elements(layout, p.accumulator_partition, p.info.shape, platform) for p in host_params
    )
    return itemsize(layout.precision.grad_accum_dtype) * elements
