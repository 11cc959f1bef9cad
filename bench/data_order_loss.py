"""Loss that the order of chunks gains over the order of whole documents that commit 46a0ee9 had: trains `tiny` in both.

    python -m jtrain.bench data_order_loss

Needs a clone with its history, since the old commit is unpacked from it and runs as it was. A training run takes about
three minutes on two idle cores, and there are two for each seed. The final weights of both are then evaluated by this
tree's code on the same rows: those of the old tree's evaluation, all of its held-out text, and this tree's evaluation.
Stops if a document that one of the two trees evaluates on is in a training row of one of them.
"""

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jtrain.bench import Options, Row, option, row
from jtrain.checkpoint import Checkpoints, CheckpointSpec
from jtrain.config.load import load_config
from jtrain.config.run import Run, build_run, run_layout
from jtrain.constants import IGNORE
from jtrain.data import open_dataset, put_batch
from jtrain.errors import UserError
from jtrain.layout.dims import Batch
from jtrain.layout.mesh import make_mesh
from jtrain.model.param import map_params
from jtrain.step.train_step import make_eval_step
from jtrain.telemetry.metrics import FILE, read

OLD_COMMIT = "46a0ee9"
ROOT = Path(__file__).parents[1]
STEPS = 300
"""Steps of the config `tiny`; with fewer the bars are left out."""

ALL_BATCHES = 10_000
"""More evaluation batches than the held-out text of `tiny` fills."""

OWN = ("default evaluation of the old tree", "default evaluation of this tree")
"""Samples of the two trees' evaluations; the old one is of the 1 % of documents that the old tree held out."""

# Runs in the old tree, by its own code. Arguments: its evaluation, all held-out rows, document names, steps, seeds.
_OLD_PROGRAM = """
import itertools, json, sys
import numpy as np
from jtrain import config
from jtrain.data.dataset import open_dataset

few, all_rows, names, steps, *seeds = sys.argv[1:]

def opened(seed, *sets):
    run = config.build(config.load("tiny", (), [f"seed={seed}", *sets]))
    return open_dataset(run.data, seed=run.seed)

for file, sets in ((few, ()), (all_rows, ("data.eval_batches=BATCHES",))):
    batches = list(opened(0, *sets).eval_batches())
    fields = ("token_BL", "target_BL", "position_BL", "segment_BL")
    np.savez(file, **{field: np.stack([getattr(batch, field) for batch in batches]) for field in fields})
documents = opened(0, "data.eval_fraction=FRACTION").documents[0]
held_out = {documents.identity_of(record) for record in documents.eval_records().tolist()}
trained = set()
for seed in seeds:
    dataset = opened(int(seed), "data.eval_fraction=FRACTION")
    order = dataset.documents[0].order
    with dataset.train_batches(inline=True) as batches:
        for _ in itertools.islice(batches, int(steps)):
            trained |= {documents.identity_of(r) for r in order.records(batches.plan.pieces.document).tolist()}
with open(names, "w") as out:
    json.dump({"held_out": sorted(held_out), "trained": sorted(trained)}, out)
""".replace("BATCHES", str(ALL_BATCHES))


OPTIONS = (
    option("--steps", type=int, default=STEPS, help="updates of each run (default: %(default)s)"),
    option("--seeds", type=int, default=2, help="runs of each order (default: %(default)s)"),
)


def run(args: Options) -> list[Row]:
    """Trains both trees with each seed, then evaluates all final weights on the same rows."""
    seeds = range(args.seeds)
    with tempfile.TemporaryDirectory() as folder:
        old, work = Path(folder) / "old", Path(folder)
        unpack(OLD_COMMIT, old)
        files = [work / name for name in ("few.npz", "all.npz", "documents.json")]
        program = _OLD_PROGRAM.replace("FRACTION", str(tiny().data.eval_fraction))
        run_in(old, ["-c", program, *map(str, (*files, args.steps, *seeds))])
        check_split(json.loads(files[2].read_text()), this_tree(args.steps, seeds))
        losses: dict[str, list[tuple[float, float]]] = {}
        for seed in seeds:
            workdirs = {tree: work / f"{tree.name}-{seed}" for tree in (old, ROOT)}
            for tree, workdir in workdirs.items():
                # Both hold out the same documents; the old tree's own share was a tenth of that.
                sets = [f"num_steps={args.steps}", f"seed={seed}", f"data.eval_fraction={tiny().data.eval_fraction}"]
                run_in(tree, ["-m", "jtrain.launch", "--config=tiny", "--workdir", str(workdir), *set_flags(sets)])
            for name, batches in samples(files[0], files[1]).items():
                before, after = (evaluated(workdirs[tree], batches) for tree in (old, ROOT))
                if name == OWN[1]:
                    check_same(workdirs[ROOT], after)
                losses.setdefault(name, []).append((before, after))
                print(f"seed {seed}, {name}: {before:.4f} -> {after:.4f} nats/byte", flush=True)
    return rows_of(losses, with_bars=args.steps == STEPS)


def rows_of(losses: dict[str, list[tuple[float, float]]], *, with_bars: bool) -> list[Row]:
    """Rows for each sample: each seed's loss against its bar, then the mean against that of the old order."""
    bars = {OWN[0]: ("<= 1.44", "<= 0.87"), "all held-out text": ("<= 1.22", "<= 0.83")}
    rows = []
    for name, pairs in losses.items():
        most, ratio = bars.get(name, (None, None)) if with_bars else (None, None)
        rows += [row(f"{name}, seed {i}", after, "nats/byte", bar=most) for i, (_, after) in enumerate(pairs)]
        before, after = (statistics.mean(side) for side in zip(*pairs, strict=True))
        rows.append(row(f"{name}, against {OLD_COMMIT}", after, "nats/byte", baseline=before, bar=ratio))
    return rows


def unpack(commit: str, folder: Path) -> None:
    """Writes the files of a commit of this repository into a new folder.

    Raises:
      UserError: this is no clone, or it lacks the commit.
    """
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=False)
    if archive.returncode:
        raise UserError(
            f"{ROOT} is not a clone that has commit {commit}, whose order is compared with: "
            f"{archive.stderr.decode().strip()}. Run this in a clone with its whole history (git fetch --unshallow)."
        )
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)


def run_in(tree: Path, arguments: Sequence[str]) -> None:
    """Runs Python with the code of a tree.

    Raises:
      RuntimeError: it failed.
    """
    paths = os.pathsep.join([str(tree), str(tree / "kernels")])
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=tree, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode} in {tree}: {shlex.join(command)}\n{done.stderr[-3000:]}")


def set_flags(sets: Iterable[str]) -> list[str]:
    """Returns `--set` arguments."""
    return [part for text in sets for part in ("--set", text)]


def this_tree(steps: int, seeds: Iterable[int]) -> dict[str, list[str]]:
    """Returns the names of this tree's held-out documents, and of those in the rows of the first steps."""
    held_out: set[str] = set()
    trained: set[str] = set()
    for seed in seeds:
        dataset = open_dataset(tiny().data, seed=seed)
        (stream,) = dataset.streams
        held_out = {stream.identity_of(r) for records in stream.held_out_records() for r in records.tolist()}
        with dataset.train_batches(inline=True) as batches:
            for _ in range(steps):
                next(batches)
                assert batches.plan is not None
                records = stream.locate(batches.plan.pieces.document).record
                trained |= {stream.identity_of(record) for record in records.tolist()}
    return {"held_out": sorted(held_out), "trained": sorted(trained)}


def check_split(old: dict[str, list[str]], new: dict[str, list[str]]) -> None:
    """Refuses to compare losses if a tree has trained on what is evaluated.

    Raises:
      RuntimeError: the held-out documents differ, or one of them is in a training row.
    """
    if old["held_out"] != new["held_out"]:
        differing = sorted(set(old["held_out"]) ^ set(new["held_out"]))
        raise RuntimeError(f"{len(differing)} documents are held out by one of the two trees only: {differing[:5]}")
    for name, tree in ((OLD_COMMIT, old), ("this tree", new)):
        if both := sorted(set(tree["trained"]) & set(tree["held_out"])):
            raise RuntimeError(f"{name} trains on {len(both)} held-out documents: {both[:5]}")


def check_same(workdir: Path, loss: float) -> None:
    """Refuses a loss that is not the one that the run itself logged for the same rows.

    Raises:
      RuntimeError: they differ by more than 0.1 %.
    """
    own = [line["eval_loss_nats"] for line in read(workdir / FILE) if "eval_loss_nats" in line][-1]
    if abs(loss / own - 1) > 1e-3:
        raise RuntimeError(f"{workdir} logged {own} nats/byte for rows on which its weights give {loss} here.")


def samples(few: Path, all_rows: Path) -> dict[str, list[Batch]]:
    """Returns the rows to evaluate on, by name."""
    found = {OWN[0]: few, "all held-out text": all_rows}
    batches = {}
    for name, file in found.items():
        with np.load(file) as arrays:
            fields = dict(arrays)
        count = len(fields["token_BL"])
        batches[name] = [Batch(**{field: array[i] for field, array in fields.items()}) for i in range(count)]
    return batches | {OWN[1]: [held.batch for held in open_dataset(tiny().data, seed=0).held_out().batches()]}


def tiny() -> Run:
    """Returns the run of the config `tiny`, on one device."""
    return build_run(load_config("tiny", (), ["mesh.data=1"]))


def evaluated(workdir: Path, batches: Sequence[Batch]) -> float:
    """Returns the mean loss of a run's final weights, in nats per byte."""
    run = tiny()
    mesh = make_mesh(run.mesh, jax.devices()[:1])
    sharding = SingleDeviceSharding(jax.devices()[0])
    dtype = run.precision.param_dtype
    like = map_params(lambda info: jax.ShapeDtypeStruct(info.shape, dtype, sharding=sharding), run.model.param_infos())
    with Checkpoints(workdir, CheckpointSpec()) as checkpoints:
        step = checkpoints.latest_step()
        assert step is not None
        params = checkpoints.restore_part(step, {"params": like})["params"]
    evaluate = make_eval_step(run.model, run_layout(run), mesh)
    each = (jax.device_get(evaluate(params, put_batch(batch, mesh))) for batch in batches)
    nats = sum(float(nats_BL.sum(dtype="float64")) for nats_BL in each)
    return nats / sum(int((batch.target_BL != IGNORE).sum()) for batch in batches)
