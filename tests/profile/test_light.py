"""What every step is measured by."""

import mmap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.profile import light
from jtrain.profile.light import Compilations, CompileSeconds, StepTimes, changes, device_scores, host_scores, signature


def test_percentiles_are_of_the_recent_steps() -> None:
    """Those of numpy over the last thousand; older ones are forgotten."""
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
    """Of 200 ms steps, one host works 60 ms instead of 10 itself: without that a step would take 3/4 of its time."""
    assert host_scores([0.010, 0.060, 0.012], 0.200) == pytest.approx({"host 0": 1.0, "host 1": 0.75, "host 2": 0.99})
    assert host_scores([0.001], 0.2) == {"host 0": 1.0}
    assert host_scores([0.0, 5.0], 1.0)["host 1"] == 0.0


def test_a_slow_device_is_found_by_its_clock() -> None:
    """Half the clock of the quickest is 0.5; a device that says nothing is left out, as is a clock of zero."""
    assert device_scores([1980.0, None, 990.0]) == {"device 0": 1.0, "device 2": 0.5}
    assert device_scores([None, None]) == {}
    assert device_scores([0.0, 0.0]) == {}


def test_a_recompile_names_the_argument_that_changed() -> None:
    """Which leaf, from what to what; a call that compiles nothing says nothing."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    step = Compilations(jax.jit(lambda state, batch: state["w"] * batch.sum(), donate_argnums=0), ("state", "batch"))

    def call(batch: jax.Array, dtype: str = "float32") -> str | None:
        return step({"w": jnp.ones(16, dtype)}, batch)[1]

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
    """And many changes are counted, not listed."""
    before = signature(({"a": jnp.ones(2), "b": np.zeros((1, 2), np.int32)},), ("state",))
    after = signature(({"a": jnp.ones(2), "c": 3},), ("state",))
    assert changes(before, after) == [
        "state['b']: gone",
        "state['c']: new, shape [], dtype int, sharding none, on the host",
    ]
    step = Compilations(jax.jit(lambda state: sum(jax.tree.leaves(state))), ("state",))
    step({name: jnp.ones(3) for name in "abcde"})
    _, said = step({name: jnp.ones(4) for name in "abcde"})
    assert said is not None
    assert said.endswith("state['c']: shape [3] -> [4] and 2 more")


def test_compiling_is_timed_while_somebody_listens() -> None:
    """Once for each program, not after the end."""
    heard: list[float] = []
    with CompileSeconds(heard.append):
        jax.jit(lambda x: x * 3 + 1)(np.ones(7, np.float32))
    assert len(heard) == 1
    assert 0 < heard[0] < 60
    jax.jit(lambda x: x * 5 + 2)(np.ones(7, np.float32))
    assert len(heard) == 1


def test_the_memory_of_a_process_is_counted() -> None:
    """64 MiB more, of which every page was written; of the system, for malloc may give back what it holds already."""
    before = light.host_rss_mib()
    assert before is not None
    more = np.frombuffer(mmap.mmap(-1, 64 << 20), np.uint8)
    more[:] = 1
    after = light.host_rss_mib()
    assert after is not None
    assert 60 < after - before < 80
    assert more[-1] == 1
