"""Mapping between Hugging Face tensors and jtrain parameters: two pure functions that apply a family's table
of names.

Hugging Face stores most linear layers as [outputs, inputs] with heads flattened, one tensor per layer. jtrain
stores inputs first, with a separate head dimension, layers that repeat stacked, and heads in the half-split
rotary layout.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jtrain.errors import UserError, first_few
from jtrain.hf.model_config import family_of
from jtrain.layout.dims import ParamInfo
from jtrain.model.families.family import Family, Tensor
from jtrain.model.param import Params, map_params
from jtrain.model.transformer import Transformer

DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype("float32"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
"""Dtypes of an export."""

READABLE = (*DTYPES.values(), np.dtype("float16"))
"""Dtypes that an import reads; float32 represents all of them exactly."""

_DERIVED = "rotary_emb.inv_freq"
"""Suffix of a buffer in old exports, which follows from config.json; transformers ignores it too."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One layer or expert of a jtrain parameter, and the part of a Hugging Face tensor that holds it.

    index: indices into the stacked dimensions (period, expert) that the parameter has.
    sizes: size of each letter of the tensor's dimensions.
    rotated: dims of a head that are rotated.
    """

    info: ParamInfo
    index: tuple[int, ...]
    tensor: Tensor
    sizes: Mapping[str, int]
    rotated: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole Hugging Face tensor."""
        groups = (_terms(group) for group in self._their_dims.split())
        return tuple(self._length(outer) * sum(map(self._length, terms)) for outer, terms in groups)

    def write(self, ours: np.ndarray, theirs: np.ndarray) -> None:
        """Writes one layer or expert into its part of their tensor."""
        view = self.view(theirs)
        view[...] = (ours if self._order is None else ours[self._order]).reshape(view.shape)

    def read(self, theirs: np.ndarray) -> np.ndarray:
        """One layer or expert from their tensor, in our dimensions; a view where nothing is reordered."""
        view = self.view(theirs)
        if self._order is None:
            return view.reshape([self.sizes[letter] for letter in self.info.dims[len(self.index) :]])
        ours = np.empty_like(view)
        ours[self._order] = view
        return ours

    @functools.cached_property
    def _our_dims(self) -> str:
        # The stacked dimensions come first, so what follows them is one layer's or expert's.
        dims = self.info.dims[len(self.index) :]
        # Theirs may have the heads of each key head side by side.
        return dims.replace("A", "OG") if "G" in self.tensor.dims else dims

    @functools.cached_property
    def _their_dims(self) -> str:
        """Their dimensions in our letters."""
        return self.tensor.dims.replace("I", "H").replace("J", "U")

    @functools.cached_property
    def _order(self) -> tuple[Any, ...] | None:
        """Index that puts our dims of a head, halves of pairs apart, into theirs, pairs side by side."""
        if self._their_dims == self.tensor.dims:
            return None
        rotated = "H" if "H" in self._our_dims else "U"
        order = np.arange(self.sizes[rotated])
        # In latent attention the U rotated dims are a head's last.
        start = self.sizes[rotated] - self.sizes["U"] if "U" in self.sizes else 0
        pairs = order[start : start + self.rotated]
        order[start : start + self.rotated] = pairs.reshape(2, -1).T.reshape(-1)
        return tuple(order if letter == rotated else slice(None) for letter in self._our_dims)

    def view(self, theirs: np.ndarray) -> np.ndarray:
        """Our part of their tensor, with our dimensions in our order."""
        index: list[Any] = []
        expanded: list[int] = []
        letters, axis = "", 0
        for group in self._their_dims.split():
            outer, terms = _terms(group)
            lengths, part = [self._length(term) for term in terms], self.tensor.part
            if outer:
                theirs = theirs.reshape(*theirs.shape[:axis], -1, sum(lengths), *theirs.shape[axis + 1 :])
                axis += 1
            if len(terms) > 1:
                end = sum(lengths[: part + 1])
                theirs = theirs[(slice(None),) * axis + (slice(end - lengths[part], end),)]
            for letter in outer + terms[part if len(terms) > 1 else 0]:
                expanded.append(int(letter) if letter.isdigit() else self._length(letter))
                # A dimension of one is there, and counts nothing.
                index.append((0 if letter == "1" else part) if letter.isdigit() else slice(None))
                letters += "" if letter.isdigit() else letter
            axis += 1
        # With an ellipsis, a single number is an array as well, and a view of theirs.
        view = theirs.reshape(expanded)[(*index, ...)]
        return np.transpose(view, [letters.index(letter) for letter in self._our_dims])

    def _length(self, term: str) -> int:
        sizes = dict(self.sizes)
        if "G" in term:
            sizes["G"] = sizes["A"] // sizes["O"]
        return math.prod(int(letter) if letter.isdigit() else sizes[letter] for letter in term)


def _terms(group: str) -> tuple[str, list[str]]:
    """Splits a layout into its repeated whole and the terms that are concatenated: `O(S+S+GH)`, `Q+Q`."""
    outer, _, inner = group.rpartition("(")
    return outer, inner.removesuffix(")").split("+")


def tensors_of(model: Transformer, family: Family | None = None) -> dict[str, list[Part]]:
    """Hugging Face tensors of a model, layer by layer in the order of a forward pass, and what each holds.

    Args:
      family: whose names the tensors have; None for the one that describes the model.
    """
    family = family or family_of(model)
    position_of = {path: position for position, path in enumerate(family.names)}
    tensors: dict[str, tuple[tuple[int, ...], list[Part]]] = {}
    infos = model.param_infos()
    sizes_by_block: dict[str, dict[str, int]] = {}
    for info in infos:
        sizes_by_block.setdefault(_block_of(info.path)[0], {}).update(zip(info.dims, info.shape, strict=True))
    for info in infos:
        block, path = _block_of(info.path)
        # A parameter that is not in the table would be missing in every export.
        if path not in family.names:
            raise UserError(
                f"{family.model_type} has no name for the parameter {path}. Add it to its table of names."
            )
        tensor = family.names[path]
        sizes = sizes_by_block[block] | dict(zip(info.dims, info.shape, strict=True))
        for period in range(info.shape[0]) if info.is_stacked else (None,):
            y = 0 if not block else _layer(model, block, period or 0)
            mixer = model.blocks[y].mixer if block else None
            rotation = mixer.rotation(model.sizes) if mixer is not None else None
            rotated = rotation[0].rotated_dims(rotation[1]) if rotation is not None else 0
            stacked = () if period is None else (period,)
            # With experts, most Hugging Face files have one tensor per expert, jtrain one per layer.
            experts = range(info.shape[info.dims.index("X")]) if "{x}" in tensor.name else (None,)
            for x in experts:
                index = stacked if x is None else (*stacked, x)
                part = Part(info, index, tensor, sizes, rotated)
                # Ends come before or after the layers, as the table has them.
                order = (
                    (1, y, position_of[path], x or 0)
                    if block
                    else (0 if path.startswith("embed") else 2, 0, position_of[path], 0)
                )
                tensors.setdefault(tensor.name.format(y=y, x=x), (order, []))[1].append(part)
    return {name: parts for name, (_, parts) in sorted(tensors.items(), key=lambda item: item[1][0])}


def _block_of(path: str) -> tuple[str, str]:
    """Path of the block that a parameter belongs to, empty for none, and its path below that."""
    head, _, below = path.partition(".")
    if head not in ("layers", "first_layers", "last_layers"):
        return "", path
    if not below.startswith("block_"):
        return head, below
    block, _, below = below.partition(".")
    return f"{head}.{block}", below


def _layer(model: Transformer, block: str, period: int) -> int:
    """Number of a layer from the path of its block, and the period that it is in."""
    head, _, name = block.partition(".")
    offset = int(name.removeprefix("block_") or 0)
    if head == "first_layers":
        return offset
    period = model.num_periods if head == "last_layers" else period
    return len(model.first) + period * len(model.period) + offset


def to_hf(
    params: Params, model: Transformer, *, dtype: str, family: Family | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields Hugging Face tensors one at a time, so that memory holds the parameters and one tensor.

    Args:
      params: jax or numpy arrays, whole in this process.
      dtype: `float32` or `bfloat16`, rounded to nearest even.

    Raises:
      UserError: another dtype.
    """
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype} is not one of {', '.join(DTYPES)}.")
    for name, parts in tensors_of(model, family).items():
        theirs = np.empty(parts[0].shape, DTYPES[dtype])
        for part in parts:
            leaf: Any = params
            for key in part.info.path.split("."):
                leaf = leaf[key]
            ours = np.asarray(leaf[part.index] if part.index else leaf)
            part.write(ours.astype(DTYPES[dtype], copy=False), theirs)
        yield name, theirs


def from_hf(
    tensors: Mapping[str, Callable[[], np.ndarray]],
    model: Transformer,
    *,
    dtype: str | None = None,
    family: Family | None = None,
) -> Params:
    """Converts Hugging Face tensors to jtrain parameters as numpy arrays.

    Tensors are read one at a time and copied into their layer of the stack, so the peak of memory is the
    parameters and one tensor.

    Args:
      tensors: name -> function that reads the tensor.
      dtype: dtype of the parameters; None keeps the dtype of each tensor.
      family: whose names the tensors have; None for the one that describes the model.

    Raises:
      UserError: tensors are missing, unknown, or differ from the model in shape or dtype; names the tensors.
    """
    parts_by_name = checked_parts(tensors, model, family or family_of(model))
    stacks: dict[str, np.ndarray] = {}
    for name, parts in parts_by_name.items():
        theirs = tensors[name]()
        for part in parts:
            check_tensor(name, part, theirs.shape, theirs.dtype)
            path = part.info.path
            if path not in stacks:
                # Made at the first tensor, whose dtype it takes if none is asked for.
                stacks[path] = np.empty(part.info.shape, theirs.dtype if dtype is None else DTYPES[dtype])
            elif dtype is None and theirs.dtype != stacks[path].dtype:
                raise UserError(
                    f"tensor {name} has dtype {theirs.dtype}, other layers' have {stacks[path].dtype}, and "
                    "layers are stacked. Convert the directory to one dtype, or import with a dtype given."
                )
            # `...` for a parameter that is not stacked: index is empty then.
            stacks[path][part.index or ...] = part.read(theirs)
    return map_params(lambda info: stacks[info.path], model.param_infos())


def checked_parts(
    tensors: Mapping[str, Callable[[], np.ndarray]], model: Transformer, family: Family
) -> dict[str, list[Part]]:
    """Contents of each tensor of a model, if these are its tensors.

    Raises:
      UserError: tensors are missing or unknown, or a tied head is another matrix than the embedding.
    """
    parts_by_name = tensors_of(model, family)
    tensor_names = {name for name in tensors if not name.endswith(_DERIVED)}
    # With tied embeddings the head is the embedding, and jtrain keeps one array.
    head = family.names["unembed_DV"].name if model.tie_embeddings else None
    is_tied_twice = head in tensor_names
    tensor_names.discard(str(head))
    # Before the weights are read: names tell at once that weights and config.json are of two models.
    _check_names(sorted(parts_by_name.keys() - tensor_names), sorted(tensor_names - parts_by_name.keys()))
    if head is not None and is_tied_twice:
        _check_tied(tensors, family.names["embed_VD"].name, head)
    return parts_by_name


def check_tensor(name: str, part: Part, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Checks shape and dtype of a tensor.

    Raises:
      UserError: they are not those of the model, or cannot be read.
    """
    if shape != part.shape:
        raise UserError(
            f"tensor {name} has shape {list(shape)}, but config.json makes it {list(part.shape)} (our "
            f"{part.info.path}, {part.info.dims} = {list(part.info.shape)}). Weights and config.json are of "
            "different models."
        )
    if dtype not in READABLE:
        readable = ", ".join(str(kind) for kind in READABLE)
        raise UserError(
            f"tensor {name} has dtype {dtype}; only {readable} can be imported. Convert the directory first."
        )


def _check_names(missing: list[str], extra: list[str]) -> None:
    kinds = {"missing": missing, "unknown": extra}
    parts = [f"{kind} {len(names)}: {first_few(names, 8)}" for kind, names in kinds.items() if names]
    if parts:
        raise UserError(
            f"the tensors are not those that config.json describes: {'; '.join(parts)}. Weights and "
            "config.json are of different models, or a file is incomplete."
        )


def _check_tied(tensors: Mapping[str, Callable[[], np.ndarray]], table_name: str, head_name: str) -> None:
    """Checks that the head in a tied directory (Qwen3-0.6B has one) equals the embedding."""
    table, head = tensors[table_name](), tensors[head_name]()
    # Bit for bit, since a tied head that differs means the tie was wrong; a few rows at a time.
    if (
        table.shape != head.shape
        or table.dtype != head.dtype
        or any(
            table[row : row + 1024].tobytes() != head[row : row + 1024].tobytes()
            for row in range(0, len(table), 1024)
        )
    ):
        raise UserError(
            f"config.json ties the embeddings (tie_word_embeddings), but {head_name} is another matrix than "
            f"{table_name}. Set tie_word_embeddings to false in config.json to use both."
        )
