"""Bytes per device of a train step, by class, in closed form.

What the step is given (parameters, optimizer state, batch), on the device and in host memory, is exact: the compiler's
argument bytes, but for its padding of scalars. The rest is the worst of the moments in `jtrain.plan.live`; `python -m
jtrain.bench plan_accuracy` says how far it is from what compilers find.
"""

import collections
import dataclasses
import math

from jtrain.layout import Layout, check_batch, itemsize
from jtrain.mesh import BATCH_AXES
from jtrain.model.residuals import named_bytes, offloaded_names
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Muon
from jtrain.optim.state import arrays
from jtrain.plan.live import worst_moment
from jtrain.plan.tiles import local_elements
from jtrain_kernels.device import Platform


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one device at the worst moment of a step.

    parameters, optimizer, batch: what the step is given; exact.
    gradients: of all parameters, as they accumulate.
    weights: copies of weights that compute: gathered, or in the compute dtype; and a layer's gradient not yet reduced.
    activations: what the forward pass keeps for the backward pass.
    loss: the logits of a chunk with their gradients; after the loss, the unembedding's gradient.
    workspace: what one layer's backward pass holds besides, or the embedding's gradient, or slices of an update.
    moment: which of these it is: `loss`, `layer`, `embedding` or `update`.
    host_parameters, host_optimizer, host_activations: in host memory, per device; not in the others.
    host_copies: there too, under layout.offload.update=host: XLA's host programs write results beside their arguments.
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
    host_copies: int = 0

    @property
    def host_argument_bytes(self) -> int:
        return self.host_parameters + self.host_optimizer

    @property
    def host_bytes(self) -> int:
        return self.host_argument_bytes + self.host_activations + self.host_copies

    @property
    def argument_bytes(self) -> int:
        return self.parameters + self.optimizer + self.batch

    @property
    def temp_bytes(self) -> int:
        return self.gradients + self.weights + self.activations + self.loss + self.workspace

    @property
    def total_bytes(self) -> int:
        return self.argument_bytes + self.temp_bytes

    def temporaries(self) -> dict[str, int]:
        """Bytes of each class of what the step takes besides its arguments, by its name."""
        return {name: getattr(self, name) for name in ("gradients", "weights", "activations", "loss", "workspace")}

    def classes(self) -> dict[str, int]:
        """Bytes of each class, by its name."""
        return {name: getattr(self, name) for name in ("parameters", "optimizer", "batch")} | self.temporaries()


def memory(
    model: Transformer,
    layout: Layout,
    optimizer: AdamW | Muon,
    *,
    global_batch: int,
    seq_len: int,
    platform: Platform = "gpu",
) -> MemoryPlan:
    """The closed form; a millisecond for any model.

    Args:
      platform: whose compiler; what they keep differs.

    Raises:
      ValueError: the batch does not split evenly over the mesh and the microbatches.
    """
    spec, mesh = layout.spec, layout.mesh
    rows = check_batch(spec, mesh, global_batch=global_batch, seq_len=seq_len)
    parameters, host_parameters = _parameters(layout, platform)
    state, host_state, host_copies = _state(layout, optimizer, platform)
    shards = math.prod(mesh.shape[axis] for axis in (*BATCH_AXES, "context"))
    step_count = 512 if platform == "tpu" else 4
    batch = 4 * 4 * global_batch * seq_len // shards + step_count  # four int32 arrays, and the step

    worst = worst_moment(model, layout, rows=rows, seq_len=seq_len, platform=platform)
    tokens, per_token = rows * seq_len // mesh.context // mesh.tensor, named_bytes(layout)
    return MemoryPlan(
        parameters,
        state,
        batch,
        gradients=worst.gradients,
        weights=worst.weights,
        activations=worst.activations,
        loss=worst.loss,
        workspace=worst.workspace,
        moment=worst.name,
        host_parameters=host_parameters,
        host_optimizer=host_state,
        host_copies=host_copies,
        host_activations=model.num_layers * tokens * sum(per_token[name] for name in offloaded_names(layout)),
    )


def _parameters(layout: Layout, platform: Platform) -> tuple[int, int]:
    """Bytes of this device's parameters, in its memory and in the host's."""
    size = itemsize(layout.spec.param_dtype)
    held = collections.Counter[str]()
    for p in layout.params:
        held[p.param_memory] += local_elements(layout, p.param, p.info.shape, platform) * size
    return held["device"], held["pinned_host"]


def _state(layout: Layout, optimizer: AdamW | Muon, platform: Platform) -> tuple[int, int, int]:
    """Bytes of this device's share of the optimizer's state, in its memory and in the host's; and of copies there."""
    kept = [(p, arrays(optimizer, p.info)) for p in layout.params]
    on_host = layout.host_state(
        {(p.info.path, name): math.prod(x.shape) * x.dtype.itemsize for p, named in kept for name, x in named.items()}
    )
    held = [0, 0]
    for p, named in kept:
        for name, x in named.items():
            elements = local_elements(layout, p.optimizer, x.shape, platform)
            held[(p.info.path, name) in on_host] += elements * x.dtype.itemsize
    if layout.spec.offload.update == "device":
        return held[0], held[1], 0
    # The state once more; gradients, float32, and parameters before and after.
    paths = {path for path, _ in on_host}
    elements = sum(layout.local_size(p.optimizer, p.info.shape) for p, _ in kept if p.info.path in paths)
    return held[0], held[1], held[1] + elements * (4 + 2 * itemsize(layout.spec.param_dtype))
