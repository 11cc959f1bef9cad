"""What the processes of one run must agree on about checkpoints; without network where there is one process."""


def index() -> int:
    """This process's number; process 0 writes what is not an array."""
    import jax  # lazy, here and below: `python -m jtrain.checkpoint` needs none

    return jax.process_index()


def share() -> tuple[int, int]:
    """(this process's number, how many there are)."""
    import jax

    return jax.process_index(), jax.process_count()


def zero_says(value: int) -> int:
    """Process 0's value in every process: file systems may show a new name to one process before another."""
    import jax

    if jax.process_count() == 1:
        return value
    import numpy as np
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int64(value)))


def anywhere(flag: bool) -> bool:
    """True in every process if `flag` is true in any, so that all stop instead of some waiting for ever."""
    import jax

    if jax.process_count() == 1:
        return flag
    import numpy as np
    from jax.experimental import multihost_utils

    return bool(np.any(multihost_utils.process_allgather(np.bool_(flag))))
