"""Conversion of workdirs to Hugging Face model directories and back."""

import functools
import hashlib
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain import optim
from jtrain.checkpoint import CheckpointError, Checkpoints, CheckpointSpec
from jtrain.checkpoint.array_files import by_keys
from jtrain.checkpoint.streamed import StreamedCheckpoint
from jtrain.config import tree
from jtrain.config.load import load_config
from jtrain.config.resume import open_checkpoint
from jtrain.config.run import Run, build_run, check_vocabulary
from jtrain.config.trained_params import MergeOnto, read_params, read_trained
from jtrain.data import open_dataset
from jtrain.errors import UserError, did_you_mean
from jtrain.hf.config_file import FUNCTION
from jtrain.hf.directory import check_empty
from jtrain.hf.files_beside import FilesBeside
from jtrain.hf.import_stream import ImportedLeaf, dtype_note, leaves_of, write_leaves
from jtrain.hf.imported_files import ImportedFiles
from jtrain.hf.mapping import checked_parts
from jtrain.hf.merge_losses import UNMERGED, merge_losses
from jtrain.hf.model_config import family_in, model_differences, model_from_config
from jtrain.hf.model_files import GENERATION, open_tensors, read_config, read_json
from jtrain.hf.peft_folders import write_adapter
from jtrain.hf.selection import select, text_tensors
from jtrain.layout.dims import ParamInfo
from jtrain.layout.precision import CODES_PER_BYTE
from jtrain.model.adapters.lora import LoRA
from jtrain.model.families import FAMILIES
from jtrain.model.families.family import Family
from jtrain.model.fp8_scaling import first_scaling
from jtrain.model.param import map_params
from jtrain.runtime.atomic_io import cannot_write, write_whole
from jtrain.runtime.stores import in_store, workdir_path
from jtrain.runtime.user_code import load_function
from jtrain.step.guard import first_guard
from jtrain.step.state import TrainState


def export(
    workdir: str,
    out: Path,
    *,
    step: int | None,
    dtype: str | None,
    family_name: str | None = None,
    only_adapter: bool = False,
    onto: MergeOnto = "trained",
    with_losses: bool = False,
) -> None:
    """Writes a checkpoint of a run as a model directory, and prints what it wrote.

    Args:
      step: None for the newest.
      dtype: of the weights; None for that of the directory that the run began with, or of
        `precision.param_dtype`.
      family_name: a `model_type`, or `path/to/file.py:function` of one that returns a `Family`; None for the
        family that describes the model.
      only_adapter: writes A and B of its adapter as a folder of peft instead.
      onto: as in `read_params`; merge.json of the directory records it.
      with_losses: prints and records the losses of `merge_losses` too.

    Raises:
      FileError: there is no checkpoint, or `out` is not empty.
      UserError: the model cannot be described by a config.json.
    """
    # First: nothing is computed for a directory that cannot be written to.
    check_empty(out)
    family = None if family_name is None else _family(family_name)
    with Checkpoints(workdir_path(workdir), CheckpointSpec()) as checkpoints:
        while True:
            newest = checkpoints.latest_step() if step is None else step
            try:
                newest, run = open_checkpoint(checkpoints, newest)
                if only_adapter:
                    names = _export_adapter(checkpoints, newest, run, out, dtype or "float32", family)
                    print(f"the adapter of step {newest} of {workdir} -> {out}: {', '.join(names)}")
                    return
                other_files = FilesBeside.of(run, workdir_path(workdir), dtype=dtype, family=family)
                dtype = other_files.dtype
                # In the output dtype: rounding later would hold the weights in two dtypes at once.
                params = read_params(checkpoints, newest, run, functools.partial(_constant, dtype), onto=onto)
                losses = merge_losses(checkpoints, newest, run, dtype) if with_losses and run.adapter else {}
                break
            except CheckpointError:
                # A run that goes on deletes its older checkpoints: then there is a newer one.
                if step is not None or checkpoints.latest_step() == newest:
                    raise
    files = other_files.write_with(jax.tree.map(np.asarray, params), out)  # no copy on a CPU
    print(f"step {newest} of {workdir}, {_size(run.model.param_infos())} parameters, {dtype} -> {out}:")
    print(f"  {', '.join(files)}")
    if run.adapter is not None:
        _record_merge(out, run.adapter, onto, losses)


def _record_merge(out: Path, adapter: LoRA, onto: MergeOnto, losses: dict[str, float]) -> None:
    """Says, on the terminal and in merge.json, what an adapter was merged into."""
    in_blocks = adapter.base_dtype in CODES_PER_BYTE
    unrounded_base = (
        f"the base as it was before it was in {adapter.base_dtype} blocks: the adapter never saw these "
        "weights"
    )
    trained_base = f"the base in {adapter.base_dtype} blocks, dequantised" if in_blocks else "the frozen base"
    print(f"  merged onto {unrounded_base if in_blocks and onto == 'base' else trained_base}")
    for name, loss in losses.items():
        print(
            f"  loss {'of the adapter' if name == UNMERGED else f'merged onto {name}'}: {loss:.6g} nats per "
            "target"
        )
    record = {"onto": onto, "base_dtype": adapter.base_dtype, "base": adapter.base, "scale": adapter.scale}
    record |= {"losses_nats": losses} if losses else {}
    write_whole(out / "merge.json", json.dumps(record, indent=2) + "\n")


def _export_adapter(
    checkpoints: Checkpoints, step: int, run: Run, out: Path, dtype: str, family: Family | None
) -> list[str]:
    """Writes the adapter of a checkpoint as a folder of peft; returns the names of its files."""
    if run.adapter is None:
        raise UserError(f"--adapter: {checkpoints.folder} is of a run without one. Leave out --adapter.")
    params = read_trained(checkpoints, step, run)
    return write_adapter(
        out, params, run.model, run.adapter, dtype=dtype, base=run.adapter.base or "", family=family
    )


def _constant(dtype: str, info: ParamInfo) -> str:
    del info
    return dtype


def _family(name: str) -> Family:
    """Family of a `model_type`, or one of the user's own.

    Raises:
      UserError: there is none, or the function returns something else.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    if ":" not in name:
        raise UserError(
            f"--family {name}: {did_you_mean(name, FAMILIES)}Give a model_type, or path/to/file.py:function."
        )
    make, _ = load_function("--family", name)
    if not isinstance(family := make(), Family):
        raise UserError(f"--family {name} returns a {type(family).__name__}, and must return a Family.")
    return family


def import_directory(
    source: str,
    workdir: str,
    *,
    config: str,
    fiddlers: Sequence[str] = (),
    sets: Sequence[str] = (),
    family_name: str | None = None,
    part: str | None = None,
    share: tuple[int, int] = (0, 1),
) -> None:
    """Writes a workdir whose step 0 has the weights of a model directory, and prints the command that trains
    on.

    Until all is there, the workdir has `.importing` at the end of its name; the same command goes on after a
    kill.

    Args:
      source: a folder, or the URL of one.
      family_name, part: as in `select`.
      share: number of this process, and of all that write the same workdir; the last one completes it.

    Raises:
      FileError: the directory cannot be read, or `workdir` is not empty.
      UserError: it holds another model than the config, or values that are no numbers.
    """
    home = workdir_path(workdir)
    if in_store(home):
        raise UserError(
            f"{workdir}: import writes to a disk. Give a folder, and copy it to the store afterwards."
        )
    # Before the model is read: a full folder needs no import.
    check_empty(home)
    their_config = select(read_config(source), family_name=family_name, part=part)
    theirs, family = model_from_config(their_config), family_in(their_config)
    run_config = load_config(config, fiddlers, sets)
    run = build_run(run_config)
    if run.adapter is not None:
        raise UserError(
            f"--config={config} has adapter=LoRA(...), whose base is a workdir of its own. Import with the "
            f"same config and `--set adapter=None`, and train with `--set adapter.base={workdir}`."
        )
    if lines := model_differences(theirs, run.model):
        difference_lines = "".join(f"\n  {line}" for line in lines)
        command = shlex.join(
            ["jtrain", "hf", "config", "--from", source, "--base", config, "--out", "model.py"]
        )
        raise UserError(
            f"{source} is not the model of --config={config}:{difference_lines}\nSet these fields by --set, "
            f"or write a config that has its model: `{command}`, and give --config=model.py:{FUNCTION}."
        )
    # The first data state comes from the run's own data: step 0 begins with its first batch.
    dataset = open_dataset(run.data, seed=run.seed)
    check_vocabulary(run.model, dataset.vocab_size)
    config_text = tree.flat(run_config)
    with open_tensors(source) as tensors:
        if part is not None:
            tensors, num_left_out = text_tensors(tensors)
            print(f"{source}: {num_left_out} tensors are of other parts than {part}, and left out")
        if note := dtype_note(tensors, their_config):
            print(f"{source}: {note}; all become {run.precision.param_dtype}")
        identity = "\0".join([source, config_text, repr(sorted(map(repr, tensors.items())))])
        dtypes = {"params": run.precision.param_dtype}
        if run.optimizer.master_dtype != "none":
            dtypes["opt_state.master"] = run.optimizer.master_dtype
        leaves = leaves_of(tensors, checked_parts(tensors, run.model, family), dtypes)
    partial = home.with_name(f"{home.name}.importing")
    checkpoint = StreamedCheckpoint(partial, share=share)
    with checkpoint.locked():
        _check_source(partial, identity)
    try:
        left = write_leaves(leaves, checkpoint, share=share)
    except OSError as error:
        raise cannot_write(partial, error) from error
    with checkpoint.locked():
        # Another process may have been the last one, and have completed the workdir.
        if left or not partial.exists():
            print(f"share {share[0]} of {share[1]} is written; {left} files are left for others")
            return
        scaling = _first_scaling(run, leaves, checkpoint)
        state, small = _first_state(run, scaling), {"scaling": scaling, "guard": first_guard()}
        arrays = {".".join(keys): np.asarray(leaf) for keys, leaf in by_keys(small)}
        checkpoint.commit(state, arrays, data_state=dataset.first_state(), config_text=config_text)
        (partial / _SOURCE).unlink()
        (partial / "config.txt").write_text(config_text)
        ImportedFiles(their_config, read_json(source, GENERATION) or {}).write(partial)
        partial.rename(home)
    print(f"{source}, {_size(run.model.param_infos())} parameters -> step 0 of {workdir}. Train on from it:")
    options = [f"--config={config}", *(option for name in fiddlers for option in ("--with", name))]
    options += [*(option for text in sets for option in ("--set", text)), "--workdir", workdir]
    print(f"  jtrain launch {shlex.join(options)}")


_SOURCE = "source.txt"
"""File of an import that is not complete: a hash of what it reads and of the config."""


def _check_source(partial: Path, identity: str) -> None:
    """Notes what an import reads, or compares it with what an earlier attempt noted.

    Raises:
      UserError: the attempt was of other weights, or of another config.
    """
    digest, file = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest(), partial / _SOURCE
    if not file.exists():
        write_whole(file, digest)
    if file.read_text() != digest:
        raise UserError(
            f"{partial} is an import of other weights, or for another config, that was not completed. Delete "
            "it, or give another --workdir."
        )


def _first_scaling(run: Run, leaves: list[ImportedLeaf], checkpoint: StreamedCheckpoint) -> dict[str, Any]:
    """Scales of 8-bit matmuls, from the largest values that the import has seen."""
    if run.precision.matmul_dtype != "fp8_delayed":
        return {}
    largest: dict[str, np.ndarray] = {}
    for leaf in leaves:
        if leaf.name.startswith("params."):
            largest[leaf.info.path] = np.zeros((leaf.info.shape[0], 1), np.float32)
            for chunk in leaf.chunks():
                for layer, value in checkpoint.notes[chunk.name].items():
                    row = largest[leaf.info.path][int(layer)]
                    row[:] = np.maximum(row, np.float32(value))
    infos = run.model.param_infos()
    return first_scaling(infos, map_params(lambda info: jnp.asarray(largest[info.path]), infos))


def _first_state(run: Run, scaling: dict[str, Any]) -> TrainState:
    """Shapes of the state at the start of a run: step 0, and the optimizer's first state."""
    infos = map_params(lambda info: info, run.model.param_infos())
    optimizer = optim.build(run.optimizer, num_steps=run.num_steps, params=infos)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    dtype = jnp.dtype(run.precision.param_dtype)
    params = map_params(lambda info: jax.ShapeDtypeStruct(info.shape, dtype), run.model.param_infos())
    moments = jax.eval_shape(optimizer.init, params)
    state = TrainState(jax.ShapeDtypeStruct((), jnp.int32), params, moments, scaling, first_guard())
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), state)


def _size(infos: Any) -> str:
    """Number of parameters, with thousands separators."""
    return f"{sum(info.size for info in infos):,}"
