"""Backward pass in two parts: gradients by input first, gradients by weight later, without computing anything
twice.

A zero-bubble pipeline fills its gaps with gradients of weights (arXiv:2401.10241). A weight's gradient needs
only the input of its product and the gradient of its result. Where a weight is a `SplitKernel`, the backward
pass computes the gradient of the input alone, and hands out those two arrays as the gradients of two
arguments that the forward pass does not read (`Taps`). `jtrain.step.pipeline_chunks` later makes the weight's
gradient of them: it differentiates `Site.replay` by the kernels.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain.model import ops

type Product = Callable[..., tuple[Array, ...]]
"""(x, kernel, ...) -> one result per kernel."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Taps:
    """Arguments of a product that are never read, and whose gradients are what the weights' gradients need.

    x: its gradient is the product's input; results: their gradients are those of the product's results.
    """

    x: Any
    results: tuple[Any, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SplitKernel:
    """Weight that gets no gradient in the backward pass.

    value: an array or an `ops.Fp8Kernel`; before the weight is fetched, a leaf of the parameter tree.
    taps: of the product, if this is its first kernel and the product is differentiated.
    path: path of the weight below `layers`.
    """

    value: Any
    taps: Taps | None
    path: str = dataclasses.field(metadata={"static": True})

    def __getitem__(self, key: Any) -> "SplitKernel":
        """Returns itself, so that `weight[...]` works for all kinds of weights."""
        assert key is Ellipsis, key
        return self


@dataclasses.dataclass(frozen=True)
class Site:
    """A product of a layer: its function, the paths of its kernels, the shapes of input and results."""

    product: Product
    paths: tuple[str, ...]
    x: jax.ShapeDtypeStruct
    results: tuple[jax.ShapeDtypeStruct, ...]

    def taps(self) -> Taps:
        """Arguments for the forward pass."""
        # Never read, so XLA drops them.
        zeros = [jnp.zeros(shape.shape, shape.dtype) for shape in (self.x, *self.results)]
        return Taps(zeros[0], tuple(zeros[1:]))

    def replay(self, taps: Taps, kernels: Sequence[Any]) -> tuple[Array, ...]:
        """The product from the gradients of its taps; only its derivative by the kernels is ever used."""
        return self.product(taps.x, *kernels)


_sites: contextvars.ContextVar[dict[str, Site] | None] = contextvars.ContextVar("sites", default=None)


@contextlib.contextmanager
def record_sites() -> Iterator[dict[str, Site]]:
    """Collects the products with `SplitKernel`s that are traced inside, by the path of their first kernel."""
    sites_by_path: dict[str, Site] = {}
    # A context variable: products are deep in the model, whose calls do not know about recording.
    token = _sites.set(sites_by_path)
    try:
        yield sites_by_path
    finally:
        _sites.reset(token)


def multiply(product: Product, x: Float[Array, "..."], kernels: Sequence[ops.Kernel | SplitKernel]) -> Any:
    """`product(x, *kernels)`, with the backward pass that the kernels ask for; all are split or none is."""
    split_kernels = [kernel for kernel in kernels if isinstance(kernel, SplitKernel)]
    if not split_kernels:
        return product(x, *kernels)
    # One product shares its x and its taps, so it is split as a whole.
    assert len(split_kernels) == len(kernels)
    values = tuple(kernel.value for kernel in split_kernels)
    # Recording runs before any taps exist: shapes are all that it needs.
    if (sites := _sites.get()) is not None:
        results = product(x, *values)
        shapes = tuple(jax.ShapeDtypeStruct(y.shape, y.dtype) for y in results)
        x_shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        sites[split_kernels[0].path] = Site(
            product, tuple(kernel.path for kernel in split_kernels), x_shape, shapes
        )
        return results
    assert split_kernels[0].taps is not None, split_kernels[0].path
    return _multiplied(product, x, values, split_kernels[0].taps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiplied(product: Product, x: Array, values: tuple[Any, ...], taps: Taps) -> tuple[Array, ...]:
    del taps
    return product(x, *values)


def _forward(
    product: Product, x: Array, values: tuple[Any, ...], taps: Taps
) -> tuple[tuple[Array, ...], Any]:
    return _multiplied(product, x, values, taps), (x, values)


def _backward(product: Product, saved: Any, gradients: tuple[Array, ...]) -> tuple[Array, None, Taps]:
    x, values = saved
    # By x alone: kernels are constants here, so their products are not computed.
    _, vjp = jax.vjp(lambda x: product(x, *values), x)
    # The two arrays leave as `gradients` of taps: the only way out of a backward pass.
    return vjp(gradients)[0], None, Taps(x, gradients)


_multiplied.defvjp(_forward, _backward)
