"""The branches that only accelerators take, executed on a CPU and compared with the same references as its
own.
"""

import ast
import contextlib
import functools
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from tests.kernels import (
    test_attention,
    test_elementwise,
    test_grouped_matmul,
    test_linear,
    test_linear_cross_entropy,
    test_linear_fp8,
)
from tests.kernels.overlap import test_fp8
from tests.model import test_moe

ROOT = Path(__file__).parents[1]


KERNELS = "kernels/jtrain_kernels/"
BY_PLATFORM = KERNELS + "platforms.py"


class Site(NamedTuple):
    """Call of `by_platform`, or of the function of JAX that it calls: its file, the outermost function around it,
    its lines and branches.
    """

    file: str
    function: str
    first: int
    last: int
    branches: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.file}:{self.function}"

    def holds(self, frame: types.FrameType) -> bool:
        """True if a frame of the call stack is at this site."""
        in_file = frame.f_code.co_filename == str(ROOT / self.file)
        return in_file and self.first <= frame.f_lineno <= self.last

    @property
    def only_elsewhere(self) -> tuple[str, ...]:
        """Branches that a CPU does not take; `default` is the CPU's if none is named `cpu`."""
        own = "cpu" if "cpu" in self.branches else "default"
        return tuple(branch for branch in self.branches if branch != own)


_CALLED = re.compile(r"\b(by_platform|platform_dependent)\b")


def _last_name(function: ast.expr) -> str:
    """The `c` of `a.b.c`; empty for an expression without a name."""
    return getattr(function, "attr", getattr(function, "id", ""))


def sites_of(text: str, file: str) -> list[Site]:
    """All sites in a file's text, by its syntax tree."""
    found: list[Site] = []
    # Each worker reads all files when it collects the tests: parsing those without a name of the functions took 5 s.
    if not _CALLED.search(text):
        return found
    for outer in ast.parse(text).body:
        for node in ast.walk(outer):
            if isinstance(node, ast.Call) and _CALLED.fullmatch(_last_name(node.func)):
                # `read` names the branch for a reader of a trace.
                branches = tuple(keyword.arg or "**" for keyword in node.keywords if keyword.arg != "read")
                where = getattr(outer, "name", "module"), node.lineno, node.end_lineno or node.lineno
                found.append(Site(file, *where, branches))
    return found


@functools.cache
def sites() -> list[Site]:
    """All sites of the two packages."""
    files = sorted(path for package in ("jtrain", "kernels") for path in (ROOT / package).rglob("*.py"))
    found = [
        site
        for path in files
        if path != ROOT / BY_PLATFORM  # the call there is reached by all other sites
        for site in sites_of(path.read_text(), path.relative_to(ROOT).as_posix())
    ]
    assert found, "nothing to test"
    return found


TO_AND_FROM_HEADS = tuple(
    functools.partial(test_linear.test_linear_contracts_the_last_dimensions, "float32", *shape)
    for shape in (((2, 8, 4), (4, 6), 1), ((2, 8, 4), (4, 3, 5), 1), ((2, 8, 3, 5), (3, 5, 4), 2))
)
CHECKS: dict[str, tuple[Callable[[], None], ...]] = {
    "jtrain/model/expert_dispatch.py:_ragged": (
        functools.partial(test_moe.test_rows_reach_their_experts_and_come_back, test_moe.COUNTS["anything"]),
    ),
    KERNELS + "overlap/fp8.py:_exact": (
        functools.partial(test_fp8.test_they_are_the_plain_collectives_in_8_bits, test_fp8.PLANS[0], False),
    ),
    KERNELS + "attention/chunks.py:_on_each_platform": (
        functools.partial(test_attention.test_a_window_is_its_formula_in_any_chunk, "float32", 4, 6),
    ),
    KERNELS + "fp8/api.py:_backward": (
        functools.partial(
            test_linear_fp8.test_value_and_gradients_are_those_of_operands_rounded_by_ml_dtypes,
            *test_linear_fp8.SHAPES[0],
        ),
    ),
    KERNELS + "fp8/api.py:_cast_once": (
        functools.partial(
            test_linear_fp8.test_value_and_gradients_are_those_of_operands_rounded_by_ml_dtypes,
            *test_linear_fp8.SHAPES[0],
        ),
    ),
    KERNELS + "linear/api.py:_xla": TO_AND_FROM_HEADS,
    KERNELS + "linear/api.py:_dx": TO_AND_FROM_HEADS,
    KERNELS + "linear/api.py:_dkernel": (
        *TO_AND_FROM_HEADS,
        test_linear.test_a_float32_kernel_under_bfloat16_activations_gets_a_float32_gradient,
    ),
    KERNELS + "rms_norm/api.py:_gradients": (
        functools.partial(test_elementwise.test_rms_norm_is_its_formula, "float32"),
    ),
    KERNELS + "linear_cross_entropy/api.py:_forward": (
        functools.partial(
            test_linear_cross_entropy.test_the_loss_and_its_gradients_are_those_of_all_logits,
            "float32",
            7,
            0.1,
        ),
    ),
    KERNELS + "grouped_matmul/api.py:_product": (
        functools.partial(
            test_grouped_matmul.test_each_group_of_rows_has_its_matrix,
            "float32",
            test_grouped_matmul.GROUPS["rows of no group"],
        ),
    ),
    KERNELS + "grouped_matmul/api.py:_kernel_gradient": (
        functools.partial(
            test_grouped_matmul.test_each_group_of_rows_has_its_matrix,
            "float32",
            test_grouped_matmul.GROUPS["empty, one row, blocks and a bit"],
        ),
        test_grouped_matmul.test_a_float32_kernel_under_bfloat16_rows_gets_a_float32_gradient,
    ),
}
"""Site -> tests of its op, which compare values and gradients with float64 or, for copied rows, bit by
bit."""


@contextlib.contextmanager
def on_platform(platform: str) -> Iterator[set[tuple[str, str]]]:
    """Takes the branch of a platform at every site, and records (site, branch) of those that are taken.

    A platform that no site names takes `default`.
    """
    taken: set[tuple[str, str]] = set()

    def chosen(*arguments: Any, default: Any = None, **branches: Any) -> Any:
        caller = sys._getframe(1)
        # Behind `by_platform` and the checks of its arguments stands the site.
        while not (found := [site for site in sites() if site.holds(caller)]):
            assert caller.f_back is not None
            caller = caller.f_back
        (site,) = found
        branch = platform if platform in branches else "default"
        taken.add((site.name, branch))
        return (branches | {"default": default})[branch](*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "platform_dependent", chosen)
        patch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
        yield taken


def ragged_all_to_all(
    operand: Any, output: Any, input_offsets: Any, send_sizes: Any, output_offsets: Any, recv_sizes: Any,
    *, axis_name: str,
) -> Any:  # fmt: skip
    """`jax.lax.ragged_all_to_all`, which XLA:CPU does not have, in plain collectives, from the words of its
    docstring.

    Rows that nobody writes keep their value in `output`. Sizes that differ between sender and receiver, and
    slices beyond the end of an array, are undefined in XLA: here everything becomes NaN.
    """
    each = input_offsets.shape[0] // jax.lax.axis_size(axis_name)
    to_receivers = functools.partial(
        jax.lax.all_to_all, axis_name=axis_name, split_axis=0, concat_axis=0, tiled=True
    )
    first, count, place = map(to_receivers, (input_offsets, send_sizes, output_offsets))
    senders = jax.lax.all_gather(operand, axis_name)
    undefined = jnp.any(count != recv_sizes)
    undefined |= jnp.any(first + count > operand.shape[0]) | jnp.any(place + count > output.shape[0])
    row = jnp.arange(operand.shape[0])
    for i in range(input_offsets.shape[0]):
        arrived = senders[i // each, jnp.minimum(first[i] + row, row.size - 1)]
        output = output.at[jnp.where(row < count[i], place[i] + row, output.shape[0])].set(
            arrived, mode="drop"
        )
    return jnp.where(undefined, jnp.nan, output)


ELSEWHERE = [(site, branch) for site in sites() for branch in site.only_elsewhere]


@pytest.mark.parametrize(("site", "branch"), ELSEWHERE, ids=lambda value: getattr(value, "name", value))
def test_an_accelerators_branch_computes_what_the_cpus_does(site: Site, branch: str) -> None:
    """Every branch of every site, found by its syntax, passes the tests of its op; a new site needs an entry
    above.
    """
    with on_platform("elsewhere" if branch == "default" else branch) as taken:
        for check in CHECKS[site.name]:
            taken.clear()
            check()
            assert (site.name, branch) in taken, f"{check} does not reach it"


def test_all_sites_are_found() -> None:
    """The list of sites is that of the checks; methods, closures and calls over several lines are found."""
    assert {site.name for site in sites()} == set(CHECKS)
    assert len(sites()) == len(CHECKS), (
        "two calls in one function: the checks of one would pass for the other"
    )
    text = (
        "class A:\n  def f(self):\n    return lambda x: lax.platform_dependent(\n      x, tpu=g, default=h)\n"
    )
    assert sites_of(text, "a.py") == [Site("a.py", "A", 3, 4, ("tpu", "default"))]


def test_the_emulated_exchange_gives_the_example_of_jaxs_documentation() -> None:
    """Two devices as documented, with an output that is not zero; sizes that do not match give NaN."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))

    def run(recv: list[float]) -> list[list[float]]:
        operand, output = jnp.asarray([1.0, 2, 2, 3, 4, 0]), jnp.full(8, 9.0)
        rest = ([0, 1, 0, 1], [1, 2, 1, 1], [0, 0, 1, 2], recv)
        arrays = (operand, output, *(jnp.asarray(a, jnp.int32) for a in rest))
        spec = PartitionSpec("x")
        local = functools.partial(ragged_all_to_all, axis_name="x")
        mapped = jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 6, out_specs=spec, check_vma=False)
        return np.asarray(jax.jit(mapped)(*arrays)).reshape(2, 4).tolist()

    assert run([1, 1, 2, 1]) == [[1, 3, 9, 9], [2, 2, 4, 9]]
    assert np.isnan(run([1, 2, 2, 1])[0]).all()
