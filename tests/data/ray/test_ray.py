"""`data.engine=ray`, on a real cluster of two nodes on this machine."""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import pytest

from jtrain.data import Constant, PackedText, Source, TextDataset, open_dataset
from jtrain.data.constructor.constructor import RUN_BYTES, ConstructorSetup
from jtrain.data.loaders.messages import DataError
from jtrain.data.mixture.schedule import own_weights
from jtrain.data.plane.data_plane import Delivered, InlinePlane, Plane
from jtrain.data.planner.planner import PlannerSpec
from jtrain.data.pretokenized.build import prepare
from jtrain.data.pretokenized.shard import Recipe
from jtrain.data.ray.engine import RayPlane
from tests.data.sources.object_store import web_store
from tests.data.sources.test_storage import parquet_bytes

ROOT = Path(__file__).parents[3]

# Ray's test cluster starts its daemons by a fork of this process, in which other tests may have started jax:
# each is replaced by exec at once, so jax's warning of deadlocks does not concern it. A trainer only connects
# to a cluster.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork\\(\\) was called:RuntimeWarning")


def work(dataset: TextDataset, rows: np.ndarray, **fields: Any) -> ConstructorSetup:
    """Returns the setup of one trainer's constructor."""
    planner = PlannerSpec(
        names=dataset.names,
        chunks_per_epoch=tuple(len(stream) for stream in dataset.streams),
        seq_len=dataset.spec.seq_len,
        global_batch=dataset.spec.global_batch,
        schedule=own_weights(
            Constant(), {name: source.weight for name, source in dataset.spec.sources.items()}
        ),
        **fields,
    )
    return ConstructorSetup(
        sources=dataset.setups,
        planner=planner,
        rows=rows,
        column_order=None,
        chunk_bytes=(RUN_BYTES // 10,) * len(dataset.names),  # ten documents to a run
        lookahead_steps=4,
    )


def ray_plane(
    setup: ConstructorSetup, name: str, process: int = 0, processes: int = 1, read_timeout_s: float = 60.0
) -> RayPlane:
    who: dict[str, Any] = {"run": name, "process": process, "processes": processes}
    return RayPlane(setup, None, **who, loaders=2, standbys=1, read_timeout_s=read_timeout_s)


def actors_left(cluster: Any) -> list[str]:
    """Returns the titles of the processes of our actors, which write to the logs of this cluster.

    Another process of pytest may have one at the same time.
    """
    session, found = cluster.head_node.get_session_dir_path(), []
    for process in psutil.process_iter(["cmdline"]):
        title = (process.info["cmdline"] or [""])[0]
        if re.match(r"ray::Ray(Loader|Constructor)", title):
            with contextlib.suppress(OSError):  # it has just ended
                if os.readlink(f"/proc/{process.pid}/fd/1").startswith(f"{session}/"):
                    found.append(title)
    return found


def until(true: Callable[[], Any]) -> Any:
    """Waits until the condition holds; the limit is long because the machine may be busy."""
    end_s = time.monotonic() + 120
    while not (found := true()):
        assert time.monotonic() < end_s, "nothing came of it"
        time.sleep(0.05)
    return found


def everyone(plane: RayPlane) -> dict[str, tuple[int, str]] | None:
    """Returns the actors of a plane once all of them are up."""
    import ray.exceptions

    try:
        return plane.actors()
    except ray.exceptions.RayActorError:
        return None


def iter_batches(plane: Plane) -> Iterator[Delivered]:
    """Takes batches until the data ends."""
    while True:
        try:
            yield plane.take()
        except StopIteration:
            return


def assert_same(got: Delivered, want: Delivered, rows: slice = slice(None)) -> None:
    """Batches are the same bit for bit, and so are the states that lead to the next ones."""
    assert got.arrays.keys() == want.arrays.keys()
    for name, array in want.arrays.items():
        np.testing.assert_array_equal(got.arrays[name], array[rows], err_msg=name)
    names = ("a", "b", "c")[: len(want.state.skipped)]
    assert got.state.planner.to_json(names) == want.state.planner.to_json(names)
    np.testing.assert_array_equal(got.state.skipped, want.state.skipped)


def test_without_the_package_it_says_which_extra_to_install(
    spec: PackedText, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = work(open_dataset(spec, seed=1), np.arange(8))
    monkeypatch.setitem(sys.modules, "ray", None)  # what `import` finds of a package that is not there
    with pytest.raises(ValueError, match=re.escape("pip install 'jtrain[ray]'")):
        ray_plane(setup, "none")


@pytest.mark.parametrize("address", ["localhost:1", "ray://head:10001", "local"])
def test_without_a_cluster_it_says_how_to_start_one(
    spec: PackedText, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """The refusal takes seconds, where ray by itself tries for 2 minutes and exits; no cluster is started
    either.
    """
    pytest.importorskip("ray", reason="needs the extra [ray]")
    setup = work(open_dataset(spec, seed=1), np.arange(8))
    monkeypatch.setenv("RAY_ADDRESS", address)
    begun_s = time.monotonic()
    with pytest.raises(ValueError, match=rf"RAY_ADDRESS={address}.*`ray start.*--address=HEAD:6379`"):
        ray_plane(setup, "none")
    assert time.monotonic() - begun_s < 60, "a busy machine takes its time, and still not two minutes"


def test_nothing_that_a_run_without_ray_imports_imports_ray() -> None:
    code = (
        "import sys, jtrain.data.dataset; print('ray' in sys.modules, 'jtrain.data.ray.engine' in "
        "sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["False", "True"]


def test_the_config_field_chooses_it_and_the_stream_is_the_same(
    cluster: Any, spec: PackedText, tmp_path: Path, same_batch: Callable[..., None]
) -> None:
    """In a prepared mixture lengths are known beforehand, and only documents of the rows needed are
    requested.

    The rows have 40,960 tokens, more than are filled at a time.
    """
    recipes = [
        Recipe(
            name=name, source=source, tokenizer="bytes", on_bad_record="fail", cache_dir=tmp_path / "cache"
        )
        for name, source in spec.sources.items()
    ]
    with open(tmp_path / "progress", "w") as stream:
        prepare(recipes, tmp_path / "out", workers=1, stream=stream)
    rows = np.arange(2, 6)
    inline = dataclasses.replace(
        spec, prepared=str(tmp_path / "out"), packing="best_fit", engine="inline", seq_len=16384
    )
    with (
        open_dataset(inline, seed=3).train_batches(rows=rows) as want,
        open_dataset(dataclasses.replace(inline, engine="ray"), seed=3).train_batches(rows=rows) as got,
    ):
        for _ in range(2):
            same_batch(next(got), next(want))
        assert got.state() == want.state()
        assert got.stats is not None
        assert {state.name: state.sources for state in got.stats.loaders} == {
            "loader-0": (0, 2),
            "loader-1": (1,),
        }
    until(lambda: not actors_left(cluster))


@pytest.mark.slow
def test_actors_that_read_again_give_the_same_batches_and_say_so(
    cluster: Any, tmp_path: Path, same_batch: Callable[..., None]
) -> None:
    with web_store() as store:
        store.files["rows.parquet"] = parquet_bytes([f"{i} " * 300 for i in range(100)])
        one = PackedText(
            sources={"books": Source(path=f"{store.url}/rows.parquet")},
            seq_len=64,
            global_batch=4,
            eval_fraction=0.0,
            max_loaders=1,
            engine="ray",
            cache_dir=str(tmp_path),
        )
        dataset = open_dataset(one, seed=0)
        with dataset.train_batches(inline=True) as batches:
            want = list(itertools.islice(batches, 5))
        store.faults[:] = [503, 503]
        with dataset.train_batches() as batches:
            for batch in want:
                same_batch(next(batches), batch)
            assert batches.stats is not None
            assert (batches.stats.retries, batches.stats.skipped) == (2, 0)
            said = batches.take_messages()
    assert sum("data.sources.books: " in line and "ClientResponseError: 503" in line for line in said) == 2
    until(lambda: not actors_left(cluster))


@pytest.mark.slow
def test_two_trainers_share_the_loaders_and_each_run_is_read_once(cluster: Any, spec: PackedText) -> None:
    """Each trainer takes half the rows; loaders run on both nodes, constructors beside trainers, all without
    jax.
    """
    import ray

    dataset = open_dataset(spec, seed=1)
    halves = [np.arange(0, 4), np.arange(4, 8)]
    planes = [ray_plane(work(dataset, rows), "shared", i, 2) for i, rows in enumerate(halves)]
    try:
        want = InlinePlane(work(dataset, np.arange(8)), None)
        batch = want.take()
        for plane, rows in zip(planes, (slice(0, 4), slice(4, 8)), strict=True):
            assert_same(plane.take(), batch, rows)
        for _ in range(60):
            batch = want.take()
            for plane, rows in zip(planes, (slice(0, 4), slice(4, 8)), strict=True):
                assert_same(plane.take(), batch, rows)
        both = [plane.actors() for plane in planes]
        here = ray.get_runtime_context().get_node_id()
        assert {node for name, (_, node) in both[0].items() if name.startswith("loader")} == {
            node["NodeID"] for node in ray.nodes() if node["Alive"]
        }
        assert [actors["constructor"][1] for actors in both] == [here, here]
        assert both[0]["loader-0"] == both[1]["loader-0"]
        assert both[0]["constructor"] != both[1]["constructor"]
        kept = [ray.get(planes[0]._loaders[f"loader-{i}"].memory_report.remote()) for i in range(2)]
        drawn = int(batch.state.planner.cursors.sum())
        assert drawn <= sum(documents for documents, _, _ in kept) < 1.7 * drawn, (
            "runs in advance, but none twice"
        )
        assert [loaded for _, _, loaded in kept] == [[], []]
    finally:
        for plane in reversed(planes):
            plane.close()
    until(lambda: not actors_left(cluster))
    assert not ray.is_initialized(), "the connection was ours, so it goes with us"


@pytest.mark.slow
def test_killed_actors_do_not_change_the_stream(cluster: Any, spec: PackedText) -> None:
    """Kills a loader, whose standby answers until Ray restarts it; then a loader together with the
    constructor.
    """
    dataset = open_dataset(spec, seed=2)
    want = InlinePlane(work(dataset, np.arange(8)), None)
    plane = ray_plane(work(dataset, np.arange(8)), "killed")
    try:
        said: list[str] = []

        def go_on(steps: int) -> None:
            for _ in range(steps):
                assert_same(plane.take(), want.take())
            said.extend(plane.take_messages())

        go_on(5)
        for names in (("loader-0",), ("loader-1", "constructor")):
            actors = until(lambda: everyone(plane))
            for name in names:
                os.kill(actors[name][0], signal.SIGKILL)
            go_on(40)
            assert until(lambda: everyone(plane)).items().isdisjoint((name, actors[name]) for name in names)
        text = "\n".join(said)
        assert "loader-0 died; standby-0 answers for it" in text
        assert len(re.findall("the constructor died; another one goes on from step [0-9]+", text)) == 1
    finally:
        plane.close()
    until(lambda: not actors_left(cluster))


RECORDS = """
import os
import time

import grain


class Texts:
    def __len__(self):
        return 100

    def __getitem__(self, i):
        if i == 41:
            {at_41}
        return "document %d" % i


def source():
    return grain.MapDataset.source(Texts())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at_41", "timeout_s", "how"),
    [("os.kill(os.getpid(), 9)", 60.0, "died"), ("time.sleep(1000)", 4.0, "has not moved for 4 s")],
)
def test_a_document_that_no_loader_survives_is_found_and_skipped_or_named(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_41: str, timeout_s: float, how: str
) -> None:
    """A dead loader does not tell what it was reading: its run is cut into pieces until one document is
    left.
    """
    kind = how.partition(" ")[0]
    for name, line in (("bad", at_41), ("good", 'return ""')):
        (tmp_path / f"{name}_{kind}.py").write_text(RECORDS.format(at_41=line))
    monkeypatch.syspath_prepend(str(tmp_path))

    def dataset(name: str, policy: Literal["skip", "fail"]) -> TextDataset:
        source = Source(path=f"{name}_{kind}:source", format="grain")
        spec = PackedText(
            sources={"a": source}, seq_len=16, global_batch=8, eval_fraction=0.0, on_bad_record=policy
        )
        return open_dataset(spec, seed=1)

    rows = np.arange(8)
    want = InlinePlane(work(dataset("good", "fail"), rows, epochs=1), None)
    plane = ray_plane(work(dataset("bad", "skip"), rows, epochs=1), "skip", read_timeout_s=timeout_s)
    try:
        batches = list(iter_batches(plane))
        for got, expected in zip(batches, iter_batches(want), strict=True):
            for field, array in expected.arrays.items():
                np.testing.assert_array_equal(got.arrays[field], array)
        assert batches[-1].state.skipped.tolist() == [1]
    finally:
        plane.close()
    plane = ray_plane(work(dataset("bad", "fail"), rows, epochs=1), "fail", read_timeout_s=timeout_s)
    (number,) = np.flatnonzero(dataset("bad", "fail").streams[0].locate(np.arange(100)).record == 41).tolist()
    with pytest.raises(
        DataError, match=f"a loader {how}.* at data.sources.a, document {number}[ ,].*again and again"
    ):
        list(iter_batches(plane))
    plane.close()
    until(lambda: not actors_left(cluster))


@pytest.mark.slow
def test_a_killed_trainer_leaves_nothing_behind(cluster: Any, spec: PackedText) -> None:
    """Ray ends the actors that belonged to the dead trainer."""
    code = (
        "import sys, time\n"
        "from jtrain.data import PackedText, Source, open_dataset\n"
        f"spec = PackedText(path={spec.sources['a'].path!r}, seq_len=64, global_batch=8, engine='ray')\n"
        "batches = open_dataset(spec, seed=1).train_batches()\n"
        "next(batches)\n"
        "print('ready', flush=True)\n"
        "time.sleep(1000)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "ready\n"
        assert actors_left(cluster)
        trainer.kill()
    until(lambda: not actors_left(cluster))


@pytest.mark.slow
def test_two_jax_processes_train_on_it_as_one_process_does_without(cluster: Any, tmp_path: Path) -> None:
    """launch/local.sh -n 2 gives the losses of one process that reads inline."""
    losses = {}
    for name, options in {
        "inline": ["--emulate-devices", "2", "--set", "data.engine=inline"],
        "ray": ["--emulate-devices", "1", "--set", "data.engine=ray"],
    }.items():
        command = [
            str(ROOT / "launch/local.sh"),
            *(["-n", "2"] if name == "ray" else []),
            "--config=tiny",
            *options,
        ]
        command += ["--set", "mesh.data=2", "--set", "num_steps=2", "--workdir", str(tmp_path / name)]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHON": sys.executable},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [row["loss_nats"] for row in map(json.loads, lines) if "loss_nats" in row]
    assert len(losses["ray"]) == 2
    np.testing.assert_allclose(losses["ray"], losses["inline"], rtol=1e-6)
    until(lambda: not actors_left(cluster))


@pytest.mark.slow
def test_the_stream_survives_the_loss_of_a_node(cluster: Any, spec: PackedText) -> None:
    """The loaders of the node are restarted on the other one. Must be the last test, since the node stays
    dead.
    """
    import ray

    dataset = open_dataset(spec, seed=4)
    want = InlinePlane(work(dataset, np.arange(8)), None)
    plane = ray_plane(work(dataset, np.arange(8)), "node")
    try:
        for _ in range(5):
            assert_same(plane.take(), want.take())
        here = ray.get_runtime_context().get_node_id()
        there = next(node for node in cluster.list_all_nodes() if node.node_id != here)
        before = plane.actors()
        lost = [name for name, (_, node) in before.items() if node == there.node_id]
        assert any(name.startswith("loader") for name in lost)
        there.kill_raylet()
        for _ in range(60):
            assert_same(plane.take(), want.take())
        after = until(lambda: everyone(plane))
        assert {node for _, node in after.values()} == {here}
        assert all(after[name] != before[name] for name in lost)
    finally:
        plane.close()
    until(lambda: not actors_left(cluster))
