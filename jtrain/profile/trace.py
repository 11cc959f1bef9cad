"""A window of traced steps: starts and stops the profiler, and leaves a folder that can be analysed without the run.

| file | what |
|---|---|
| `plugins/profile/<time>/<host>.xplane.pb` | the trace, as XProf and Perfetto open it |
| `<module>.hlo.txt` | the compiled program that the trace's ops are of |
| `facts.json` | what the trace does not know: mesh, peaks, planned bytes and FLOPs, memory by class |
"""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jtrain.durable import write_whole

FACTS = "facts.json"

_FACTS = ("platform", "device_kind", "num_devices", "tokens_per_step", "mesh", "peaks", "planned", "memory")
_FACTS += ("step_flops", "module", "settings", "goodput", "process", "num_processes")


class Window:
    """Traces the steps between `start` and `stop`.

    Args:
      folder: of this window alone; made if missing.
      facts: platform, device_kind, num_devices (of all processes), process, num_processes, tokens_per_step;
        mesh ({axis: devices}); peaks (fields of `Peaks`);
        planned ([{kind, axes, wire_bytes}], of one device and step); memory ([{name, bytes, source}], of one device);
        step_flops (model FLOPs of a step on all devices, or None); module (name of the step's HLO module);
        settings ({field of the config: value}, those that advice is about); goodput ({category: seconds of the run}).
    """

    def __init__(self, folder: Path, *, facts: dict[str, Any]) -> None:
        assert set(facts) == set(_FACTS), set(facts) ^ set(_FACTS)
        self.folder = folder
        self.facts = facts

    def start(self) -> None:
        """Begins to trace."""
        import jax

        self.folder.mkdir(parents=True, exist_ok=True)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # a Python call is no op, and there are thousands per step
        # A CPU's ops are events of the host at level 2; elsewhere only the annotations are, at level 1.
        options.host_tracer_level = 2 if self.facts["platform"] == "cpu" else 1
        jax.profiler.start_trace(str(self.folder), profiler_options=options)

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around a step's dispatch and the wait for its results: what is not waited for belongs to no step."""
        import jax

        # The monotonic clock beside the trace's own: samples are laid beside the ops by it, whoever sets the time.
        with jax.profiler.StepTraceAnnotation("jtrain:step", step_num=step, monotonic_ns=time.monotonic_ns()):
            yield

    def stop(self, programs: dict[str, str]) -> None:
        """Ends the trace and writes everything; `programs` are HLO texts by module: see `compiled_text`."""
        import jax

        jax.profiler.stop_trace()
        for module, text in programs.items():
            write_whole(self.folder / f"{module}.hlo.txt", text)
        write_whole(self.folder / FACTS, json.dumps(self.facts, indent=1) + "\n")


def compiled_text(module: str) -> dict[str, str]:
    """The optimized HLO of the newest program of that name which this process holds; compiles nothing.

    Raises:
      ValueError: it holds none.
    """
    import jax

    client = jax.devices()[0].client
    texts = [m.to_string() for e in client.live_executables() for m in e.hlo_modules() if m.name == module]
    if not texts:
        raise ValueError(f"no compiled program is called {module}: a step has to run before its window can end.")
    return {module: texts[0]}


def read_facts(folder: Path) -> dict[str, Any]:
    """facts.json of a window.

    Raises:
      ValueError: no such folder, no facts in it, or not all of them.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder. Give the folder of a trace window: <workdir>/profile/<step>.")
    file = folder / FACTS
    try:
        facts = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(
            f"{file} cannot be read ({error.strerror}): the run ended inside its window. Trace again."
        ) from error
    except ValueError as error:
        raise ValueError(f"{file} is cut off or no JSON ({error}). Trace again.") from error
    missing = [name for name in _FACTS if not isinstance(facts, dict) or name not in facts]
    if missing:
        raise ValueError(f"{file} lacks {', '.join(missing)}: another version of jtrain wrote it. Trace again.")
    return facts
