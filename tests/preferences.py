"""Preference pairs in rows, what a teacher says of them, and a train step's first loss and gradients, in any layout."""

import dataclasses
import functools
import zlib
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding

from jtrain.data.constructor.context_order import context_order
from jtrain.data.references import samples_in
from jtrain.layout.dims import IGNORE, Batch
from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.model.adapters.lora import LoRA
from jtrain.model.ops import SoftTargets
from jtrain.model.param import map_params
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, build
from jtrain.step.objective import DPO, Distillation
from jtrain.step.state import TrainState, init_state
from jtrain.step.train_step import BATCH_SPEC, make_train_step
from tests.layouts import layout_from

VOCAB, COLS = 64, 32
SIZES: dict[str, Any] = dict(
    num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=64, vocab_size=VOCAB
)
LORA = LoRA(rank=4, alpha=8.0)
ADAMW = AdamW(peak_lr=1e-3, warmup_steps=0, clip_norm=None)

LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "packed": ({}, {}),
    "accumulated": ({}, dict(microbatches=4)),
    "data": (dict(data=2), {}),
    "context": (dict(context=2), {}),
    "tensor": (dict(tensor=2), {}),
    "zero 2": (dict(data=4), dict(zero_stage=2, microbatches=2)),
    "zero 3": (dict(data=4), dict(zero_stage=3)),
    "stages": (dict(stage=2), dict(microbatches=4)),
    "all": (dict(data=2, context=2, tensor=2), dict(zero_stage=3, microbatches=2)),
    "stages, all": (dict(stage=2, data=2, tensor=2), dict(zero_stage=1, microbatches=2)),
}

type Pair = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Ids of the prompt, the better and the worse answer."""


def pairs() -> list[Pair]:
    """12 pairs of 5 to 32 tokens, of which the last but one has no target in its worse text."""
    rng = np.random.default_rng(5)
    sizes = [(3, 9, 8), (6, 10, 7), (1, 2, 1), (4, 3, 12), (2, 1, 1), (8, 8, 8)] * 2

    def ids(count: int) -> np.ndarray:
        return rng.integers(0, VOCAB, count).astype(np.int32)

    drawn = [(ids(prompt), ids(better), ids(worse)) for prompt, better, worse in sizes]
    prompt, better, _ = drawn[10]
    drawn[10] = (prompt, better, better[:0])
    return drawn


def pack(rows: int, *, packed: bool) -> Batch:
    """One pair a row, or as many as fit, from the longest on."""
    placed = [0] * rows
    token, target, position, segment = (np.zeros((rows, COLS), np.int32) for _ in range(4))
    target[:] = IGNORE
    numbers = [0] * rows

    def size(pair: Pair) -> int:
        return 2 * len(pair[0]) + len(pair[1]) + len(pair[2])

    order = sorted(pairs(), key=lambda pair: -size(pair)) if packed else pairs()
    for number, pair in enumerate(order):
        row = next(r for r in range(rows) if placed[r] + size(pair) <= COLS) if packed else number
        for answer in pair[1:]:
            ids, prompt = np.concatenate([pair[0], answer]), len(pair[0])
            first, last = placed[row], placed[row] + len(ids)
            numbers[row] += 1
            token[row, first:last], position[row, first:last] = ids, np.arange(len(ids))
            segment[row, first:last] = numbers[row]
            target[row, first + prompt - 1 : last - 1] = answer
            placed[row] = last
    assert (max(numbers) > 2) == packed
    return Batch(token, target, position, segment)


def with_teacher(batch: Batch, objective: Distillation) -> Batch:
    """The batch with made-up tokens of a teacher, which are those of a text wherever it is packed."""
    kept = objective.top_k
    id_BLJ = np.zeros((*batch.token_BL.shape, kept), np.int32)
    logprob_BLI = np.zeros((*batch.token_BL.shape, kept + 1), np.float32)
    for sample in samples_in(batch.token_BL, batch.target_BL, batch.segment_BL):
        rng, span = np.random.default_rng(list(sample.hash)), (sample.row, slice(sample.start, sample.end))
        length = sample.end - sample.start
        # A teacher speaks of prompts too, which are not learned.
        id_BLJ[span] = np.argsort(rng.random((length, VOCAB)), axis=-1)[:, :kept]
        logprob_BLI[span] = np.log(rng.dirichlet(np.full(kept + 1, 0.5), size=length))
    return dataclasses.replace(batch, soft=SoftTargets(id_BLJ, logprob_BLI, objective.share))


class PreferenceStep:
    """First step of a model on pairs, in a layout; with an adapter that adds something already, or nothing yet.

    Args:
      layout: name in LAYOUTS; any other has one pair a row on one device.
    """

    def __init__(
        self,
        layout: str,
        objective: DPO | Distillation,
        *,
        sizes: dict[str, Any] = SIZES,
        base_dtype: Any = None,
        **fields: Any,
    ) -> None:
        axes, own = LAYOUTS.get(layout, ({}, {}))
        self.spec, self.model = MeshSpec(**axes), Transformer(**sizes)
        self.mesh = make_mesh(self.spec, jax.devices()[: self.spec.size])
        self.has_adapter = isinstance(objective, DPO) and objective.reference == "adapter_off"
        infos = self.model.param_infos()
        lora = dataclasses.replace(LORA, base_dtype=base_dtype)
        self.infos = lora.infos(infos) if self.has_adapter else infos
        scale = dict(adapter_scale=LORA.scale) if self.has_adapter else {}
        fields = dict(compute_dtype="float32") | own | fields
        self.layout = layout_from(fields, self.spec, self.infos, **scale)
        optimizer = build(ADAMW, num_steps=2, params=map_params(lambda info: info, self.infos))
        self.step = make_train_step(self.model, optimizer, self.layout, self.mesh, objective=objective)
        state = init_state(self.layout, optimizer, self.mesh, seed=0)
        # On the host, because a step takes the memory of its state.
        self.first_state, self.shardings = jax.device_get(state), jax.tree.map(lambda x: x.sharding, state)
        first_params = self.first_state.params
        self.params = (
            map_params(self._started, self.infos, first_params) if self.has_adapter else first_params
        )
        batch = pack(8, packed=True) if layout in LAYOUTS else pack(12, packed=False)
        if isinstance(objective, Distillation):
            batch = with_teacher(batch, objective)
        columns = context_order(COLS, self.spec.context, self.layout.context_order)
        self.batch = jax.tree.map(
            lambda x: jax.device_put(x[:, columns], NamedSharding(self.mesh, BATCH_SPEC)), batch
        )

    def _started(self, info: Any, value: np.ndarray) -> np.ndarray:
        if not info.path.rpartition(".")[2].startswith("B_"):
            return value
        drawn = np.random.default_rng(zlib.crc32(info.path.encode())).normal(0, 0.3, info.shape)
        if info.is_stacked and self.layout.pipeline is not None:
            drawn = drawn[np.asarray(self.layout.pipeline.order)]
        return drawn.astype(value.dtype)

    @functools.cached_property
    def result(self) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """Metrics, and the gradient (times 1 - b1) of the first step by path."""
        return self._step(dataclasses.replace(self.first_state, params=self.params))

    @functools.cached_property
    def first_result(self) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """The same of the adapter as it begins, which adds nothing."""
        return self._step(self.first_state)

    def _step(self, state: TrainState) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        state, metrics = self.step(jax.device_put(state, self.shardings), self.batch)
        order = np.argsort(self.layout.pipeline.order) if self.layout.pipeline else slice(None)
        moments: Any = map_params(
            lambda info, x: np.asarray(x)[order] if info.is_stacked else np.asarray(x),
            tuple(info for info in self.infos if not info.frozen),
            state.opt_state.mu,
        )
        values = {name: float(x) for name, x in metrics.items() if np.ndim(x) == 0}
        flat = flatten_dict(moments, sep=".")
        return values, {str(path): np.asarray(moment) for path, moment in flat.items()}


def assert_gradients(moments: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    """First moments of a step, within 1e-6 of all gradients together."""
    assert moments.keys() == want.keys()
    total = np.sqrt(sum(np.sum(np.square(gradient)) for gradient in want.values()))
    for path, gradient in want.items():
        # The first moment is a tenth of the gradient.
        difference = np.linalg.norm((moments[path] / np.float64(1 - ADAMW.b1) - gradient).ravel())
        assert difference < 1e-6 * total, (path, difference / total)
        assert np.linalg.norm(gradient) > 1e-4 * total, path


@functools.cache
def first_step(layout: str, objective: DPO | Distillation, **options: Any) -> PreferenceStep:
    """The step of a layout, compiled once."""
    return PreferenceStep(layout, objective, **options)
