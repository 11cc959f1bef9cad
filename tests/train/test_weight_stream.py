"""Weights sent to readers while a run trains: those of its checkpoints, and none of a reader's troubles stops it."""

import contextlib
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fiddle as fdl
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jtrain.checkpoint.files import MANIFEST
from jtrain.config import tree
from jtrain.config.load import load_config
from jtrain.config.run import Run, build_run, build_run_optimizer, run_layout
from jtrain.config.weight_stream_spec import read_token
from jtrain.errors import FileError, UserError
from jtrain.hf import workdirs
from jtrain.hf.mapping import DTYPES
from jtrain.hf.weight_folder import LATEST, OWNER, check_owner, write_step
from jtrain.hf.weight_link import SCHEMA, WeightReader
from jtrain.layout.mesh import make_mesh
from jtrain.runtime.exit_codes import STOPPED
from jtrain.runtime.link import meeting, protocol, socket_link
from jtrain.runtime.link.socket_link import Link
from jtrain.runtime.stores import workdir_path
from jtrain.step.state import TrainState, init_state
from jtrain.telemetry import metrics
from jtrain.train import attempt
from jtrain.train.callbacks import Callback, DispatchedStep
from jtrain.train.weight_stream import WeightStream

SMALL = (
    "num_steps=6",
    "data.engine=inline",
    "eval.every_steps=None",
    "metrics.tensorboard=False",
    "metrics.log_every_steps=1",
    "checkpoint.every_steps=2",
    "checkpoint.keep_last=9",
    "optimizer.warmup_steps=0",
    "data.global_batch=4",
    "model.num_layers=3",
)
STREAM = ("weight_stream.every_steps=2", "weight_stream.keep_last=2")


def run_of(*sets: str, fiddlers: tuple[str, ...] = ("stream",)) -> tuple[fdl.Config[Run], Run]:
    config = load_config("tiny", ["debug", *fiddlers], [*SMALL, *sets])
    return config, build_run(config)


def train(
    workdir: Path, *sets: str, fiddlers: tuple[str, ...] = ("stream",), watchers: Sequence[Callback] = ()
) -> list[float]:
    """Losses of a run's steps."""
    config, run = run_of("mesh.data=1", *sets, fiddlers=fiddlers)
    devices = jax.devices()[: run.mesh.size]
    options: Any = dict(config_text=tree.flat(config), devices=devices, watchers=watchers)
    assert attempt.train(run, workdir=workdir, **options) == 0
    return [line["loss_nats"] for line in metrics.read(workdir / metrics.FILE) if "loss_nats" in line]


def to_port(port: int, token_file: str) -> tuple[str, str]:
    return f"weight_stream.to=tcp://127.0.0.1:{port}", f"weight_stream.token_file={token_file}"


def exported(workdir: Path, step: int, folder: Path, **options: Any) -> dict[str, np.ndarray]:
    workdirs.export(str(workdir), folder, step=step, dtype=None, **options)
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def assert_same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    assert first.keys() == second.keys()
    assert len(first) > 10
    for name, array in first.items():
        assert array.dtype == second[name].dtype
        np.testing.assert_array_equal(array, second[name], err_msg=name)


FOUR = "model.num_layers=4"
LAYOUTS = {
    "one": (),
    "zero 3": ("mesh.data=2", "mesh.tensor=2", "layout.zero_stage=3"),
    # Chunks in turn: a stage has layers that are not neighbours.
    "stages": (
        "mesh.stage=2",
        "layout.microbatches=2",
        "pipeline.schedule=interleaved",
        "pipeline.chunks=2",
        FOUR,
    ),
    "offload": ("layout.offload.params=1.0",),
}


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("token") / "token.txt"
    path.write_text("a secret of more than 16 bytes\n")
    return str(path)


class Patient(Callback):
    """Has the steps wait for weights that are on their way: none are left out on a slow disk."""

    def __init__(self, weights: Path, *, every_steps: int) -> None:
        self._weights, self._every_steps = weights, every_steps

    def on_step(self, dispatched: DispatchedStep) -> None:
        num_sets, steps_since = divmod(dispatched.step, self._every_steps)
        name = f"step-{num_sets * self._every_steps:08}\n"
        latest, until_s = self._weights / LATEST, time.monotonic() + 60
        while num_sets and steps_since and not (latest.is_file() and latest.read_text() == name):
            assert time.monotonic() < until_s, name
            time.sleep(0.01)


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=[pytest.mark.slow] * (n != "zero 3")) for n in LAYOUTS]
)
def test_a_folder_gets_the_weights_of_checkpoints(layout: str, tmp_path: Path) -> None:
    """Bit for bit those that an export writes, by the same names; the newest two are kept, and `latest` names one."""
    weights = tmp_path / "run" / "weights"
    train(tmp_path / "run", *STREAM, *LAYOUTS[layout], watchers=[Patient(weights, every_steps=2)])
    assert sorted(path.name for path in weights.iterdir()) == [
        LATEST,
        OWNER,
        "step-00000004",
        "step-00000006",
    ]
    assert (weights / LATEST).read_text() == "step-00000006\n"
    for step in (4, 6):
        streamed = load_file(weights / f"step-{step:08}" / "model.safetensors")
        assert_same(streamed, exported(tmp_path / "run", step, tmp_path / f"out{step}"))
    beside = {path.name for path in (tmp_path / "out6").iterdir()}
    assert {path.name for path in (weights / "step-00000006").iterdir()} == beside


@pytest.mark.slow
def test_losses_are_those_of_a_run_without_a_stream(tmp_path: Path) -> None:
    losses = train(tmp_path / "with", *STREAM, *LAYOUTS["zero 3"])
    assert losses == train(tmp_path / "without", *LAYOUTS["zero 3"], fiddlers=())
    assert losses[-1] < losses[0] - 0.01


@pytest.mark.slow
@pytest.mark.parametrize("base_dtype", ["None", "nf4"])
def test_an_adapter_is_merged_or_sent_alone(base_dtype: str, tmp_path: Path) -> None:
    sizes = ("model.d_model=128", "model.head_dim=32", "model.d_ff=128", f"adapter.base_dtype={base_dtype}")
    for sets, options in (((), {}), (("weight_stream.only_adapter=True",), dict(only_adapter=True))):
        workdir = tmp_path / f"run{len(sets)}"
        train(workdir, *STREAM, *sets, *sizes, "adapter.rank=2", "mesh.tensor=2", fiddlers=("stream", "lora"))
        (file,) = (workdir / "weights" / "step-00000006").glob("*.safetensors")
        assert_same(load_file(file), exported(workdir, 6, tmp_path / f"out{len(sets)}", **options))


def test_a_reader_gets_every_tensor_over_a_link(token_file: str, tmp_path: Path) -> None:
    """In a set that is whole; the run's losses are none of the reader's business."""
    received: list[tuple[int, dict[str, np.ndarray]]] = []
    is_saved: list[bool] = []

    def receive() -> None:
        for weights in reader:
            received.append(weights)
            is_saved.append((tmp_path / "run" / "checkpoints" / "6" / MANIFEST).is_file())

    with WeightReader("127.0.0.1:0", token_file) as reader:
        thread = threading.Thread(target=receive)
        thread.start()
        losses = train(tmp_path / "run", *to_port(reader.port, token_file), "weight_stream.every_steps=6")
        reader.close()
        thread.join()
    ((step, tensors),) = received
    assert step == 6
    assert is_saved == [True], "the last weights leave after the last save"
    assert_same(tensors, exported(tmp_path / "run", 6, tmp_path / "out"))
    assert losses[-1] < losses[0] - 0.01


@pytest.fixture(scope="module")
def first_state() -> tuple[Any, Any, TrainState]:
    """Layout, mesh and first state of the small run on one device."""
    _, run = run_of("mesh.data=1")
    layout, mesh = run_layout(run), make_mesh(run.mesh, jax.devices()[:1])
    return layout, mesh, init_state(layout, build_run_optimizer(run), mesh, seed=0)


def stream_to(first_state: Any, workdir: Path, *sets: str) -> tuple[WeightStream, list[str]]:
    said: list[str] = []
    layout, mesh, _ = first_state
    return WeightStream(run_of("mesh.data=1", *sets)[1], layout, mesh, workdir, say=said.append), said


def test_a_reader_that_is_not_there_costs_a_line(first_state: Any, token_file: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    stream, said = stream_to(first_state, tmp_path, *to_port(port, token_file))
    with stream:
        stream.send(3, first_state[2].params, is_last=True)
    (line,) = said
    assert line.startswith(f"WARNING: the weights of step 3 have not come to tcp://127.0.0.1:{port} (")


def test_weights_that_come_while_a_reader_is_silent_are_left_out(
    first_state: Any, token_file: str, tmp_path: Path
) -> None:
    """The steps do not wait for it: it has accepted, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        stream, said = stream_to(first_state, tmp_path, *to_port(silent.getsockname()[1], token_file))
        with stream:
            stream.send(1, first_state[2].params)
            caller, _ = silent.accept()
            stream.send(2, first_state[2].params)
            assert said == [
                "weight_stream: the weights of step 2 are left out, as earlier ones are on their way"
            ]
            caller.close()
            stream.wait()
    assert said[1].startswith("WARNING: the weights of step 1 have not come to tcp://")


@contextlib.contextmanager
def slow_reader(
    token_file: str, *, hang_ups: int = 0
) -> Iterator[tuple[int, threading.Event, threading.Event]]:
    """Port of a reader that hangs up so often, takes one set of weights and then works on it for ever.

    Yields:
      The port, an event that is set once it works, and one that ends its work.
    """
    is_working, may_end = threading.Event(), threading.Event()

    def serve() -> None:
        for _ in range(hang_ups):
            listening.accept()[0].close()
        with listening.accept()[0] as connection:
            connection.settimeout(5)
            handshake = protocol.answering(read_token(token_file), 1, processes=2)
            link = Link(connection, socket_link.converse(connection, handshake)[1])
            for _ in range(link.receive(SCHEMA)[1]["tensors"]):
                tensor = link.receive(SCHEMA)[1]
                for _ in link.receive_content(math.prod(tensor["shape"]) * DTYPES[tensor["dtype"]].itemsize):
                    pass
            with link.working():
                is_working.set()
                may_end.wait()
            link.send("taken")

    with meeting.listen(("127.0.0.1", 0)) as listening:
        listening.settimeout(30)  # of a test that fails before it calls
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield listening.getsockname()[1], is_working, may_end
        finally:
            may_end.set()
            thread.join()


class StopAt(Callback):
    """Sends SIGTERM to this process in step 2, once a reader works on the weights of step 1."""

    def __init__(self, is_working: threading.Event) -> None:
        self._is_working = is_working

    def on_step(self, dispatched: DispatchedStep) -> None:
        if dispatched.step == 2:
            assert self._is_working.wait(30)
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_stop_waits_for_no_reader(
    token_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever a reader does the state is saved, and no copy is made that the end of the process would drop."""
    with slow_reader(token_file) as (port, is_working, _):
        sets = ("mesh.data=1", "model.num_layers=1", "weight_stream.every_steps=1")
        config, run = run_of(*sets, *to_port(port, token_file))
        options: Any = dict(config_text=tree.flat(config), devices=jax.devices()[:1])
        assert attempt.train(run, workdir=tmp_path, watchers=[StopAt(is_working)], **options) == STOPPED
    (step,) = {int(path.name) for path in (tmp_path / "checkpoints").iterdir()} - {2}
    assert step == 3
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("weight_", "WARNING"))]
    assert lines == [
        f"weight_stream.to=tcp://127.0.0.1:{port}: beside the plan, a set takes 0.0003 GiB of the memory of process 0",
        "weight_stream: the weights of step 2 are left out, as earlier ones are on their way",
        f"weight_stream: weights that are on their way to tcp://127.0.0.1:{port} are left with the run",
    ]


def test_the_end_of_the_with_waits_for_the_weights(first_state: Any, tmp_path: Path) -> None:
    """Also where nobody has said that they are the last, as in a loop of one's own."""
    stream, said = stream_to(first_state, tmp_path)
    with stream:
        stream.send(3, first_state[2].params)
    assert names(tmp_path / "weights") == [LATEST, OWNER, "step-00000003"]
    assert said == []


def test_a_reader_that_hangs_up_is_called_again_for_the_last_weights(
    first_state: Any, token_file: str, tmp_path: Path
) -> None:
    """It may be at work on those before; nobody sends these anew."""
    with slow_reader(token_file, hang_ups=1) as (port, is_working, may_end):
        stream, said = stream_to(first_state, tmp_path, *to_port(port, token_file))
        with stream:
            stream.send(3, first_state[2].params, is_last=True)
            assert is_working.wait(30)
            may_end.set()
    assert said == []


def test_a_disk_that_cannot_be_written_to_costs_a_line(first_state: Any, tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("a file where the folder would be")
    stream, said = stream_to(first_state, tmp_path)
    with stream:
        stream.send(3, first_state[2].params, is_last=True)
    assert said[0].startswith("WARNING: the weights of step 3 have not come to weights (")
    assert said[0].endswith(" They were the last.")


def write_model(path: Path) -> None:
    path.mkdir()
    (path / "model").write_text(path.name)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_of_another_run_is_refused(first_state: Any, tmp_path: Path) -> None:
    """By its workdir: a run that begins again finds its own, and so does one that was moved with its folder."""
    folder = tmp_path / "policy"
    write_step(folder, 2, write_model, keep_last=2, workdir=tmp_path / "one")
    check_owner(folder, tmp_path / "one")
    with pytest.raises(
        UserError, match=r"the weights of another run, --workdir .*/one, and each run removes"
    ):
        stream_to(first_state, tmp_path / "two", f"weight_stream.to={folder}")
    with pytest.raises(UserError, match="the weights of another run"):
        write_step(folder, 4, write_model, keep_last=1, workdir=tmp_path / "two")
    assert names(folder) == [LATEST, OWNER, "step-00000002"]

    write_step(tmp_path / "one" / "weights", 2, write_model, keep_last=2, workdir=tmp_path / "one")
    (tmp_path / "one").rename(tmp_path / "moved")
    check_owner(tmp_path / "moved" / "weights", tmp_path / "moved")
    (folder / OWNER).unlink()
    (folder / OWNER).mkdir()
    with pytest.raises(FileError, match=r"policy/owner, which tells whose weights these are, cannot be read"):
        stream_to(first_state, tmp_path / "one", f"weight_stream.to={folder}")


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (("weight_stream.every_steps=0",), r"weight_stream\.every_steps=0 must be at least 1"),
        (("weight_stream.keep_last=0",), r"weight_stream\.keep_last=0 must be at least 1"),
        (("weight_stream.dtype=int8",), r"weight_stream\.dtype"),
        (("weight_stream.token_file=t",), r"weight_stream\.token_file='t': weights go to a folder"),
        (("weight_stream.to=s3://bucket/weights",), r"a reader is tcp://HOST:PORT with a port from 1"),
        (("weight_stream.to=tcp://host:7000",), r"weight_stream\.token_file=None: a reader is tcp"),
        (("weight_stream.to=tcp://host:70000", "weight_stream.token_file=t"), r"a port from 1 to 65535"),
        (
            ("weight_stream.only_adapter=True",),
            r"sends A and B of an adapter and nothing else, but adapter=None",
        ),
    ],
)
def test_a_stream_that_cannot_be_is_refused(sets: tuple[str, ...], why: str) -> None:
    with pytest.raises(UserError, match=why):
        run_of(*sets)


def test_a_token_must_be_a_secret(first_state: Any, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"weight_stream\.token_file=.*/none cannot be read"):
        stream_to(first_state, tmp_path, *to_port(7000, f"{tmp_path}/none"))
    (tmp_path / "short").write_text("secret")
    with pytest.raises(UserError, match=r"/short has 6 bytes, and a secret 16 or more"):
        WeightReader("127.0.0.1:0", f"{tmp_path}/short")


def test_a_folder_in_a_store_is_refused(first_state: Any) -> None:
    with pytest.raises(UserError, match=r"weight_stream\.to=weights would be in --workdir gs://"):
        stream_to(first_state, workdir_path("gs://runs/one"))
