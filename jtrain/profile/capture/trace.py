"""Window of traced steps: runs the profiler and writes a folder that can be analysed without the run.

| file | contents |
|---|---|
| `plugins/profile/<time>/<host>.xplane.pb` | the trace, which XProf and Perfetto open |
| `<module>.hlo.txt` | the compiled program that was traced |
| `facts.json` | facts that are not in the trace: mesh, peaks, planned bytes and FLOPs, memory by class |
"""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jtrain.errors import UserError
from jtrain.profile.trace_dir import FACT_NAMES, FACTS
from jtrain.runtime.atomic_io import write_whole


class Window:
    """Traces the steps between `start` and `stop`.

    Args:
      folder: folder of this window alone; created if missing.
      facts: platform, device_kind, num_devices (of all processes), process, num_processes, tokens_per_step;
        mesh ({axis: devices}); partitions (position in the mesh of each device of this process); peaks (fields
        of `Peaks`); planned ([{kind, axes, wire_bytes}], per device and step); memory ([{name, bytes,
        source}], per device); step_flops (model FLOPs of a step on all devices, or None); module (name of the
        step's HLO module); settings ({config field: value}, those that advice refers to); goodput
        ({category: seconds of the run}); pipeline (`pipeline_trace.facts_of`, None without stages).
    """

    def __init__(self, folder: Path, *, facts: dict[str, Any]) -> None:
        # Checked here and not at the end of the window, where the trace would be lost.
        assert set(facts) == set(FACT_NAMES), set(facts) ^ set(FACT_NAMES)
        self.folder = folder
        self.facts = facts

    def start(self) -> None:
        """Starts the profiler."""
        import jax

        self.folder.mkdir(parents=True, exist_ok=True)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # thousands of Python calls per step, which no report uses
        # On CPUs ops are host events, of level 2; elsewhere only our annotations are, of level 1.
        options.host_tracer_level = 2 if self.facts["platform"] == "cpu" else 1
        jax.profiler.start_trace(str(self.folder), profiler_options=options)

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Marks a step; wrap its dispatch and the wait for its results, or its ops belong to no step."""
        import jax

        # The monotonic clock aligns clock samples with ops even if the wall clock is set meanwhile.
        with jax.profiler.StepTraceAnnotation("jtrain:step", step_num=step, monotonic_ns=time.monotonic_ns()):
            yield

    def stop(self, programs: dict[str, str]) -> None:
        """Stops the profiler and writes all files.

        Args:
          programs: HLO text by module name: see `compiled_text`.
        """
        import jax

        # Stopped first, so that writing the files is not part of the trace.
        jax.profiler.stop_trace()
        for module, text in programs.items():
            write_whole(self.folder / f"{module}.hlo.txt", text)
        write_whole(self.folder / FACTS, json.dumps(self.facts, indent=1) + "\n")


def compiled_text(module: str) -> dict[str, str]:
    """Returns {module: optimized HLO} of the newest compiled program of that name; compiles nothing.

    Raises:
      UserError: no compiled program has that name.
    """
    import jax

    client = jax.devices()[0].client
    # Newest first, as the client lists them: a retraced step has several programs of one name.
    texts = [m.to_string() for e in client.live_executables() for m in e.hlo_modules() if m.name == module]
    if not texts:
        raise UserError(f"no compiled program is named {module}: a step must run before its window can end.")
    return {module: texts[0]}
