"""Measurements of every step: times, stragglers, recompilations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.telemetry.recompiles import Compilations, CompileSeconds, changes, signature
from jtrain.telemetry.step_timer import StepTimes, device_scores, host_scores


def test_percentiles_are_of_the_recent_steps() -> None:
    """Percentiles equal numpy's over the last thousand steps; older steps are dropped."""
    times = StepTimes()
    assert times.percentiles() is None
    times.add(0.5)
    assert times.percentiles() == (0.5, 0.5, 0.5)
    drawn = np.random.default_rng(0).exponential(size=2500)
    for seconds in drawn:
        times.add(float(seconds))
    want = np.percentile(drawn[-1000:], (50, 90, 99))
    assert times.percentiles() == pytest.approx(tuple(want))
    assert times.percentiles() != pytest.approx(tuple(np.percentile(drawn, (50, 90, 99))))


def test_a_slow_host_is_found_by_what_it_does_itself() -> None:
    """In steps of 200 ms one host works 60 ms instead of 10: without that, a step would take 3/4 of its
    time.
    """
    assert host_scores([0.010, 0.060, 0.012], 0.200) == pytest.approx(
        {"host 0": 1.0, "host 1": 0.75, "host 2": 0.99}
    )
    assert host_scores([0.001], 0.2) == {"host 0": 1.0}
    assert host_scores([0.0, 5.0], 1.0)["host 1"] == 0.0


def test_a_slow_device_is_found_by_its_clock() -> None:
    """Half of the highest clock gives 0.5; devices with an unknown clock or a clock of zero are left out."""
    assert device_scores([1980.0, None, 990.0]) == {"device 0": 1.0, "device 2": 0.5}
    assert device_scores([None, None]) == {}
    assert device_scores([0.0, 0.0]) == {}


def test_a_recompile_names_the_argument_that_changed() -> None:
    """The message names the leaf, its old and its new type; a call that compiles nothing gives none."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    function = jax.jit(lambda state, batch: state["w"] * batch.sum(), donate_argnums=0)
    step = Compilations(function, ("state", "batch"))

    def call(batch: jax.Array, dtype: str = "float32") -> str | None:
        state = {"w": jnp.ones(16, dtype)}
        function(state, batch)
        return step.called(state, batch)

    assert call(jax.device_put(jnp.ones((8, 4)), split)) is None
    assert call(jax.device_put(jnp.zeros((8, 4)), split)) is None
    assert step.count == 1
    said = call(jax.device_put(jnp.ones((8, 2)), split))
    assert said == "compiled again (program 2 of this run), changed: batch: shape [8, 4] -> [8, 2]"
    said = call(jax.device_put(jnp.ones((8, 2)), split), "bfloat16")
    assert said is not None
    assert said.endswith("changed: state['w']: dtype float32 -> bfloat16")
    said = call(jax.device_put(jnp.ones((8, 2)), whole), "bfloat16")
    assert said is not None
    assert said.endswith("changed: batch: sharding P('data',) of data=8, device -> P() of data=8, device")
    assert step.count == 4


def test_leaves_that_come_and_go_are_changes_too() -> None:
    """More than three changes are counted, not listed."""
    before = signature(({"a": jnp.ones(2), "b": np.zeros((1, 2), np.int32)},), ("state",))
    after = signature(({"a": jnp.ones(2), "c": 3},), ("state",))
    assert changes(before, after) == [
        "state['b']: gone",
        "state['c']: new, shape [], dtype int, sharding none, on the host",
    ]
    function = jax.jit(lambda state: sum(jax.tree.leaves(state)))
    step = Compilations(function, ("state",))
    said = None
    for size in (3, 4):
        state = {name: jnp.ones(size) for name in "abcde"}
        function(state)
        said = step.called(state)
    assert said is not None
    assert said.endswith("state['c']: shape [3] -> [4] and 2 more")


def test_compiling_is_timed_while_somebody_listens() -> None:
    """The callback runs once per program, and not after the `with` block."""
    heard: list[float] = []
    with CompileSeconds(heard.append):
        jax.jit(lambda x: x * 3 + 1)(np.ones(7, np.float32))
    assert len(heard) == 1
    assert 0 < heard[0] < 60
    jax.jit(lambda x: x * 5 + 2)(np.ones(7, np.float32))
    assert len(heard) == 1
