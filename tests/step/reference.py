"""Loss and gradients of the decoder in float64, from its published formulas alone: no function of ours is called."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.layout.dims import IGNORE, Batch


def _norm(x_BLD: Any, scale_D: Any) -> Any:
    return x_BLD / jnp.sqrt(jnp.mean(x_BLD**2, axis=-1, keepdims=True) + 1e-5) * scale_D[None, None]


def _turned(x_BLNH: Any, position_BL: Any) -> Any:
    half = x_BLNH.shape[-1] // 2
    angle_BLR = position_BL[..., None] * (10_000.0 ** (-jnp.arange(half) / half))[None, None]
    turned = (x_BLNH[..., :half] + 1j * x_BLNH[..., half:]) * jnp.exp(1j * angle_BLR)[:, :, None]
    return jnp.concatenate([turned.real, turned.imag], axis=-1)


def _objective(params: Any, batch: Batch, z_loss: float) -> tuple[Any, Any]:
    x_BLD = params["embed_VD"][batch.token_BL]
    length = batch.token_BL.shape[1]
    same_BLM = batch.segment_BL[:, :, None] == batch.segment_BL[:, None, :]
    visible_B1LM = (same_BLM & np.tri(length, dtype=bool)[None])[:, None]
    layers = params["layers"]
    for y in range(layers["mlp"]["up_DF"].shape[0]):
        attention, mlp = (jax.tree.map(lambda w, y=y: w[y], layers[name]) for name in ("attention", "mlp"))
        h_BLD = _norm(x_BLD, layers["attention_norm"]["scale_D"][y])
        q, k, v = (jnp.einsum("bld,dnh->blnh", h_BLD, attention[name]) for name in ("q_DNH", "k_DKH", "v_DKH"))
        q, k = _turned(q, batch.position_BL), _turned(k, batch.position_BL)
        k, v = (jnp.repeat(heads, q.shape[2] // heads.shape[2], axis=2) for heads in (k, v))
        score = jnp.where(visible_B1LM, jnp.einsum("blnh,bmnh->bnlm", q, k) / q.shape[-1] ** 0.5, -jnp.inf)
        mixed = jnp.einsum("bnlm,bmnh->blnh", jax.nn.softmax(score, axis=-1), v)
        x_BLD = x_BLD + jnp.einsum("blnh,nhd->bld", mixed, attention["o_NHD"])
        h_BLD = _norm(x_BLD, layers["mlp_norm"]["scale_D"][y])
        gate = h_BLD @ mlp["gate_DF"]
        x_BLD = x_BLD + (gate / (1 + jnp.exp(-gate)) * (h_BLD @ mlp["up_DF"])) @ mlp["down_FD"]
    logits_BLV = _norm(x_BLD, params["final_norm"]["scale_D"]) @ params["unembed_DV"]
    log_z_BL = jnp.log(jnp.sum(jnp.exp(logits_BLV), axis=-1))
    scored_BL = batch.target_BL != IGNORE
    target_BL1 = np.maximum(batch.target_BL, 0)[..., None]
    nats_BL = jnp.where(scored_BL, log_z_BL - jnp.take_along_axis(logits_BLV, target_BL1, axis=-1)[..., 0], 0)
    count = scored_BL.sum()
    return (nats_BL.sum() + z_loss * jnp.where(scored_BL, log_z_BL**2, 0).sum()) / count, nats_BL.sum() / count


def loss_and_gradients(params: Any, batch: Batch, *, z_loss: float) -> tuple[float, Any]:
    """Nats per target and the gradients of the training objective, in float64."""
    with jax.enable_x64(True), jax.transfer_guard("allow"):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), params)
        (_, nats), grads = jax.jit(jax.value_and_grad(lambda p: _objective(p, batch, z_loss), has_aux=True))(wide)
        return float(nats), jax.tree.map(np.asarray, grads)


def relative_errors(got: Any, want: Any) -> dict[str, float]:
    """Distance of each array from the reference's, as a share of the reference's norm, by path."""
    errors = jax.tree.map(lambda g, w: float(np.linalg.norm(np.float64(g) - w) / np.linalg.norm(w)), got, want)
    return {jax.tree_util.keystr(path): error for path, error in jax.tree_util.tree_leaves_with_path(errors)}
