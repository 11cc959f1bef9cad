"""Autoregressive sampling with a key-value cache, on one device, from the model's own modules.

Two programs are compiled for any prompt and number of tokens: one reads `PROMPT_CHUNK` tokens, the other
generates `DECODE_CHUNK`. Both work on a cache of fixed size.
"""

import dataclasses
import functools
from collections.abc import Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jtrain.errors import UserError
from jtrain.layout.dims import Batch
from jtrain.model import ops
from jtrain.model.block import Block, BlockSpec
from jtrain.model.forward_placement import Placement
from jtrain.model.param import Params
from jtrain.model.transformer import Transformer

PROMPT_CHUNK = 64
"""Prompt tokens per pass. Attention scores take N * 64 * M floats; each pass reads all weights once."""

DECODE_CHUNK = 16
"""Tokens generated per call. Text appears in chunks of this size, and an end token is seen up to this many
late."""

_UNSHARDED = Placement(fetch=lambda path, tree: tree)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Cache of each layer, of the first `length` of M positions.

    layers: by the parameters' first name (`layers`, and `first_layers` and `last_layers` where the model has
      them), one entry per block: what its mixer keeps, with a leading Y for blocks that repeat; None for a
      block without a mixer.
    length: int32.
    """

    layers: Any
    length: Any


@dataclasses.dataclass(frozen=True)
class TokenSampler:
    """Sampling rule that draws the next token from its logits.

    temperature: divides the logits; 0 takes the most likely token.
    top_k: samples from the k most likely tokens.
    top_p: samples from the most likely tokens whose probabilities sum to p (arXiv:1904.09751).
    vocab_size: ids from here on are never drawn; a model may have more embeddings than its tokenizer has
      tokens.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(
                f"temperature={self.temperature} must be at least 0; 0 takes the most likely token."
            )
        if self.top_k is not None and self.top_p is not None:
            raise UserError(
                f"top_k={self.top_k} and top_p={self.top_p} exclude each other. Give one of them."
            )
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k={self.top_k} must be at least 1.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must be above 0 and at most 1.")

    def draw(self, logits_BV: Float[Array, "B V"], key: Key[Array, ""]) -> Int[Array, " B"]:
        """The next token of each sequence."""
        if self.vocab_size is not None:
            # Before anything else: padding of the table must not take part in top_k or top_p.
            in_vocab_V = jnp.arange(logits_BV.shape[1]) < self.vocab_size
            logits_BV = jnp.where(in_vocab_V[None, :], logits_BV, -jnp.inf)
        # The most likely token needs no random number, and dividing by 0 is not defined.
        if self.temperature == 0:
            return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        logits_BV = logits_BV / self.temperature
        if self.top_k is not None:
            # Ties with the k-th largest logit stay, so there may be more than k tokens.
            least_B1 = jax.lax.top_k(logits_BV, min(self.top_k, logits_BV.shape[1]))[0][:, -1:]
            logits_BV = jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
        if self.top_p is not None:
            sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
            p_BV = jax.nn.softmax(sorted_BV, axis=-1)
            # A token stays while the more likely tokens sum to less than p; the most likely token always
            # stays.
            in_nucleus_BV = jnp.cumsum(p_BV, axis=-1) - p_BV < self.top_p
            least_B1 = jnp.min(jnp.where(in_nucleus_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True)
            logits_BV = jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
        return jax.random.categorical(key, logits_BV, axis=-1).astype(jnp.int32)


def empty_cache(model: Transformer, *, batch: int, max_len: int, dtype: str) -> KVCache:
    """Empty cache for `max_len` positions of `batch` sequences."""

    def of_blocks(blocks: tuple[BlockSpec, ...]) -> list[Any]:
        options: Any = dict(batch=batch, max_len=max_len, dtype=dtype)
        return [block.mixer and block.mixer.empty_cache(model.sizes, **options) for block in blocks]

    # Each layer of the loop has its own.
    repeated = jax.tree.map(
        lambda array: jnp.repeat(array[None], model.num_periods, axis=0), of_blocks(model.period)
    )
    layers = {"layers": repeated}
    if model.first:
        layers["first_layers"] = of_blocks(model.first)
    if model.last:
        layers["last_layers"] = of_blocks(model.last)
    return KVCache(layers, jnp.zeros((), jnp.int32))


def extend(
    model: Transformer, params: Params, token_BL: Int[Array, "B L"], count: Int[Array, ""], cache: KVCache
) -> tuple[Float[Array, "B V"], KVCache]:
    """Appends `count` tokens of each sequence to the cache, computing in the dtype of `params`.

    Args:
      token_BL: the next tokens; tokens from `count` on are padding. The cache must have room for all L.

    Returns:
      Logits after the last of the `count` tokens, float32, and the extended cache.
    """
    position_BL = jnp.broadcast_to(cache.length + jnp.arange(token_BL.shape[1]), token_BL.shape)
    # One document: its numbers are ones.
    ones_BL = jnp.ones_like(token_BL)
    valid_BL = jnp.broadcast_to(jnp.arange(token_BL.shape[1]) < count, token_BL.shape)
    shared = model.shared(Batch(token_BL, token_BL, position_BL, ones_BL))

    def through(
        definition: Any, x_BLD: Array, weights_and_state: tuple[Params, list[Any]]
    ) -> tuple[Array, list[Any]]:
        weights, states = weights_and_state
        merged = nnx.merge(definition, weights)
        blocks, new_states = (merged,) if isinstance(merged, Block) else merged, []
        for block, state in zip(blocks, states, strict=True):
            stream_BLD = x_BLD
            if state is not None:
                x_BLD, h_BLD = block.attention_input(x_BLD)
                rotation = model.rotation(block, shared)
                h_BLD, state = block.mixer.extend(h_BLD, rotation, position_BL, valid_BL, state)
                stream_BLD = block.add_attention(x_BLD, h_BLD)
            if block.spec.feed_forward is not None:
                stream_BLD, h_BLD = block.mlp_input(stream_BLD, x_BLD)
                h_BLD, _ = block.feed_forward(h_BLD, ones_BL > 0)
                stream_BLD = block.add_mlp(stream_BLD, h_BLD)
            x_BLD = stream_BLD
            new_states.append(state)
        return x_BLD, new_states

    x_BLD = model.embed(params, token_BL, _UNSHARDED)
    new_layers: dict[str, Any] = {}
    for path, blocks in (
        ("first_layers", model.first),
        ("layers", model.period),
        ("last_layers", model.last),
    ):
        if not blocks:
            continue
        layer = functools.partial(through, nnx.split(getattr(model, path))[0])
        state = params[path], cache.layers[path]
        x_BLD, new_layers[path] = (
            jax.lax.scan(layer, x_BLD, state) if path == "layers" else layer(x_BLD, state)
        )
    # Logits of one position only: V floats instead of L * V.
    last_B1D = jax.lax.dynamic_slice_in_dim(x_BLD, count - 1, 1, axis=1)
    last_B1D = model.normed(params, last_B1D, _UNSHARDED)
    kernel_DV = model.unembed(params, _UNSHARDED)
    logits_BV = jnp.einsum("bd,dv->bv", last_B1D[:, 0], kernel_DV, preferred_element_type=jnp.float32)
    logits_BV = ops.capped(logits_BV, model.logit_soft_cap)
    return logits_BV, KVCache(new_layers, cache.length + count)


def generate_ids(
    model: Transformer,
    params: Params,
    prompt_ids: Int[np.ndarray, " T"],
    *,
    max_tokens: int,
    sampler: TokenSampler,
    seed: int,
    end_ids: Collection[int] = (),
    context: int | None = None,
) -> Iterator[list[int]]:
    """Yields the tokens that follow a prompt in chunks, until one of `end_ids` (yielded last) or
    `max_tokens`.

    The tokens depend only on the parameters, the prompt, the sampler and the seed.

    Args:
      params: matrices in the dtype to compute in, scales in float32.
      context: most tokens of prompt and answer, so that all prompts share a cache of one size; None for those
        of this prompt.

    Raises:
      UserError: the prompt is empty.
    """
    num_prompt = len(prompt_ids)
    if num_prompt == 0:
        raise UserError("the prompt has no token to start from. Give a prompt.")
    # The last chunks of prompt and answer are padded to full length, so the cache needs room for them.
    max_len = _round_up(num_prompt, PROMPT_CHUNK) + _round_up(max_tokens, PROMPT_CHUNK)
    if context is not None:
        max_len = _round_up(context, PROMPT_CHUNK) + PROMPT_CHUNK
    cache = empty_cache(model, batch=1, max_len=max_len, dtype=params["embed_VD"].dtype.name)
    logits_BV: Array | None = None
    # Every chunk has the same shape, so one compiled program reads any prompt.
    for start in range(0, num_prompt, PROMPT_CHUNK):
        chunk = prompt_ids[start : start + PROMPT_CHUNK]
        token_BL = np.pad(chunk, (0, PROMPT_CHUNK - len(chunk)))[None]
        logits_BV, cache = read_prompt(
            model, params, jnp.asarray(token_BL, jnp.int32), jnp.int32(len(chunk)), cache
        )
    remaining = max_tokens
    while remaining > 0:
        assert logits_BV is not None
        tokens_LB, logits_BV, cache = write_tokens(
            model, sampler, params, logits_BV, cache, jax.random.key(seed)
        )
        # The last chunk draws all its tokens; those beyond max_tokens are cut here.
        ids = np.asarray(tokens_LB)[:remaining, 0].tolist()
        if ends := [position for position, token in enumerate(ids) if token in end_ids]:
            yield ids[: ends[0] + 1]
            return
        yield ids
        remaining -= len(ids)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def read_prompt(
    model: Transformer, params: Params, token_BL: Int[Array, "B L"], count: Int[Array, ""], cache: KVCache
) -> tuple[Float[Array, "B V"], KVCache]:
    """Reads a chunk of the prompts into the cache; returns the logits after it."""
    return extend(model, params, token_BL, count, cache)


# The cache is donated: each call extends it in place instead of copying 2 Y B M K H elements.
@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def write_tokens(
    model: Transformer,
    sampler: TokenSampler,
    params: Params,
    logits_BV: Float[Array, "B V"],
    cache: KVCache,
    key: Key[Array, ""],
) -> tuple[Int[Array, "L B"], Float[Array, "B V"], KVCache]:
    """Draws the next `DECODE_CHUNK` tokens; returns them, the next logits and the cache."""

    def step(carry: tuple[Array, KVCache], _: None) -> tuple[tuple[Array, KVCache], Array]:
        logits_BV, cache = carry
        # Folded with the position, so that the token does not depend on the chunk size.
        token_B = sampler.draw(logits_BV, jax.random.fold_in(key, cache.length))
        return extend(model, params, token_B[:, None], jnp.int32(1), cache), token_B

    (logits_BV, cache), tokens_LB = jax.lax.scan(step, (logits_BV, cache), length=DECODE_CHUNK)
    return tokens_LB, logits_BV, cache
