"""Mixture-of-experts feed-forward layer: the router sends each token to its top_k experts."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from jtrain.model import ops
from jtrain.model.expert_dispatch import buffer_rows, exchange_of, from_rows, order_of, send, send_back, to_rows
from jtrain.model.mlp import SwiGLU
from jtrain.model.param import weight
from jtrain.model.router import MoESpec, RouterLosses, Routing, route


class MoE(nnx.Module):
    """Sum over a token's experts of `weight * down(silu(gate(x)) * up(x))`, plus shared experts (arXiv:2401.06066).

    Experts are split over `expert`, the hidden width of each over `tensor`. No token is dropped.
    """

    def __init__(self, *, d_model: int, d_ff: int, spec: MoESpec, layers: int) -> None:
        experts, std = spec.num_experts, d_model**-0.5
        self.spec = spec
        self.router_DX = weight("DX", (d_model, experts), std=std, layers=layers)
        self.gate_XDF = weight("XDF", (experts, d_model, d_ff), std=std, layers=layers, top_k=spec.top_k)
        self.up_XDF = weight("XDF", (experts, d_model, d_ff), std=std, layers=layers, top_k=spec.top_k)
        out_std = (
            d_ff * 2 * layers
        ) ** -0.5  # the same as a dense layer's: the weights of a token's experts add up to one
        self.down_XFD = weight("XFD", (experts, d_ff, d_model), std=out_std, layers=layers, top_k=spec.top_k)
        if spec.shared_experts:
            self.shared = SwiGLU(d_model=d_model, d_ff=spec.shared_experts * d_ff, layers=layers)

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
            axes = tuple(axis for axis, size in (("context", context), ("tensor", tensor)) if size > 1)
            routing, losses = route(logits_BLX, valid_BL, self.spec, axes=axes)
            if tensor > 1:
                routing = jax.tree.map(lambda a: jax.lax.all_gather(a, "tensor", axis=1, tiled=True), routing)
            return routing, losses

    def __call__(self, x_BLD: Float[Array, "B L D"], routing: Routing, *, expert: int) -> Float[Array, "B L D"]:
        """Partial sums over this device's block of F; the caller adds them over `tensor`."""
        *rows, width = x_BLD.shape
        x_TD = x_BLD.reshape(-1, width)
        expert_TS, weight_TS = (a.reshape(x_TD.shape[0], -1) for a in (routing.expert_BLS, routing.weight_BLS))
        with jax.named_scope("dispatch"):
            order = order_of(expert_TS, self.spec.num_experts)
            x_PD = to_rows(x_TD, order)
        if expert == 1:
            y_PD = self._experts(x_PD, order.count_X)
        else:
            with jax.named_scope("exchange"):
                exchange = exchange_of(order.count_X)
                sizes = dict(num_experts=self.spec.num_experts, expert=expert)
                most = buffer_rows(x_PD.shape[0], self.spec.top_k, **sizes)
                x_RD = send(x_PD, exchange, jnp.zeros((most, 0)))
            y_RD = self._experts(x_RD, exchange.group_size)
            with jax.named_scope("exchange"):
                y_PD = send_back(y_RD, exchange, x_PD[:, :0])
        with jax.named_scope("combine"):
            y_BLD = from_rows(y_PD, weight_TS, order).reshape(*rows, width)
        if self.spec.shared_experts:
            with jax.named_scope("shared"):
                y_BLD += self.shared(x_BLD)
        return y_BLD

    def _experts(self, x_PD: Float[Array, "P D"], group_size_X: Array) -> Float[Array, "P D"]:
        gate_PF = checkpoint_name(ops.grouped_matmul(x_PD, self.gate_XDF[...], group_size_X), "mlp_gate")
        up_PF = checkpoint_name(ops.grouped_matmul(x_PD, self.up_XDF[...], group_size_X), "mlp_up")
        return ops.grouped_matmul(ops.swiglu(gate_PF, up_PF), self.down_XFD[...], group_size_X)
