"""Mapping between Hugging Face tensors and jtrain parameters: one table, and two pure functions that apply
it.

Hugging Face stores every linear layer as [outputs, inputs] with heads flattened, one tensor per layer. jtrain
stores inputs first, with a separate head dimension and stacked layers. Both use the half-split rotary layout,
so nothing is interleaved.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jtrain.errors import UserError, first_few
from jtrain.layout.dims import ParamInfo
from jtrain.model.param import Params, map_params
from jtrain.model.transformer import Transformer

DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype("float32"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
"""Dtypes of an export."""

READABLE = (*DTYPES.values(), np.dtype("float16"))
"""Dtypes that an import reads; float32 represents all of them exactly."""

TABLE = {
    "embed_VD": ("model.embed_tokens.weight", "V D"),
    "layers.attention_norm.scale_D": ("model.layers.{y}.input_layernorm.weight", "D"),
    "layers.attention.q_DNH": ("model.layers.{y}.self_attn.q_proj.weight", "NH D"),
    "layers.attention.k_DKH": ("model.layers.{y}.self_attn.k_proj.weight", "KH D"),
    "layers.attention.v_DKH": ("model.layers.{y}.self_attn.v_proj.weight", "KH D"),
    "layers.attention.o_NHD": ("model.layers.{y}.self_attn.o_proj.weight", "D NH"),
    "layers.attention.q_norm.scale_H": ("model.layers.{y}.self_attn.q_norm.weight", "H"),
    "layers.attention.k_norm.scale_H": ("model.layers.{y}.self_attn.k_norm.weight", "H"),
    "layers.mlp_norm.scale_D": ("model.layers.{y}.post_attention_layernorm.weight", "D"),
    "layers.mlp.gate_DF": ("model.layers.{y}.mlp.gate_proj.weight", "F D"),
    "layers.mlp.up_DF": ("model.layers.{y}.mlp.up_proj.weight", "F D"),
    "layers.mlp.down_FD": ("model.layers.{y}.mlp.down_proj.weight", "D F"),
    "layers.mlp.router_DX": ("model.layers.{y}.mlp.gate.weight", "X D"),
    "layers.mlp.gate_XDF": ("model.layers.{y}.mlp.experts.{x}.gate_proj.weight", "F D"),
    "layers.mlp.up_XDF": ("model.layers.{y}.mlp.experts.{x}.up_proj.weight", "F D"),
    "layers.mlp.down_XFD": ("model.layers.{y}.mlp.experts.{x}.down_proj.weight", "D F"),
    "final_norm.scale_D": ("model.norm.weight", "D"),
    "unembed_DV": ("lm_head.weight", "V D"),
}
"""Path of a jtrain parameter -> (Hugging Face name, Hugging Face dimensions).

Dimensions are letters in the order of the Hugging Face tensor; letters written together are one flattened
dimension. A name contains the index of the layer, y, and of the expert, x, where jtrain stacks layers and
experts.
"""

_TIED_HEAD = "lm_head.weight"
_DERIVED = "rotary_emb.inv_freq"
"""Suffix of a buffer in old exports, which follows from config.json; transformers ignores it too."""


@dataclasses.dataclass(frozen=True)
class Slot:
    """Hugging Face tensor, and the part of a jtrain parameter that it holds.

    index: indices into the stacked dimensions (layer, expert) that the parameter has.
    shape: shape of the Hugging Face tensor.
    """

    name: str
    shape: tuple[int, ...]
    info: ParamInfo
    index: tuple[int, ...]
    _their_dims: str

    @property
    def _our_dims(self) -> str:
        # The stacked dimensions come first, so what follows them is one layer's or expert's.
        return self.info.dims[len(self.index) :]

    @property
    def _permutation(self) -> list[int]:
        return [self._our_dims.index(letter) for letter in self._their_dims.replace(" ", "")]

    def to_theirs(self, ours: np.ndarray) -> np.ndarray:
        """Converts the jtrain array of one layer or expert to the Hugging Face form; contiguous."""
        return np.ascontiguousarray(np.transpose(ours, self._permutation).reshape(self.shape))

    def to_ours(self, theirs: np.ndarray) -> np.ndarray:
        """Inverse of `to_theirs`, as a view."""
        permutation = self._permutation
        shape = self.info.shape[len(self.index) :]
        # The inverse of a permutation is its argsort.
        return np.transpose(theirs.reshape([shape[i] for i in permutation]), np.argsort(permutation))


def slots(model: Transformer) -> list[Slot]:
    """All Hugging Face tensors of a model, layer by layer, in the order of a forward pass."""
    infos = {info.path: info for info in model.param_infos()}
    # A parameter that is not in the table would be missing in every export.
    assert set(infos) <= set(TABLE), "a parameter that the table does not know"
    first_paths = [path for path in TABLE if path in infos and path.startswith("embed")]
    stacked = [path for path in TABLE if path in infos and infos[path].dims.startswith("Y")]
    last_paths = [path for path in TABLE if path in infos and path not in first_paths and path not in stacked]
    ordered_slots = [_slot(infos[path], ()) for path in first_paths]
    for y in range(model.num_layers):
        for path in stacked:
            # With experts, a Hugging Face file has one tensor per expert, jtrain one per layer.
            experts = range(infos[path].shape[1]) if infos[path].is_experts else None
            ordered_slots += [_slot(infos[path], (y,) if x is None else (y, x)) for x in experts or (None,)]
    return ordered_slots + [_slot(infos[path], ()) for path in last_paths]


def _slot(info: ParamInfo, index: tuple[int, ...]) -> Slot:
    name, dims = TABLE[info.path]
    size = dict(zip(info.dims, info.shape, strict=True))
    shape = tuple(int(np.prod([size[letter] for letter in group])) for group in dims.split())
    return Slot(name.format(**dict(zip("yx", index, strict=False))), shape, info, index, dims)


def to_hf(params: Params, model: Transformer, *, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yields Hugging Face tensors one at a time, so that memory holds the parameters and one tensor.

    Args:
      params: jax or numpy arrays, whole in this process.
      dtype: `float32` or `bfloat16`, rounded to nearest even.

    Raises:
      UserError: another dtype.
    """
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype} is not one of {', '.join(DTYPES)}.")
    for slot in slots(model):
        leaf: Any = params
        for key in slot.info.path.split("."):
            leaf = leaf[key]
        ours = np.asarray(leaf[slot.index] if slot.index else leaf)
        yield slot.name, slot.to_theirs(ours.astype(DTYPES[dtype], copy=False))


def from_hf(
    tensors: Mapping[str, Callable[[], np.ndarray]], model: Transformer, *, dtype: str | None = None
) -> Params:
    """Converts Hugging Face tensors to jtrain parameters as numpy arrays.

    Tensors are read one at a time and copied into their layer of the stack, so the peak of memory is the
    parameters and one tensor.

    Args:
      tensors: name -> function that reads the tensor.
      dtype: dtype of the parameters; None keeps the dtype of each tensor.

    Raises:
      UserError: tensors are missing, unknown, or differ from the model in shape or dtype; names the tensors.
    """
    slots_by_name = {slot.name: slot for slot in slots(model)}
    tensor_names = {name for name in tensors if not name.endswith(_DERIVED)}
    # With tied embeddings the head is the embedding, and jtrain keeps one array.
    if model.tie_embeddings and _TIED_HEAD in tensor_names:
        _check_tied(tensors)
        tensor_names.remove(_TIED_HEAD)
    # Before the weights are read: names tell at once that weights and config.json are of two models.
    _check_names(sorted(slots_by_name.keys() - tensor_names), sorted(tensor_names - slots_by_name.keys()))
    stacks: dict[str, np.ndarray] = {}
    for name, slot in slots_by_name.items():
        theirs = tensors[name]()
        if theirs.shape != slot.shape:
            raise UserError(
                f"tensor {name} has shape {list(theirs.shape)}, but config.json makes it {list(slot.shape)} "
                f"(our {slot.info.path}, {slot.info.dims} = {list(slot.info.shape)}). Weights and "
                "config.json are of different models."
            )
        if theirs.dtype not in READABLE:
            readable = ", ".join(str(kind) for kind in READABLE)
            raise UserError(
                f"tensor {name} has dtype {theirs.dtype}; only {readable} can be imported. Convert the "
                "directory first."
            )
        path = slot.info.path
        if path not in stacks:
            # Made at the first tensor, whose dtype it takes if none is asked for.
            stacks[path] = np.empty(slot.info.shape, theirs.dtype if dtype is None else DTYPES[dtype])
        elif dtype is None and theirs.dtype != stacks[path].dtype:
            raise UserError(
                f"tensor {name} has dtype {theirs.dtype}, other layers' have {stacks[path].dtype}, and "
                "layers are stacked. Convert the directory to one dtype, or import with a dtype given."
            )
        # `...` for a parameter that is not stacked: index is empty then.
        stacks[path][slot.index or ...] = slot.to_ours(theirs)
    return map_params(lambda info: stacks[info.path], model.param_infos())


def _check_names(missing: list[str], extra: list[str]) -> None:
    kinds = {"missing": missing, "unknown": extra}
    parts = [f"{kind} {len(names)}: {first_few(names, 8)}" for kind, names in kinds.items() if names]
    if parts:
        raise UserError(
            f"the tensors are not those that config.json describes: {'; '.join(parts)}. Weights and "
            "config.json are of different models, or a file is incomplete."
        )


def _check_tied(tensors: Mapping[str, Callable[[], np.ndarray]]) -> None:
    """Checks that the head in a tied directory (Qwen3-0.6B has one) equals the embedding."""
    table, head = tensors[TABLE["embed_VD"][0]](), tensors[_TIED_HEAD]()
    # Bit for bit, since a tied head that differs means the tie was wrong.
    if table.shape != head.shape or table.dtype != head.dtype or table.tobytes() != head.tobytes():
        raise UserError(
            f"config.json ties the embeddings (tie_word_embeddings), but {_TIED_HEAD} is another matrix than "
            f"{TABLE['embed_VD'][0]}. Set tie_word_embeddings to false in config.json to use both."
        )
