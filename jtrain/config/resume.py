"""Runs in workdirs: which config fields may differ when one goes on, and the run behind a checkpoint."""

from collections.abc import Sequence
from pathlib import Path

import fiddle as fdl

from jtrain.checkpoint import Checkpoints
from jtrain.config import tree
from jtrain.config.run import Run, build_run
from jtrain.errors import FileError, TakenWorkdir, UserError, did_you_mean
from jtrain.runtime.secrets import redact_lines

_ASKED = "# asked: "

_OPTIMIZER = ("peak_lr", "warmup_steps", "schedule", "b1", "b2", "eps", "weight_decay", "clip_norm")
_OPTIMIZER_MUON = ("momentum", "update_rms", "newton_schulz_steps")

CHANGEABLE = (
    "code",
    "precision",
    "kernels",
    "data",
    "num_steps",
    *(f"optimizer.{name}" for name in (*_OPTIMIZER, *_OPTIMIZER_MUON)),
)
"""Names for `--allow-change`: paths of fields that may then differ, with all fields below them. Losses differ
from that step on, so the change is printed, and kept as a remark in config.txt and in every later checkpoint.
With `data`, the weights go on, and the data begins anew if its state does not fit any more, from the first
chunk of its order. `code` is the source of classes that are not jtrain's. Fields of the optimizer that decide
which arrays its state has are not among them."""

MAY_CHANGE_ON_RESUME = {
    "deterministic": "changes the order of sums, not what is summed",
    "adapter.base": "the hash of the base is compared, wherever the base lies",
    "mesh.": "the layout does not change the losses",
    "layout.": "the layout does not change the losses",
    "pipeline.": "the layout does not change the losses",
    "model.scan_layers": "changes only how the model compiles",
    "model.loss_chunk_tokens": "changes only how the model compiles",
    "model.attention_chunk": "changes only how the model compiles",
    "checkpoint.": "changes what a run writes, not what it computes",
    "guard.": "changes what happens at bad numbers, not good ones",
    "eval.": "changes what a run writes, not what it computes",
    "data.eval_batches": "changes what a run writes, not what it computes",
    "data.mixture": "the log records the change and its step",
    "data.sources.": (
        "the log records the change; the data state refuses documents that changed, not new ones"
    ),
    "data.on_bad_record": "changes only what happens at an unreadable document",
    "data.epochs": "changes where the data ends, not its order",
    "data.shuffle_window_bytes": "sources keep the window that they began with",
    "data.engine": "changes how the data is read, not the data",
    "data.max_loaders": "changes how the data is read, not the data",
    "data.shadows": "changes how the data is read, not the data",
    "data.read_timeout_s": "changes how the data is read, not the data",
    "data.cache_dir": "changes how the data is read, not the data",
    "data.lookahead_steps": "changes how the data is read, not the data",
    "data.context_order": "changes which device has which positions, not the positions",
    "metrics.": "changes what a run writes, not what it computes",
    "profile.": "changes what a run writes, not what it computes",
    "integrity.": "checks the numbers, changes none",
    "supervise.": "changes when a run is ended and restarted, not what it computes",
    "alerts.": "changes who is told, not what a run computes",
    "weight_stream": "changes what a run writes, not what it computes",
    "callbacks": "callbacks watch a run and do not change it",
}
"""Prefix of a path -> why a resumed run may change it. A change of any other field makes it another run,
`num_steps` included, because the learning-rate schedule reads it."""


def config_from_text(config_text: str) -> fdl.Config[Run]:
    """Reads a config from the text kept in a workdir or a checkpoint.

    Raises:
      UserError: as `jtrain.config.tree.read`.
    """
    return tree.read(Run, config_text)


def run_of_checkpoint(config_text: str) -> Run:
    """Builds the run that wrote a checkpoint, for its model and its data, without pipeline stages or data
    parallelism.

    A checkpoint holds whole layers, so whoever reads one needs no schedule; a schedule's CSV file may be gone
    by then.

    Raises:
      UserError: as `config_from_text` and `build_run`.
    """
    run_config = config_from_text(config_text)
    run_config.mesh.stage = 1
    run_config.mesh.data = 1  # `auto` in a checkpoint of imported weights
    return build_run(run_config)


def open_checkpoint(checkpoints: Checkpoints, step: int | None) -> tuple[int, Run]:
    """Returns the step of a checkpoint, the newest one's for None, and the run that wrote it.

    Raises:
      FileError: there is no checkpoint.
      CheckpointError: there is none of this step.
    """
    # In every process alike: `latest_step` waits for all.
    step = checkpoints.latest_step() if step is None else step
    if step is None:
        raise FileError(f"No checkpoint in {checkpoints.folder}. Give the --workdir of another run.")
    return step, run_of_checkpoint(checkpoints.config_text(step))


def differences(saved_text: str, current_text: str) -> list[str]:
    """Lists the differences that make two flat config texts different runs, one `path: a there, b here` each.

    Fields in MAY_CHANGE_ON_RESUME are left out. A field that one of them lacks counts as a difference.
    """
    # Both without secrets, as config.txt was written: a renewed signature is not another run.
    saved_values, current_values = (
        tree.parse(redact_lines(saved_text)),
        tree.parse(redact_lines(current_text)),
    )
    return [
        f"{path}: {saved_values.get(path, 'absent')} there, {current_values.get(path, 'absent')} here"
        # Fields of both, in the order of the saved text; a field of one side alone counts as a difference.
        for path in dict.fromkeys([*saved_values, *current_values])
        if saved_values.get(path) != current_values.get(path)
        and not path.startswith(tuple(MAY_CHANGE_ON_RESUME))
    ]


def check_same_run(workdir: Path, config_text: str, *, allow: Sequence[str] = ()) -> list[str]:
    """Refuses a workdir whose config.txt belongs to another run; returns the differences that `allow`
    permits.

    Args:
      allow: names of CHANGEABLE.

    Raises:
      UserError: the workdir belongs to another run (lists each differing path with both values), or `allow`
        has an unknown name.
    """
    if unknown := [name for name in allow if name not in CHANGEABLE]:
        raise UserError(
            f"--allow-change {unknown[0]}: {did_you_mean(unknown[0], CHANGEABLE)}It takes "
            f"{', '.join(CHANGEABLE)}; every other field that changes the losses makes another run."
        )
    file = workdir / "config.txt"
    if not file.exists():
        # A workdir without config.txt is of no run yet.
        return []
    lines = differences(file.read_text(), config_text)
    if refused := [line for line in lines if not _is_covered(line, allow)]:
        changed_lines = "".join(f"\n  {line}" for line in refused)
        # Names that would allow these very changes, for the way out.
        names = [name for name in CHANGEABLE if any(_is_covered(line, [name]) for line in refused)]
        options = " ".join(f"--allow-change {name}" for name in names)
        way_out = (
            f", or add {options} to go on with other numbers"
            if all(_is_covered(line, names) for line in refused)
            else ""
        )
        raise TakenWorkdir(
            f"{workdir} holds another run:{changed_lines}\nSet --workdir to a new folder, or run with the "
            f"config in {file}{way_out}."
        )
    return lines


def _is_covered(line: str, names: Sequence[str]) -> bool:
    """True if a line of `differences` is about a field that one of `names` of CHANGEABLE allows to change."""
    path = line.partition(":")[0]
    return any(path == name or path.startswith(f"{name}.") for name in names)


def with_auto_remarks(resolved: str, requested: str) -> str:
    """Appends to the config as it was resolved a remark for each field that was asked to be `auto` or
    `as_needed`.
    """
    requested_values, resolved_values = tree.parse(requested), tree.parse(resolved)
    # Only what was decided for the run; every other field is as it was given.
    open_paths = [
        path
        for path, text in requested_values.items()
        if text in ("'auto'", "'as_needed'") and resolved_values[path] != text
    ]
    return resolved + "".join(f"{_ASKED}{path} = {requested_values[path]}\n" for path in open_paths)


def with_history(workdir: Path, config_text: str, *, step: int, changes: Sequence[str]) -> str:
    """Appends to `config_text` one remark per change that `--allow-change` permitted, in this and earlier
    attempts.

    Args:
      step: the step that this attempt resumes from.
      changes: the lines that `check_same_run` returned.
    """
    file = workdir / "config.txt"
    saved_lines = file.read_text().splitlines() if file.exists() else []
    # Remarks of earlier attempts stay; those about `auto` are written anew for the devices of this one.
    earlier = [line for line in saved_lines if line.startswith("#") and not line.startswith(_ASKED)]
    remarks = [*earlier, *(f"# changed at step {step}: {change}" for change in changes)]
    # Hidden again: a change may name a secret's old and new value.
    return config_text + redact_lines("".join(f"{remark}\n" for remark in remarks))
