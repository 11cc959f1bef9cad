"""Attention compiled for chips that are not present: the program contains the kernel that was asked for."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bench.kernel_bytes import attention_hlo, moved_bytes, needed_bytes, score_arrays
from jtrain.hlo.memory_traffic import written_arrays
from jtrain.hlo.traffic import overlap, traffic
from jtrain.plan.compile.compiled_step import topology_devices
from jtrain_kernels import compat, cost, device, registry
from jtrain_kernels.attention import tokamax
from jtrain_kernels.attention.context import RowSplit, context_attention
from tests.kernels.test_cost import CONFIGS, of_config
from tests.processes import program, run_together

pytestmark = pytest.mark.aot

N, K, H = 8, 2, 128


def lowered(
    topology: str, context: int, kernel: str, *, positions: int = 1024, window: int | None = None
) -> Any:
    """Lowered value and gradients for rows of `positions` on each of `context` devices, with segments."""
    devices = topology_devices(topology)[:context]
    mesh = Mesh(np.array(devices), ("context",), axis_types=(AxisType.Auto,))
    spec = P(None, "context")

    def local(q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array) -> Any:
        def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            split = RowSplit(context)
            y = context_attention(q, k, v, segment, split=split, chunk=512, window=window)
            return jnp.sum(y.astype(jnp.float32))

        return jax.value_and_grad(total, argnums=(0, 1, 2))(q, k, v)

    def shape(*dims: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            (1, positions * context, *dims), dtype, sharding=NamedSharding(mesh, spec)
        )

    fn = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=(P(), spec), check_vma=False)
    target = device.from_name(topology.partition(":")[0])
    with registry.on(target, forced={"attention": kernel}), compat.lowering_for(mesh, target):
        return jax.jit(fn).lower(shape(N, H), shape(K, H), shape(K, H), shape(dtype=jnp.int32))


@pytest.mark.parametrize(
    ("topology", "context", "window"),
    [("v5p:2x2x1", 1, 300), pytest.param("v6e:2x2", 4, None, marks=pytest.mark.slow)],
)
def test_splash_compiles_for_tpus(topology: str, context: int, window: int | None) -> None:
    """With a window on one device, and in a ring, both passes are kernels with segments, without plain JAX's
    scores.
    """
    with compat.no_compile_cache():
        compiled = lowered(topology, context, "splash", window=window).compile()
    text = compiled.as_text()
    for name in ("splash_mha_fwd_segmented_residuals", "splash_mha_dq_segmented", "splash_mha_dkv_segmented"):
        assert name in text
    assert (" collective-permute" in text) == (context > 1)
    # A float32 block of scores of one head with 1024 queries and keys would be 4 MiB, for each of 8 heads.
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * 2**20


def check_no_scores(chip: str, config: str) -> None:
    """Attention and its gradients at a config's shape write no array of scores, and bytes that grow as its
    arrays do.

    4 times the arrays: on TPUs rows of log-partitions fill 128 lanes, which is as much as a head of 128 in
    float32. Heads of less than 64 are padded to it.
    """
    avals = of_config(config)
    hlo = attention_hlo(chip, avals)
    assert re.search("mosaic_gpu|tpu_custom_call", hlo)
    query, key = cost.array(avals, "q_BLNH"), cost.array(avals, "k_BMKH")
    # A length that is also another dimension says nothing, as in the tiny configs.
    if query.shape[1] not in {query.shape[2] * query.shape[3], key.shape[2] * key.shape[3]}:
        assert score_arrays(hlo, avals) == (), (chip, config)
        assert moved_bytes(hlo) <= 4 * max(1, 64 / query.shape[3]) * needed_bytes(avals), (chip, config)


def test_no_scores_are_in_memory() -> None:
    """For an H100 at the shape of llama1b; plain XLA at 1/8 of its length shows that the check can fail."""
    check_no_scores("h100", "llama1b")
    text = lowered("h200:1", 1, "xla", positions=512).compile().as_text()
    assert any(dims.count(512) > 1 for _, dims in written_arrays(text))


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("chip", ("h100", "h200", "v5e", "v5p", "v6e", "tpu7x"))
def test_no_config_has_scores_in_memory(chip: str, config: str) -> None:
    """Every shipped config on every chip whose compiler is at hand; tiny shapes are compiled only."""
    check_no_scores(chip, config)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
def test_no_config_has_scores_in_memory_on_a_b200(config: str) -> None:
    """In a process of its own, because Mosaic compiles for one generation of GPUs per process."""
    [ended] = run_together([program(__file__, "check_no_scores", "b200", config)], [{}])
    assert ended.code == 0, ended.errors[-2000:]


def test_tokamax_has_the_blocks_that_an_h100_ran_fastest() -> None:
    """The first candidate of each head size on Hopper: stages of the backward kernels, and blocks of forward
    keys.
    """
    first = {}
    for head_dim in (16, 64, 128, 256):
        query = jax.ShapeDtypeStruct((1, 128, 8, head_dim), jnp.bfloat16)
        avals = {"q_BLNH": query, "v_BMKP": query}
        candidates = tokamax.configs(device.from_name("h100"), avals)
        first[head_dim] = candidates[0]["stages_backward"], candidates[0]["block_kv"]
        assert len({tuple(one.items()) for one in candidates}) == len(candidates), (
            "no candidate is timed twice"
        )
        large = [one for one in candidates if one["block_q_dkv"] == one["block_q_dq"] == 128]
        assert len(large) == (head_dim <= 64)
    assert first == {16: (2, 128), 64: (2, 128), 128: (3, 128), 256: (1, 64)}


def test_tokamax_compiles_for_hopper() -> None:
    """Mosaic GPU kernels: one forward, and two backward, for queries and for keys."""
    with compat.no_compile_cache():
        compiled = lowered("h200:1", 1, "tokamax", positions=512).compile()
    assert len(re.findall(r"custom_call_target=\"mosaic_gpu", compiled.as_text())) >= 3


def test_cudnn_is_called_with_the_segments() -> None:
    """In both passes the call has a mask of all queries and keys. Only lowered, because compiling needs cuDNN
    itself.

    A call without `Bias` in its name would ignore the segments (MaxText issue 4478).
    """
    text = lowered("h200:1", 1, "cudnn", window=300).as_text()
    calls = set(re.findall(r"__cudnn\$\w+", text))
    assert calls == {"__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"}
    assert "tensor<1x1x1024x1024xbf16>" in text


@pytest.mark.slow
def test_a_ring_sends_while_it_computes() -> None:
    """On 4 H200 the scheduler puts matmuls between start and done of hops with at least nine tenths of the
    bytes.
    """
    with compat.no_compile_cache():
        text = lowered("h200:4", 4, "xla").compile().as_text()
    sent = overlap([t for t in traffic(text, {"context": 4}) if t.kind == "collective-permute"])
    assert sent.wire_bytes > 0
    assert sent.hidden_bytes >= 0.9 * sent.wire_bytes
