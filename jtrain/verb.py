"""What every `python -m jtrain.*` shares: how jax is started, and what an exit code means.

Nothing here imports jax before a function needs it, so that a verb can parse its arguments first and `--help` answers
at once.
"""

import glob
import linecache
import sys
import traceback
from collections.abc import Callable, MutableMapping
from pathlib import Path

ACCELERATOR_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd", "/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
"""Device files of NVIDIA (under WSL too), AMD and TPU drivers."""


def run(main: Callable[[], int]) -> int:
    """Runs a verb and returns its exit code: a mistake of the user's is a message and 2, a bug keeps its traceback.

    A ValueError or OSError is the user's if a `raise` of jtrain raised it, because our own checks say what to mend, or
    if it names a file. Out of a library, or out of a line of ours that meant something else, it is a bug.
    """
    try:
        return main()
    except KeyboardInterrupt:
        return 130  # as shells report SIGINT; during training the loop catches it, saves, and returns 75
    except (ValueError, OSError) as error:
        if not _raised_by_us(error) and getattr(error, "filename", None) is None:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2


def start_jax(environ: MutableMapping[str, str], *, emulate_devices: int | None = None) -> None:
    """Chooses jax's platform and its compile cache; call it before anything computes.

    Without an accelerator's device file the platform is the CPU, said out loud to jax: with a TPU or CUDA plugin
    installed it would otherwise look for their hardware first, at length and on stderr. `JAX_PLATFORMS` and
    `JAX_COMPILATION_CACHE_DIR` win over both choices.

    Args:
      environ: os.environ.
      emulate_devices: run on this many CPU devices, whatever hardware is here.

    Raises:
      ValueError: emulate_devices is not positive.
    """
    if emulate_devices is not None:
        if emulate_devices < 1:
            raise ValueError(f"--emulate-devices {emulate_devices} must be at least 1.")
        # XLA reads the last of repeated flags, when its first client starts.
        flag = f"--xla_force_host_platform_device_count={emulate_devices}"
        environ["XLA_FLAGS"] = f"{environ.get('XLA_FLAGS', '')} {flag}".strip()

    import jax  # lazy: 0.6 s

    no_choice = not environ.get("JAX_PLATFORMS")
    if emulate_devices is not None or (no_choice and not any(glob.glob(pattern) for pattern in ACCELERATOR_FILES)):
        jax.config.update("jax_platforms", "cpu")
    if jax.config.jax_compilation_cache_dir is None:
        user_cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(user_cache / "jtrain" / "xla"))
        # jax's own default leaves out what compiles in under a second: of `tiny`, everything but the step.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def join_processes(environ: MutableMapping[str, str]) -> None:
    """Joins the other processes of this run, if the environment says that there are any.

    `JTRAIN_COORDINATOR=host:port`, `JTRAIN_NUM_PROCESSES` and `JTRAIN_PROCESS_ID` name them, as launch/local.sh sets
    them; `JTRAIN_COORDINATOR=auto` leaves it to jax, which knows Slurm, Open MPI and TPU pods.

    Raises:
      ValueError: only some of the three are set, or one is no number.
    """
    coordinator = environ.get("JTRAIN_COORDINATOR")
    names = ("JTRAIN_NUM_PROCESSES", "JTRAIN_PROCESS_ID")
    if coordinator is None:
        if given := [name for name in names if name in environ]:
            raise ValueError(f"{given[0]} is set, but JTRAIN_COORDINATOR is not. Set it to host:port or to auto.")
        return

    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # for CPU processes; others do not look at it
    if coordinator == "auto":
        jax.distributed.initialize()
        return
    values = [environ.get(name, "") for name in names]
    if not all(value.isdecimal() for value in values):
        said = ", ".join(f"{name}={value!r}" for name, value in zip(names, values, strict=True))
        raise ValueError(f"JTRAIN_COORDINATOR={coordinator} needs two numbers beside it, but {said}. Set both.")
    jax.distributed.initialize(coordinator, int(values[0]), int(values[1]))


def _raised_by_us(error: BaseException) -> bool:
    """Whether a `raise` statement in jtrain's own code raised `error`."""
    frame, line = list(traceback.walk_tb(error.__traceback__))[-1]
    spec = frame.f_globals.get("__spec__")  # knows the name of what `python -m` runs, whose __name__ is "__main__"
    module = spec.name if spec else frame.f_globals.get("__name__", "")
    statement = linecache.getline(frame.f_code.co_filename, line).lstrip()
    return module.startswith("jtrain") and statement.startswith("raise ")
