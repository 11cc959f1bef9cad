"""Saves by torch's `distributed.checkpoint.async_save` beside steps on the CPU: part of `bench checkpoint`.

Runs in an environment with torch; jtrain is not installed there.
"""

import os
import shutil
from concurrent.futures import Future
from typing import Any

import checkpoint_measure
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


def main() -> None:
    """Measures async_save with its defaults and prints the figures."""
    args = checkpoint_measure.arguments()
    # All cores, as XLA has for jtrain and Orbax.
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    args.folder.mkdir(parents=True, exist_ok=True)
    # DCP needs a process group, also for a single process.
    dist.init_process_group("gloo", init_method=f"file://{args.folder}/group", rank=0, world_size=1)
    shapes = checkpoint_measure.shapes(args.size)
    state = {
        kind: {name: torch.randn(shape) * checkpoint_measure.STDDEV for name, shape in shapes.items()}
        for kind in ("params", "mu")
    }
    # The same three arrays per parameter as the other programs, in the same dtype.
    state["nu"] = {name: mu**2 for name, mu in state["mu"].items()}
    state_bytes = sum(tensor.nbytes for kind in state.values() for tensor in kind.values())
    matrix = torch.full((checkpoint_measure.MATMUL,) * 2, 1e-3)

    def step() -> None:
        product = matrix
        for _ in range(checkpoint_measure.MATMULS):
            product = (product @ matrix) * 1e-3
        # A number of the product enters the update, so that nothing of it can be left out.
        gradient = product[0, 0]
        for name, mu in state["mu"].items():
            nu, param = state["nu"][name], state["params"][name]
            mu.mul_(0.9).add_(param, alpha=0.1).add_(0.1 * gradient)
            nu.mul_(0.95).addcmul_(param, param, value=0.05)
            param.addcdiv_(mu, nu.sqrt().add_(1e-8), value=-1e-6)

    running: list[Future[Any]] = []

    def save(number: int) -> None:
        # A reference to the earlier save would keep its copy of the state alive during this one.
        running.clear()
        running[:] = [dcp.async_save(state, checkpoint_id=args.folder / str(number))]

    def ended() -> bool:
        if not running[0].done():
            return False
        # Raises what the background thread has raised.
        running[0].result()
        saved = [path for path in args.folder.iterdir() if path.name.isdecimal()]
        for older in sorted(saved, key=lambda path: int(path.name))[:-1]:
            shutil.rmtree(older)  # keeps one, as jtrain does here
        return True

    checkpoint_measure.measure(
        state_bytes=state_bytes,
        step=step,
        save=save,
        durable=lambda _: bool(running) and running[0].done(),
        ended=ended,
        saves=args.saves,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
