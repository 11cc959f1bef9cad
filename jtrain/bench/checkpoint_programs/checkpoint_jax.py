"""Saves by jtrain, or by Orbax with its defaults, beside steps on the CPU: one side of `bench checkpoint`."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import checkpoint_measure

# Before jax is imported: the benchmark is of host memory and disk alone.
os.environ["JAX_PLATFORMS"] = "cpu"


def main() -> None:
    """Measures one program and prints its figures."""
    args = checkpoint_measure.arguments()
    if args.program == "jtrain":
        from jtrain.runtime.platform import keep_freed_memory

        keep_freed_memory()  # as every run of jtrain on a CPU does
    import jax
    import jax.numpy as jnp
    import numpy as np

    # The same shapes as torch's program gets.
    shapes = checkpoint_measure.shapes(args.size)
    random = np.random.default_rng(0)
    state: dict[str, Any] = {
        kind: {
            name: jnp.array(random.standard_normal(shape, np.float32) * checkpoint_measure.STDDEV)
            for name, shape in shapes.items()
        }
        for kind in ("params", "mu")
    }
    # A second moment is not negative.
    state["nu"] = jax.tree.map(jnp.square, state["mu"])
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    matrix = jnp.full((checkpoint_measure.MATMUL,) * 2, 1e-3, jnp.float32)

    def update(state: Any, matrix: jax.Array) -> Any:
        product = jax.lax.fori_loop(0, checkpoint_measure.MATMULS, lambda _, x: (x @ matrix) * 1e-3, matrix)
        # A number of the product enters the update, so that XLA cannot drop the matmuls.
        gradient = product[0, 0]
        mu = jax.tree.map(lambda m, p: 0.9 * m + 0.1 * (p + gradient), state["mu"], state["params"])
        nu = jax.tree.map(lambda v, p: 0.95 * v + 0.05 * p**2, state["nu"], state["params"])
        # Without it, XLA keeps old moments in temporaries of 0.2 states, and the heap grows with them.
        mu, nu = jax.lax.optimization_barrier((mu, nu))
        params = jax.tree.map(lambda p, m, v: p - 1e-6 * m / (jnp.sqrt(v) + 1e-8), state["params"], mu, nu)
        return {"params": params, "mu": mu, "nu": nu}

    # Donated, as in the train step: a save must cope with buffers that the next step reuses.
    compiled = jax.jit(update, donate_argnums=0)

    def step() -> None:
        nonlocal state
        state = jax.block_until_ready(compiled(state, matrix))

    saver = {"jtrain": _jtrain, "orbax": _orbax, "orbax_fsync": _orbax_fsync}[args.program]
    save, durable, ended, close = saver(args.folder)
    checkpoint_measure.measure(
        state_bytes=state_bytes,
        step=step,
        save=lambda number: save(number, state),
        durable=durable,
        ended=ended,
        saves=args.saves,
    )
    close()


def _jtrain(folder: Path) -> tuple[Any, ...]:
    from jtrain.checkpoint import Checkpoints, CheckpointSpec

    # One checkpoint is kept, as in the other programs, so that deleting costs all of them the same.
    checkpoints = Checkpoints(folder, CheckpointSpec(keep_last=1))
    checkpoints.prepare()

    def ended() -> bool:
        task = checkpoints._task
        return task is None or task.ended

    return (
        lambda number, state: checkpoints.save(number, state, {}, ""),
        lambda number: (checkpoints.folder / str(number)).exists(),
        ended,
        checkpoints.close,
    )


def _orbax(folder: Path) -> tuple[Any, ...]:
    import shutil

    import orbax.checkpoint as ocp

    writer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())

    def save(number: int, state: Any) -> None:
        writer.save((folder / str(number)).absolute(), args=ocp.args.StandardSave(state))

    def durable(number: int) -> bool:
        return (folder / str(number)).exists()

    def ended() -> bool:
        # Orbax offers no public question for the end of its background work.
        running = writer._async_manager._thread
        if running is not None and running.is_alive():
            return False
        for older in sorted(folder.iterdir(), key=lambda path: int(path.name))[:-1]:
            shutil.rmtree(older)  # keeps one, as jtrain does here
        return True

    folder.mkdir(parents=True, exist_ok=True)
    return save, durable, ended, writer.close


def _orbax_fsync(folder: Path) -> tuple[Any, ...]:
    """Orbax, and a thread that forces all of a finished checkpoint to the disk: TensorStore forces only the
    arrays.
    """
    save_orbax, named, ended_orbax, close = _orbax(folder)
    forced: list[threading.Thread] = []

    def force(number: int) -> None:
        while not named(number):
            time.sleep(0.002)  # Orbax tells nobody of the final name
        # Folders too: a file's name is in its folder.
        for path in (folder, folder / str(number), *(folder / str(number)).rglob("*")):
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)

    def save(number: int, state: Any) -> None:
        save_orbax(number, state)
        forced[:] = [threading.Thread(target=force, args=[number])]
        forced[0].start()

    def durable(number: int) -> bool:
        return named(number) and bool(forced) and not forced[0].is_alive()

    return save, durable, lambda: not forced[0].is_alive() and ended_orbax(), close


if __name__ == "__main__":
    main()
