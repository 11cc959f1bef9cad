"""Training command with one planted fault: `python -m jtrain.bench.fault_trials.planted PLANT --config=...`.

PLANT is the JSON of a `Plant`. The fault is in the memory of a device (an array of the state changes between
two steps, as by a broken memory cell), or in the arithmetic of a step. The command is otherwise `python -m
jtrain.launch`.
"""

import dataclasses
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

MODULE = "jtrain.bench.fault_trials.planted"


@dataclasses.dataclass(frozen=True)
class Plant:
    """Fault to plant, and when.

    kind: `nan` or `large`: a number of a weight becomes NaN or 1e4 on every device that holds it; `flip`: one
      bit of an array of the state flips on one device; `gradient`: the gradients of the step are NaN, each
      time it is computed; `update`: the same of its learning rate, so that only the new weights show it;
      `left_out`: the reference of these two, a run in which the update of the step is not applied.
    step: the fault is there when this step begins.
    process: the one whose device's memory `flip` changes.
    seed: draws array, position, bit and device.
    marker: file that marks the fault as done; afterwards nothing more happens, also in later attempts.
    """

    kind: Literal["nan", "large", "flip", "gradient", "update", "left_out"]
    step: int
    process: int = 0
    seed: int = 0
    marker: str | None = None

    @property
    def module(self) -> tuple[str, str]:
        """Words of the command before the arguments of the training."""
        return MODULE, json.dumps(dataclasses.asdict(self))


class PlantedStep:
    """The jitted train step, with the fault before or after its call; everything else is that of the step."""

    def __init__(self, step: Any, plant: Plant) -> None:
        self._step = step
        self._plant = plant

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def __call__(self, state: Any, batch: Any, *more: Any) -> Any:
        import jax
        import jax.numpy as jnp
        import numpy as np

        from jtrain.step.checksums import METRIC, summed_arrays

        plant = self._plant
        # state.step counts completed updates, so the step that begins now is one more.
        is_fault_step = int(np.asarray(state.step.addressable_data(0))) + 1 == plant.step
        if is_fault_step and plant.kind == "left_out":
            # Each time that the step is computed, without `_first_time`: so are `gradient` and `update`,
            # which this run is compared with. A copy, because the step donates its state.
            state_before = jax.tree.map(jnp.copy, state)
            new, metrics = self._step(state, batch, *more)
            if METRIC in metrics:
                # [devices, 2, arrays]: sums of the state that the step was given and of the one that it
                # returned. The next step is given the old arrays, so the sums must say that they were
                # returned; otherwise the check of the checksums would report a flipped bit.
                sums = metrics[METRIC]
                is_unchanged = [name != "step" for name, _ in summed_arrays(state_before)]
                metrics = metrics | {
                    METRIC: sums.at[:, 1].set(jnp.where(jnp.asarray(is_unchanged), sums[:, 0], sums[:, 1]))
                }
            # The update is left out, but the step is counted: the next batch follows.
            return dataclasses.replace(state_before, step=new.step), metrics
        if is_fault_step and plant.kind in ("nan", "large", "flip") and _first_time(plant):
            state = change_element(state, plant)
        return self._step(state, batch, *more)


def _first_time(plant: Plant) -> bool:
    """True at the first call in all attempts; each process marks it for itself."""
    import jax

    if plant.marker is None:
        return True
    try:
        # exist_ok=False: a later attempt finds the file and plants nothing.
        Path(f"{plant.marker}.{jax.process_index()}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def change_element(state: Any, plant: Plant) -> Any:
    """Returns the state with one element of one array changed, on one device or on all that hold it."""
    import jax

    rng = random.Random(plant.seed)
    flip = plant.kind == "flip"
    branches = [state.params, state.opt_state] if flip else [state.params]
    # Floats only: a flipped bit of a counter is another kind of fault.
    leaves = [leaf for leaf in jax.tree.leaves(branches) if leaf.dtype.kind == "f" and leaf.size]
    array = rng.choice(leaves)
    # Sorted, so that all processes draw the same device.
    devices = sorted(array.sharding.device_set, key=lambda device: device.id)
    fraction, bit = rng.random(), rng.randrange(array.dtype.itemsize * 8)
    mine = [device for device in devices if device.process_index == plant.process]
    hit = {rng.choice(mine)} if flip else set(devices)
    buffers = [
        jax.device_put(_with_fault(shard.data, plant.kind, fraction, bit), shard.device)
        # Other shards stay the same buffers; the new array is made of them without a copy.
        if shard.device in hit
        else shard.data
        for shard in array.addressable_shards
    ]
    broken = jax.make_array_from_single_device_arrays(array.shape, array.sharding, buffers)
    names = [str(device.id) for device in sorted(hit, key=lambda device: device.id)]
    print(f"planted: {plant.kind} before step {plant.step}, devices={','.join(names)}", flush=True)
    return jax.tree.map(lambda leaf: broken if leaf is array else leaf, state)


def _with_fault(shard: Any, kind: str, fraction: float, bit: int) -> Any:
    import numpy as np

    data = np.array(shard)
    flat = data.reshape(-1)
    index = int(fraction * flat.size)
    if kind == "flip":
        # Bytes of the element, then the bit in its byte.
        flat.view(np.uint8)[index * data.itemsize + bit // 8] ^= np.uint8(1 << bit % 8)
    else:
        flat[index] = {"nan": float("nan"), "large": 1e4}[kind]
    return data


def _nan_arithmetic(*, gradient: int, update: int) -> None:
    """Makes gradients or learning rate NaN in the step of that number, within the program; 0 is no step."""
    import jax
    import jax.numpy as jnp

    from jtrain.optim import Optimizer

    begin = Optimizer.begin

    def planted(self: Any, grads: Any, step: Any, *more: Any, **named: Any) -> Any:
        bad_grads = jax.tree.map(
            # Also in the reference, with step 0: its program differs in a constant only, and rounds alike.
            lambda grad: jnp.where(step + 1 == gradient, jnp.asarray(jnp.nan, grad.dtype), grad),
            grads,
        )
        scalars = begin(self, bad_grads, step, *more, **named)
        rate = jnp.where(step + 1 == update, jnp.nan, scalars.learning_rate)
        return dataclasses.replace(scalars, learning_rate=rate)

    name = "begin"  # the checker refuses an assignment to a method
    setattr(Optimizer, name, planted)


def plant_fault(plant: Plant) -> None:
    """Replaces the train step of the loop by one with the fault."""
    from jtrain.train import attempt

    make: Callable[..., Any] = attempt.make_train_step
    # The loop builds its step through this name.
    attempt.make_train_step = lambda *args, **named: PlantedStep(make(*args, **named), plant)
    if plant.kind in ("gradient", "update", "left_out"):
        planted = {name: plant.step if plant.kind == name else 0 for name in ("gradient", "update")}
        _nan_arithmetic(**planted)


def main(argv: Sequence[str]) -> int:
    """Plants the fault of the first argument and runs the training command of the others."""
    plant_fault(Plant(**json.loads(argv[0])))
    from jtrain.cli.launch import main as launch  # after the fault is planted

    return launch(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
