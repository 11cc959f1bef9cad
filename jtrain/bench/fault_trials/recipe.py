"""Training command of the trials: its arguments and environment, for processes on this machine."""

import dataclasses
import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from jtrain.bench.fault_trials import processes
from jtrain.bench.fault_trials.processes import TrialAttempt

NUM_STEPS, EVERY_STEPS = 16, 4
"""Updates of a run, and steps between its checkpoints: three saves on the way, one at the end, and two
deletions."""

COMMON = (
    f"num_steps={NUM_STEPS}",
    f"checkpoint.every_steps={EVERY_STEPS}",
    "metrics.log_every_steps=1",
    "metrics.tensorboard=False",
    "eval.every_steps=None",
)
# Two warm-up steps, so that most of the 16 steps come after the warm-up.
SMALL = ("optimizer.warmup_steps=2",)
LAUNCH = "jtrain.launch"
ON_CPUS = {"disable_most_optimizations": 1, "traceback_in_locations_limit": 0}
"""Settings of jax on emulated devices. LLVM's optimisations are half of the seconds of a compilation. The key
of the compile cache includes the call stack of every operation: with ten frames, the default, each kind would
compile anew."""
UNBROKEN_LIMIT_S = 3600.0
"""Time in which a run without any fault must end."""


@dataclasses.dataclass(frozen=True)
class RunRecipe:
    """Command that a trial starts, breaks and starts again.

    config, fiddlers, sets: of the command line.
    num_processes: processes of one run, which share this machine.
    emulated: CPU devices per process; None takes the devices of this machine.
    """

    config: str
    fiddlers: tuple[str, ...]
    sets: tuple[str, ...]
    num_processes: int
    emulated: int | None

    def changed(self, *sets: str, emulated: int | None = None) -> "RunRecipe":
        """Returns the same recipe with further `--set` texts, and another number of devices per process."""
        devices = self.emulated if emulated is None else emulated
        return dataclasses.replace(self, sets=(*self.sets, *sets), emulated=devices)

    def argv(self, workdir: Path | str, *extra_arguments: str) -> list[str]:
        """Returns the arguments after `python -m jtrain.launch`."""
        flags = [f"--config={self.config}"]
        flags += [part for name in self.fiddlers for part in ("--with", name)]
        flags += [part for text in self.sets for part in ("--set", text)]
        flags += ["--workdir", str(workdir)]
        if self.emulated is not None:
            flags += ["--emulate-devices", str(self.emulated)]
        return [*flags, *extra_arguments]

    def command(self, workdir: Path | str, *extra_arguments: str) -> str:
        """Returns the command as a user types it."""
        start = (
            "python -m jtrain.launch"
            if self.num_processes == 1
            else f"launch/local.sh -n {self.num_processes}"
        )
        return " ".join([start, *self.argv(workdir, *extra_arguments)])

    def start(
        self,
        workdirs: Sequence[Path | str],
        logs: Path,
        *extra_arguments: str,
        imported: bool = True,
        module: Sequence[str] = (LAUNCH,),
        supervised: bool = False,
        limit_s: float = UNBROKEN_LIMIT_S,
        environ: Mapping[str, str] = {},
    ) -> TrialAttempt:
        """Starts all processes of the run.

        Args:
          workdirs: one for all processes, or one for each.
          logs: folder of the output files; existing ones are replaced.
          extra_arguments: of the command line, after those of the recipe.
          imported: forks this process, which has imported everything; otherwise starts new interpreters.
          module: the module to run in place of `jtrain.launch`, with arguments that come before those of the
            run.
          supervised: starts one process, with `--supervise`, which starts those of the run.
          limit_s: time in which the attempt must end.
          environ: further environment variables.
        """
        # A supervisor starts the processes itself.
        if supervised:
            extra_arguments = (
                *extra_arguments,
                "--supervise",
                *(("--processes", str(self.num_processes)) * (self.num_processes > 1)),
            )
        # The usual case: all processes of a run share its workdir.
        elif len(workdirs) == 1:
            workdirs = [*workdirs] * self.num_processes
        logs.mkdir(parents=True, exist_ok=True)
        # A fresh port for each attempt, as one of a killed run may still be bound.
        port = processes.free_port()
        pids, files = [], []
        for index, workdir in enumerate(workdirs):
            log = logs / f"process{index}.log"
            if log.is_file():  # a trial may have put a pipe there
                log.unlink()
            argv = [*module, *self.argv(workdir, *extra_arguments)]
            variables = (
                {}
                if self.emulated is None
                else {f"JAX_{name}".upper(): str(n) for name, n in ON_CPUS.items()}
            )
            if self.num_processes > 1 and not supervised:
                variables |= {"JTRAIN_COORDINATOR": f"127.0.0.1:{port}", "JTRAIN_PROCESS_ID": str(index)}
                variables |= {"JTRAIN_NUM_PROCESSES": str(self.num_processes)}
            start = processes.run_imported if imported else processes.run_command
            # Bound as defaults: the fork runs at once, but the linter cannot know.
            pids.append(
                processes.fork(
                    lambda argv=argv, start=start: start(argv), log, environ=variables | {**environ}
                )
            )
            files.append(log)
        return TrialAttempt(pids, files, limit_s=limit_s)


def of_config(name: str | None, num_processes: int, *, accelerator: bool) -> RunRecipe:
    """Returns the recipe for a user's config, or for a small one of the harness's own if `name` is None.

    Args:
      name: as after `--config=`.
      num_processes: processes of one run.
      accelerator: True if this machine has one, which a user's config then trains on.

    Raises:
      UserError: there is no such config, or its mesh cannot be divided among the processes.
    """
    from jtrain.config.load import load_config, mesh_size  # lazy: they import jax
    from jtrain.errors import UserError

    # Parameters are sharded, so that a lost process takes a part of the state with it.
    sharded = (f"mesh.data={num_processes}", "layout.zero_stage=3") if num_processes > 1 else ()
    if name is None:
        return RunRecipe("tiny", ("debug",), (*COMMON, *SMALL, *sharded), num_processes, 1)
    config = load_config(name)
    # One process can train on the real devices; several share them only under emulation.
    if accelerator and num_processes == 1:
        return RunRecipe(name, (), COMMON, 1, None)
    if config.mesh.data == "auto":
        return RunRecipe(name, (), COMMON, num_processes, 1)
    size = mesh_size(config)
    if size % num_processes:
        raise UserError(
            f"--config {name} has a mesh of {size} devices, which --processes {num_processes} cannot divide "
            "evenly. Choose another number of processes."
        )
    return RunRecipe(name, (), COMMON, num_processes, size // num_processes)


def set_environment(recipe: RunRecipe) -> None:
    """Prepares this process, whose forks become trainings: imports what they need, and starts no backend."""
    # The user's flags could add devices that the recipe does not count.
    os.environ.pop("XLA_FLAGS", None)
    import jax

    if recipe.emulated is not None:
        # The numbers of ON_CPUS are texts of environment variables too; jax.config wants a bool for a switch.
        for name, value in ON_CPUS.items():
            jax.config.update(f"jax_{name}", value if name.endswith("limit") else bool(value))
        jax.config.update("jax_platforms", "cpu")
    # Imported once in the harness; every fork has them.
    for name in ("checkpoint.orbax_io", "config.load", "plan.auto_layout", "plan.from_run", "train.attempt"):
        importlib.import_module(f"jtrain.{name}")
