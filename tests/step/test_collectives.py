"""The collectives of the compiled step are those of the closed form, array by array and byte by byte."""

import collections
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from jtrain.hlo.traffic import traffic
from jtrain.layout.dims import Batch
from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.model.fp8_scaling import fp8_weights
from jtrain.model.param import map_params
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, build
from jtrain.pipeline.spec import PipelineSpec
from jtrain.plan.compile.compiled_step import executions_of_branch
from jtrain.plan.estimate.collectives import collectives
from jtrain.plan.job import Job
from jtrain.step.state import abstract_state
from jtrain.step.train_step import BATCH_SPEC, make_train_step
from tests.layouts import layout_from

MESHES = (dict(data=8), dict(replica=2, data=4), dict(data=4, tensor=2))
SIZES: dict[str, Any] = dict(
    num_layers=3, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=48, vocab_size=64
)
ROWS, COLS = 32, 16
WITHOUT_STAGES = PipelineSpec()
OPTIONS = {
    # XLA:CPU moves the gathers of embedding and unembedding out of the loop over microbatches; XLA:GPU leaves
    # them.
    "xla_disable_hlo_passes": "while-loop-invariant-code-motion",
    "xla_backend_optimization_level": 0,  # half the seconds: nothing here runs
}

type Table = dict[tuple[str, tuple[str, ...], int, str], tuple[int, int]]
"""(kind, axes, devices of a group, dtype) -> (arrays, bytes) per step and device."""

_HLO_DTYPES = {"float32": "f32", "bfloat16": "bf16", "int32": "s32", "uint32": "u32"}
_HLO_DTYPES |= {"float8_e4m3fn": "f8e4m3fn", "float8_e5m2": "f8e5m2"}


def compiled(
    axes: dict[str, int],
    sizes: dict[str, Any],
    rings: tuple[int, ...] = (),
    pipeline: PipelineSpec = WITHOUT_STAGES,
    **layout: Any,
) -> Table:
    mesh_spec = MeshSpec(**axes)
    mesh = make_mesh(mesh_spec, jax.devices()[: mesh_spec.size])
    model = Transformer(**sizes)
    infos = model.param_infos()
    lay = dataclasses.replace(layout_from(layout, mesh_spec, infos, pipeline=pipeline), rings=rings)
    optimizer = build(AdamW(peak_lr=1e-3), num_steps=10, params=map_params(lambda info: info, infos))
    ids = jax.ShapeDtypeStruct((ROWS, COLS), jnp.int32, sharding=NamedSharding(mesh, BATCH_SPEC))
    step: Any = make_train_step(model, optimizer, lay, mesh)
    lowered = step.lower(abstract_state(lay, optimizer, mesh), Batch(ids, ids, ids, ids))
    program = lowered.compile(compiler_options=OPTIONS)
    found = traffic(program.as_text(), mesh_spec.shape, functools.partial(executions_of_branch, lay))
    return {(t.kind, t.axes, t.group, t.dtype): (t.count, t.array_bytes) for t in found}


def predicted(
    axes: dict[str, int],
    sizes: dict[str, Any],
    rings: tuple[int, ...] = (),
    pipeline: PipelineSpec = WITHOUT_STAGES,
    **layout: Any,
) -> Table:
    model = Transformer(**sizes)
    lay = layout_from(layout, MeshSpec(**axes), model.param_infos(), pipeline=pipeline)
    lay = dataclasses.replace(lay, rings=rings)
    counts, sizes_ = collections.Counter(), collections.Counter()
    for c in collectives(Job(model, lay, AdamW(peak_lr=1e-3), ROWS, COLS)):
        key = c.kind, c.axes, c.group, _HLO_DTYPES[c.dtype]
        counts[key] += c.count
        sizes_[key] += c.array_bytes
    return {key: (counts[key], sizes_[key]) for key in counts}


# float32, because XLA:CPU widens bfloat16 collectives; tests/plan/compile/ has bfloat16 on a TPU and a GPU.
def layout_of(zero_stage: int, microbatches: int, **more: Any) -> dict[str, Any]:
    return dict(zero_stage=zero_stage, microbatches=microbatches, compute_dtype="float32") | more


def slow_if(condition: bool, *values: Any) -> Any:
    return pytest.param(*values, marks=[pytest.mark.slow] * condition)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", (1, 2))
@pytest.mark.parametrize("zero_stage", (0, 1, 2, 3))
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_compiled_collectives_are_the_closed_form(
    axes: dict[str, int], zero_stage: int, microbatches: int
) -> None:
    """Kinds, axes, dtypes, number of arrays and bytes, loops counted.

    Quick tests below have the same of a replicated and split step with a large vocabulary, and of a torus.
    """
    layout = layout_of(zero_stage, microbatches)
    got = compiled(axes, SIZES, **layout)
    assert got == predicted(axes, SIZES, **layout)
    assert sum(size for _, size in got.values()) > 0, "a parser that finds nothing would agree with nothing"


@pytest.mark.parametrize(
    ("axes", "tied"),
    [
        (dict(replica=2, data=2, tensor=2), True),
        *(slow_if(True, axes, tied) for axes in MESHES for tied in (False, True)),
    ],
    ids=str,
)
def test_a_large_vocabulary_comes_in_parts(axes: dict[str, int], tied: bool) -> None:
    """Three parts, which do not divide it, or two of each of two devices: gathered twice, gradients scattered
    once.
    """
    sizes = SIZES | dict(vocab_size=40_000, tie_embeddings=tied, num_layers=2)
    layout = layout_of(3, 2)
    got = compiled(axes, sizes, **layout)
    assert got == predicted(axes, sizes, **layout)
    assert sum(size for _, size in got.values()) > 0, "a parser that finds nothing would agree with nothing"


@pytest.mark.parametrize("splits", (slow_if(True, "data"), "context"))
def test_a_mixtures_collectives_are_the_closed_form(splits: str) -> None:
    """All but its rows', which XLA:CPU exchanges in equal blocks: `tests/plan/compile/test_compiled_step.py`
    has those.

    Of an expert's three axes the partitioner may sum a norm's scalar over two at once: 4 bytes each.
    """
    axes, sizes = (
        {splits: 2, "expert": 2, "tensor": 2},
        SIZES | dict(moe=MoESpec(num_experts=4, top_k=2), num_layers=2),
    )
    layout = layout_of(3, 2, remat="full")
    found, formula = compiled(axes, sizes, **layout), predicted(axes, sizes, **layout)
    rows, sums = ("all-to-all", "ragged-all-to-all"), [0, 0]
    got, want = {}, {}
    for index, (table, kept) in enumerate(((found, got), (formula, want))):
        for key, (count, size) in table.items():
            if (key[0], key[3]) == ("all-reduce", "f32"):
                sums[index] += size
            elif not (key[0] in rows and key[1] == ("expert",)):
                kept[key] = count, size
    assert got == want
    assert abs(sums[0] - sums[1]) <= 4 * 3 * 2 < sums[0]
    assert any(kind == "all-gather" and used == ("expert",) for kind, used, *_ in got)
    of_rows = ("tensor",) if splits == "data" else ("context", "tensor")
    assert ("all-reduce", of_rows, 2 ** len(of_rows), "s32") in got


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", (slow_if(True, 1), slow_if(True, 2), 3))
def test_along_a_torus_each_dimension_has_its_collective(zero_stage: int) -> None:
    """Three rings of two instead of one of eight: other arrays, and the same bytes on the wire."""
    layout, axes = layout_of(zero_stage, 2), dict(data=8)
    got = compiled(axes, SIZES, (2, 2, 2), **layout)
    assert got == predicted(axes, SIZES, (2, 2, 2), **layout)
    groups = {group for _, used, group, _ in got if used == ("data",)}
    assert 2 in groups

    def wire(rings: tuple[int, ...]) -> int:
        lay = layout_from(layout, MeshSpec(**axes), (model := Transformer(**SIZES)).param_infos())
        lay = dataclasses.replace(lay, rings=rings)
        return sum(c.wire_bytes for c in collectives(Job(model, lay, AdamW(peak_lr=1e-3), ROWS, COLS)))

    assert wire((2, 2, 2)) == wire(())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "layout"),
    [
        (dict(data=2, tensor=4), layout_of(0, 1)),
        (dict(data=2, tensor=4), layout_of(1, 2)),
        (dict(data=2, tensor=4), layout_of(2, 2, remat="full")),
        (dict(data=2, tensor=4), layout_of(3, 2)),
        (dict(context=2, tensor=4), layout_of(3, 2, remat="full")),
        (dict(context=2, tensor=4), layout_of(0, 1, context_attention="ulysses")),
    ],
    ids=str,
)
def test_shared_key_heads_are_exchanged_once_per_step(axes: dict[str, int], layout: dict[str, Any]) -> None:
    """Four devices of two heads: an all-to-all of each kernel and one of its gradient, however many
    microbatches.
    """
    sizes = SIZES | dict(num_heads=8)
    got = compiled(axes, sizes, **layout)
    assert got == predicted(axes, sizes, **layout)
    kernel = SIZES["num_layers"] * SIZES["d_model"] * SIZES["head_dim"] * 4
    over_data = axes.get("data", 1) if layout["zero_stage"] else 1
    assert got["all-to-all", ("tensor",), 4, "f32"] == (4, 4 * kernel // over_data)


KEPT = ("attention_q", "attention_k", "attention_v", "attention_out")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remat", "kept"), [slow_if(True, "none", ()), slow_if(True, "full", ()), ("named", KEPT)], ids=str
)
def test_overlapped_projections_permute_what_the_closed_form_says(remat: str, kept: tuple[str, ...]) -> None:
    """Byte by byte; in how many pieces is the kernels' choice.

    Of two devices a loop around the ring has one turn, and written out XLA joins what two of them send.
    """
    axes, layout = dict(tensor=4), layout_of(0, 2, tensor_overlap=True, remat=remat, remat_save=kept)
    got, want = (
        {key: size for key, (_, size) in table.items()}
        for table in (compiled(axes, SIZES, **layout), predicted(axes, SIZES, **layout))
    )
    assert got == want
    assert ("collective-permute", ("tensor",), 2, "f32") in got


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "kept"), [slow_if(True, "full", ()), ("named", KEPT)], ids=str)
def test_groups_of_sequences_gather_and_scatter_what_the_closed_form_says(
    remat: str, kept: tuple[str, ...]
) -> None:
    """As many bytes as without groups, in as many more arrays."""
    axes, layout = dict(tensor=4), layout_of(0, 2, sequence_groups=2, remat=remat, remat_save=kept)
    sizes = SIZES | dict(num_kv_heads=4)
    got = compiled(axes, sizes, **layout)
    assert got == predicted(axes, sizes, **layout)
    whole = predicted(axes, sizes, **{**layout, "sequence_groups": 1})
    assert {key: size for key, (_, size) in got.items()} == {key: size for key, (_, size) in whole.items()}
    assert got != whole


@pytest.mark.slow
@pytest.mark.parametrize("mode", ("fp8_current", "fp8_delayed"))
def test_overlapped_8_bit_projections_send_8_bits(mode: str) -> None:
    """What is gathered; partial sums travel as they are. And the largest numbers that a tensor is scaled by.

    XLA:CPU widens 8 bits to float16; `tests/step/test_fp8.py` has them on an H200.
    """
    fp8 = (("all_gather_matmul_fp8", "permute"), ("matmul_reduce_scatter_fp8", "permute"))
    axes, layout = (
        dict(tensor=4),
        layout_of(0, 2, tensor_overlap=True, remat="full", matmul_dtype=mode, kernels=fp8),
    )
    sizes = SIZES | dict(num_kv_heads=4)
    got, want = (
        {key: size for key, (_, size) in table.items()}
        for table in (compiled(axes, sizes, **layout), predicted(axes, sizes, **layout))
    )
    narrow = [want.pop(("collective-permute", ("tensor",), 2, dtype)) for dtype in ("f8e4m3fn", "f8e5m2")]
    assert narrow[0] == 3 * narrow[1] > 0, "x of four projections, twice of two; dy of the other two"
    want["collective-permute", ("tensor",), 2, "f16"] = 2 * sum(narrow)
    assert got == want


def test_zero_3_gathers_weights_in_8_bits_with_delayed_scaling() -> None:
    """Those of the layers' matrices, in half of the bytes that compute_dtype has; XLA:CPU widens them to
    float16.
    """
    axes, layout = dict(data=8), layout_of(3, 2, remat="full", matmul_dtype="fp8_delayed")
    got, want = compiled(axes, SIZES, **layout), predicted(axes, SIZES, **layout)
    count, size = want.pop(("all-gather", ("data",), 8, "f8e4m3fn"))
    matrices = sum(info.size for info in fp8_weights(Transformer(**SIZES).param_infos()))
    assert (count, size) == (2 * 2 * 7 * SIZES["num_layers"], 2 * 2 * matrices), "forward and backward, twice"
    want["all-gather", ("data",), 8, "f16"] = count, 2 * size
    assert got == want
