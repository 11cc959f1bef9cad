"""Mixture-of-experts feed-forward layer: the router sends each token to its top_k experts."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float

from jtrain.model import ops
from jtrain.model.adapters.adapted_kernel import AdaptedKernel
from jtrain.model.expert_dispatch import (
    ExpertOrder,
    buffer_rows,
    exchanges_of,
    from_rows,
    num_pieces,
    order_of,
    send,
    send_back,
    to_rows,
)
from jtrain.model.mlp import MLP, ClampedSwiGLU, MLPSpec, activate, gated
from jtrain.model.param import aligned, load_bias, vector, weight
from jtrain.model.router import MoESpec, RouterLosses, Routing, route
from jtrain.model.sizes import ModelSizes
from jtrain.model.tensor_parallel import local_part


class MoE(nnx.Module):
    """Sum over a token's experts of `weight * down(act(gate(x)) * up(x))` (arXiv:2401.06066).

    Experts are split over `expert`, the hidden width of each over `tensor`; shared experts are added. No
    token is dropped.
    """

    def __init__(self, spec: MoESpec, sizes: ModelSizes, *, layers: int) -> None:
        experts, d_model, std = spec.num_experts, sizes.d_model, sizes.d_model**-0.5
        d_ff = spec.d_ff or sizes.d_ff
        self.spec = spec
        self.router_DX = weight("DX", (d_model, experts), std=std, layers=layers)
        if spec.correction_bias:
            rate = spec.bias_update_rate
            self.router_bias_X = (
                load_bias("X", (experts,), rate=rate, layers=layers)
                if rate
                else vector("X", (experts,), ones=False, layers=layers)
            )
        if spec.gated:
            self.gate_XDF = weight("XDF", (experts, d_model, d_ff), std=std, layers=layers, top_k=spec.top_k)
        self.up_XDF = weight("XDF", (experts, d_model, d_ff), std=std, layers=layers, top_k=spec.top_k)
        # The same as a dense layer's: weights of a token's experts add up to one (less if not normalized).
        out_std = sizes.branch_std(d_ff)
        self.down_XFD = weight("XFD", (experts, d_ff, d_model), std=out_std, layers=layers, top_k=spec.top_k)
        if spec.bias:
            self.router_offset_X = vector("X", (experts,), ones=False, layers=layers)
            if spec.gated:
                self.gate_bias_XF = vector("XF", (experts, d_ff), ones=False, layers=layers)
            self.up_bias_XF = vector("XF", (experts, d_ff), ones=False, layers=layers)
            self.down_bias_XD = vector("XD", (experts, d_model), ones=False, layers=layers)
        if shared_d_ff := spec.shared_d_ff or spec.shared_experts * d_ff:
            unit = MLPSpec(d_ff=shared_d_ff, activation=spec.activation, gated=spec.gated)
            self.shared = MLP(unit, sizes, layers=layers)
        if spec.shared_gate:
            # A vector of weights: too small to shard, and read in float32 as a router's logits are.
            self.shared_gate_D = vector("D", (d_model,), ones=False, layers=layers)

    def route(
        self, x_BLD: Float[Array, "B _ D"], valid_BL: Bool[Array, "B _"], *, tensor: int, context: int
    ) -> tuple[Routing, RouterLosses]:
        """Routes this device's positions and gathers the routing of all positions along `tensor`.

        Returns:
          The gathered routing, and this device's part of the router losses.
        """
        with jax.named_scope("router"):
            kernel_DX = self.router_DX[...]
            logits_BLX = jnp.einsum("bld,dx->blx", x_BLD, kernel_DX, preferred_element_type=jnp.float32)
            if self.spec.bias:
                logits_BLX += aligned(self.router_offset_X[...], logits_BLX)
            axes = tuple(axis for axis, size in (("context", context), ("tensor", tensor)) if size > 1)
            bias_X = self.router_bias_X[...] if self.spec.correction_bias else None
            routing, losses = route(logits_BLX, valid_BL, self.spec, bias_X=bias_X, axes=axes)
            # Each device multiplies the rows of all positions with its part of F, so it needs their experts.
            if tensor > 1:
                routing = jax.tree.map(lambda a: jax.lax.all_gather(a, "tensor", axis=1, tiled=True), routing)
            return routing, losses

    def __call__(
        self, x_BLD: Float[Array, "B L D"], routing: Routing, *, expert: int
    ) -> Float[Array, "B L D"]:
        """Partial sums over this device's block of F; the caller adds them over `tensor`."""
        *rows, width = x_BLD.shape
        x_TD = x_BLD.reshape(-1, width)
        expert_TS, weight_TS = (
            a.reshape(x_TD.shape[0], -1) for a in (routing.expert_BLS, routing.weight_BLS)
        )
        if self.spec.weight_input:
            x_TD, weight_TS = x_TD * weight_TS.astype(x_TD.dtype), jnp.ones_like(weight_TS)
        # Pieces only hide an exchange; without one they would make smaller matmuls.
        pieces = 1 if expert == 1 else num_pieces(x_TD.shape[0], self.spec.top_k)
        with jax.named_scope("dispatch"):
            orders = [
                order_of(expert_tS, self.spec.num_experts) for expert_tS in jnp.split(expert_TS, pieces)
            ]
            x_PDs = [
                to_rows(x_tD, order) for x_tD, order in zip(jnp.split(x_TD, pieces), orders, strict=True)
            ]
        if expert == 1:
            weights, count_X = self._weights(pieces), orders[0].count_X
            wide_PF = self._wide(x_PDs[0], count_X, weights, expected_rows=x_PDs[0].shape[0])
            y_PDs = [self._down(wide_PF, count_X, weights)]
        else:
            y_PDs = self._exchange_and_multiply(x_PDs, orders, expert=expert)
        with jax.named_scope("combine"):
            parts = zip(y_PDs, jnp.split(weight_TS, pieces), orders, strict=True)
            y_BLD = jnp.concatenate([from_rows(*part) for part in parts]).reshape(*rows, width)
        if hasattr(self, "shared"):
            with jax.named_scope("shared"):
                y_BLD += self._gate_of_shared(x_BLD, self.shared(x_BLD))
        return y_BLD

    def _gate_of_shared(
        self, x_BLD: Float[Array, "B L D"], y_BLD: Float[Array, "B L D"]
    ) -> Float[Array, "B L D"]:
        """Sum of the shared experts, times their scale and their gate if they have one."""
        if self.spec.shared_scale != 1:
            y_BLD *= self.spec.shared_scale
        if not self.spec.shared_gate:
            return y_BLD
        gate_BL = jnp.einsum(
            "bld,d->bl", x_BLD.astype(jnp.float32), self.shared_gate_D[...].astype(jnp.float32)
        )
        return y_BLD * jax.nn.sigmoid(gate_BL)[..., None].astype(y_BLD.dtype)

    def _exchange_and_multiply(
        self, x_PDs: list[Array], orders: list[ExpertOrder], *, expert: int
    ) -> list[Array]:
        """Results of the experts for each piece of the tokens, with exchanges beside other pieces' matmuls.

        While one piece is multiplied with gate and up, the next is sent to its experts; while it is
        multiplied with down, the results of the piece before return. Only the first sending and the last
        return have no matmul beside them. `in_order` fixes that order here and, reversed, in the backward
        pass: XLA:GPU would multiply all pieces side by side, after their exchanges.
        """
        pieces = len(x_PDs)
        max_rows = buffer_rows(
            x_PDs[0].shape[0], self.spec.top_k, num_experts=self.spec.num_experts, expert=expert
        )
        with jax.named_scope("exchange"):
            exchanges = exchanges_of([order.count_X for order in orders])

        def send_piece(piece: int) -> Array:
            with jax.named_scope("exchange"):
                # An array of width 0 carries the number of rows into the traced function.
                return send(x_PDs[piece], exchanges[piece], jnp.zeros((max_rows, 0)))

        def return_piece(piece: int, y_RD: Array) -> Array:
            with jax.named_scope("exchange"):
                return send_back(y_RD, exchanges[piece], x_PDs[piece][:, :0])

        # As many rows arrive as leave, on average.
        weights, expected = self._weights(pieces), x_PDs[0].shape[0]
        x_RD: Any = send_piece(0)
        y_RD: Any = None
        y_PDs: list[Array] = []
        for piece in range(pieces):
            group_size = exchanges[piece].group_size
            next_RD = send_piece(piece + 1) if piece + 1 < pieces else None
            wide_RF = self._wide(x_RD, group_size, weights, expected_rows=expected)
            # Gate and up of this piece, sending the next, down of the one before: all before what follows.
            if pieces > 1:
                wide_RF, next_RD, y_RD = in_order(wide_RF, next_RD, y_RD)
            returned_PDs = [] if y_RD is None else [return_piece(piece - 1, y_RD)]
            y_RD = self._down(wide_RF, group_size, weights)
            if pieces > 1:
                # The piece after the next is sent after this one, so that buffers of few pieces exist at a
                # time.
                y_RD, next_RD, returned_PDs, x_PDs[piece + 2 : piece + 3] = in_order(
                    y_RD, next_RD, returned_PDs, x_PDs[piece + 2 : piece + 3]
                )
            x_RD = next_RD
            y_PDs += returned_PDs
        # The last return has no other piece's matmul beside it.
        return [*y_PDs, return_piece(pieces - 1, y_RD)]

    def _weights(self, pieces: int) -> "tuple[ExpertWeight, ...]":
        """Gate, unless experts have none, up and down, each used once per piece."""
        names = ("gate_XDF",) * self.spec.gated + ("up_XDF", "down_XFD")
        return tuple(ExpertWeight.of(getattr(self, name)[...], uses=pieces) for name in names)

    def _wide(
        self,
        x_PD: Float[Array, "P D"],
        group_size_X: Array,
        weights: "tuple[ExpertWeight, ...]",
        *,
        expected_rows: int,
    ) -> Float[Array, "P F"]:
        """`act(gate) * up` of each expert's rows, or `act(up)`; undefined in rows of no expert."""

        def projected(weight: ExpertWeight, name: str) -> Float[Array, "P F"]:
            y_PF = weight.multiply(x_PD, group_size_X)
            if self.spec.bias:
                y_PF += self._bias_of_rows(getattr(self, f"{name}_bias_XF")[...], y_PF, group_size_X)
            return checkpoint_name(y_PF, f"mlp_{name}")

        if not self.spec.gated:
            assert not isinstance(self.spec.activation, ClampedSwiGLU)
            return activate(projected(weights[0], "up"), self.spec.activation)
        gate_PF, up_PF = projected(weights[0], "gate"), projected(weights[1], "up")
        if self.spec.activation == "silu":
            return ops.grouped_swiglu(gate_PF, up_PF, group_size_X, expected_rows=expected_rows)
        return gated(gate_PF, up_PF, self.spec.activation)

    def _down(
        self, wide_PF: Float[Array, "P F"], group_size_X: Array, weights: "tuple[ExpertWeight, ...]"
    ) -> Float[Array, "P D"]:
        """Partial sums over this device's block of F of each expert's rows."""
        y_PD = weights[-1].multiply(wide_PF, group_size_X)
        if not self.spec.bias:
            return y_PD
        bias_PD = self._bias_of_rows(self.down_bias_XD[...], y_PD, group_size_X)
        if wide_PF.shape[-1] != (d_ff := self.up_bias_XF.shape[-1]):
            # The caller adds over the devices along `tensor`: one of them has the bias.
            bias_PD = jnp.where(jax.lax.axis_index("tensor") == 0, bias_PD, 0.0)
            assert d_ff % wide_PF.shape[-1] == 0
        return y_PD + bias_PD

    def _bias_of_rows(
        self, bias_XF: Float[Array, "X _"], y_PF: Float[Array, "P _"], group_size_X: Array
    ) -> Float[Array, "P _"]:
        """Bias of each row's expert at this device's part of F; 0 in rows of no expert.

        Every device holds all biases, so its experts' are cut out. The product with ones and zeros is exact,
        and its gradient a matmul instead of a scatter, at X / D of the cost of a projection.
        """
        experts, columns = group_size_X.shape[0], y_PF.shape[-1]
        if experts != bias_XF.shape[0]:
            first = jax.lax.axis_index("expert") * experts
            bias_XF = jax.lax.dynamic_slice_in_dim(bias_XF, first, experts)
        bias_XF = local_part(bias_XF.T, columns).T
        end_1X = jnp.cumsum(group_size_X)[None]
        row_P1 = jnp.arange(y_PF.shape[0], dtype=end_1X.dtype)[:, None]
        is_expert_PX = (row_P1 < end_1X) & (row_P1 >= end_1X - group_size_X[None])
        bias_PF = is_expert_PX.astype(y_PF.dtype) @ bias_XF.astype(y_PF.dtype)
        # Rows of no expert are undefined in the gradient as well, and zero times NaN is NaN.
        return jnp.where(row_P1 < end_1X[:, -1:], bias_PF, 0.0)


@dataclasses.dataclass(frozen=True)
class ExpertWeight:
    """Weights of the experts, whose gradient is summed over all uses in float32 before it is rounded.

    value: the weights that products read.
    trained: the same weights in float32, which JAX differentiates; products do not read them, so XLA drops
      them. None where there is one use, whose gradient is rounded once anyway, and where there is no
      gradient.

    adapter: weights of the two products of low rank beside a frozen one, and their scale; None without.
    """

    value: Array
    trained: Array | None
    adapter: "tuple[ExpertWeight, ExpertWeight, float] | None" = None

    @classmethod
    def of(cls, kernel_XIO: Float[Array, "X _ _"] | AdaptedKernel, *, uses: int) -> "ExpertWeight":
        """Weights for `uses` products."""
        if isinstance(kernel_XIO, AdaptedKernel):
            down, up = cls.of(kernel_XIO.down, uses=uses), cls.of(kernel_XIO.up, uses=uses)
            return cls(jax.lax.stop_gradient(kernel_XIO.base), None, (down, up, kernel_XIO.scale))
        if uses == 1:
            return cls(kernel_XIO, None)
        wide = jnp.promote_types(kernel_XIO.dtype, jnp.float32)
        # The float32 copy is never computed: it is a cotangent's way back to the weight.
        return cls(jax.lax.stop_gradient(kernel_XIO), kernel_XIO.astype(wide))

    def multiply(self, x_PI: Float[Array, "P _"], group_size_X: Array) -> Float[Array, "P _"]:
        """Multiplies the rows of each expert with its matrix."""
        if self.adapter is not None:
            down, up, scale = self.adapter
            y_PO = ops.grouped_matmul(x_PI, self.value, group_size_X)
            return y_PO + scale * up.multiply(down.multiply(x_PI, group_size_X), group_size_X)
        if self.trained is None:
            return ops.grouped_matmul(x_PI, self.value, group_size_X)
        return _multiply(x_PI, self.trained, self.value, group_size_X)


@jax.custom_vjp
def _multiply(x_PI: Array, trained_XIO: Array, value_XIO: Array, group_size_X: Array) -> Array:
    del trained_XIO
    return ops.grouped_matmul(x_PI, value_XIO, group_size_X)


def _multiply_forward(
    x_PI: Array, trained_XIO: Array, value_XIO: Array, group_size_X: Array
) -> tuple[Array, Any]:
    return _multiply(x_PI, trained_XIO, value_XIO, group_size_X), (x_PI, value_XIO, group_size_X)


def _multiply_backward(saved: Any, dy_PO: Array) -> tuple[Array, Array, None, None]:
    x_PI, value_XIO, group_size_X = saved
    # A float32 kernel gets a float32 gradient, which JAX adds up over the pieces before it is rounded.
    wide_XIO = value_XIO.astype(jnp.promote_types(value_XIO.dtype, jnp.float32))
    _, vjp = jax.vjp(lambda x, kernel: ops.grouped_matmul(x, kernel, group_size_X), x_PI, wide_XIO)
    # In order, or XLA:GPU may leave the weights' gradients of all pieces to the end, with all that they read.
    return *in_order(*vjp(dy_PO)), None, None


_multiply.defvjp(_multiply_forward, _multiply_backward)


def in_order(*arrays: Any) -> Any:
    """The same arrays, none of which is used before all are computed; their gradients likewise.

    Rows stay contiguous: XLA would give the barrier the layout that one of its users prefers, with a
    transposing copy on both sides.
    """
    row_major = functools.partial(
        jax.tree.map, lambda a: with_layout_constraint(a, Layout(tuple(range(a.ndim))))
    )
    return row_major(jax.lax.optimization_barrier(row_major(arrays)))
