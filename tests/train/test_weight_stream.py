"""Weights sent to readers while a run trains: those of its checkpoints, and none of a reader's troubles stops it."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fiddle as fdl
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jtrain.config import tree
from jtrain.config.load import load_config
from jtrain.config.run import Run, build_run, run_layout
from jtrain.config.weight_stream_spec import read_token
from jtrain.errors import FileError, UserError
from jtrain.hf import workdirs
from jtrain.hf.weight_folder import LATEST, write_step
from jtrain.hf.weight_link import WeightReader, send_weights
from jtrain.layout.mesh import make_mesh
from jtrain.plan.from_run import make_optimizer
from jtrain.runtime.link import meeting, protocol, socket_link
from jtrain.runtime.link.protocol import LinkError
from jtrain.runtime.stores import workdir_path
from jtrain.step.state import TrainState, init_state
from jtrain.telemetry import metrics
from jtrain.train import attempt
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


def train(workdir: Path, *sets: str, fiddlers: tuple[str, ...] = ("stream",)) -> list[float]:
    """Losses of a run's steps."""
    config, run = run_of("mesh.data=1", *sets, fiddlers=fiddlers)
    devices = jax.devices()[: run.mesh.size]
    assert attempt.train(run, workdir=workdir, config_text=tree.flat(config), devices=devices) == 0
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


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=[pytest.mark.slow] * (n != "zero 3")) for n in LAYOUTS]
)
def test_a_folder_gets_the_weights_of_checkpoints(layout: str, tmp_path: Path) -> None:
    """Bit for bit those that an export writes, by the same names; the newest two are kept, and `latest` names one."""
    train(tmp_path / "run", *STREAM, *LAYOUTS[layout])
    weights = tmp_path / "run" / "weights"
    assert sorted(path.name for path in weights.iterdir()) == [LATEST, "step-00000004", "step-00000006"]
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
    with WeightReader("127.0.0.1:0", token_file) as reader:
        thread = threading.Thread(target=lambda: received.extend(reader))
        thread.start()
        losses = train(tmp_path / "run", *to_port(reader.port, token_file), "weight_stream.every_steps=6")
        reader.close()
        thread.join()
    ((step, tensors),) = received
    assert step == 6
    assert_same(tensors, exported(tmp_path / "run", 6, tmp_path / "out"))
    assert losses[-1] < losses[0] - 0.01


@pytest.fixture(scope="module")
def first_state() -> tuple[Any, Any, TrainState]:
    """Layout, mesh and first state of the small run on one device."""
    _, run = run_of("mesh.data=1")
    layout, mesh = run_layout(run), make_mesh(run.mesh, jax.devices()[:1])
    return layout, mesh, init_state(layout, make_optimizer(run), mesh, seed=0)


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


def test_a_reader_that_takes_nothing_is_given_up(token_file: str) -> None:
    """After the deadline of a frame: 8 MiB do not fit into the buffers of a connection."""
    token = read_token(token_file)
    with meeting.listen(("127.0.0.1", 0)) as listening:

        def shake_hands() -> None:
            connection, _ = listening.accept()
            connections.append(connection)
            socket_link.converse(connection, protocol.answering(token, 1, processes=2))

        connections: list[socket.socket] = []
        thread = threading.Thread(target=shake_hands)
        thread.start()
        tensors = iter([(f"t{number}", np.zeros(1 << 20, np.float32)) for number in range(8)])
        with pytest.raises(LinkError, match=r"were not taken in 0\.3 s"):
            send_weights(listening.getsockname(), token, 1, tensors, count=8, silence_s=0.3)
        thread.join()
        connections[0].close()


def test_a_set_that_breaks_off_and_a_stranger_yield_nothing(token_file: str) -> None:
    """The set behind them comes whole, in bfloat16 and with tensors of no element."""
    sent = {
        "a": np.arange(600_000, dtype=np.float32).reshape(2, -1),
        "b": np.arange(6).astype(ml_dtypes.bfloat16),
        "c": np.zeros((0, 3), np.float32),
    }
    with WeightReader("127.0.0.1:0", token_file) as reader:
        address, token, weights = ("127.0.0.1", reader.port), read_token(token_file), iter(reader)
        received: list[Any] = []
        thread = threading.Thread(target=lambda: received.append(next(weights)))
        thread.start()

        def breaks_off() -> Iterator[tuple[str, np.ndarray]]:
            yield "a", sent["a"]
            raise RuntimeError

        with pytest.raises(RuntimeError):
            send_weights(address, token, 1, breaks_off(), count=3)
        with pytest.raises(LinkError):
            send_weights(address, b"another secret of 32 bytes or so", 2, iter(sent.items()), count=3)
        send_weights(address, token, 3, iter(sent.items()), count=3)
        thread.join()
    ((step, tensors),) = received
    assert step == 3
    for name, array in sent.items():
        assert (tensors[name].dtype, tensors[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(tensors[name], array)


def test_a_disk_that_cannot_be_written_to_costs_a_line(first_state: Any, tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("a file where the folder would be")
    stream, said = stream_to(first_state, tmp_path)
    with stream:
        stream.send(3, first_state[2].params, is_last=True)
    assert said[0].startswith("WARNING: the weights of step 3 have not come to weights (")


def test_a_step_is_whole_before_the_name_of_the_newest_changes(tmp_path: Path) -> None:
    """What a killed write left, and steps that the run has gone back from, are removed."""

    def write(path: Path) -> None:
        path.mkdir()
        (path / "model").write_text(path.name)

    def fails(path: Path) -> None:
        raise OSError("no room")

    for step in (10, 20, 30):
        write_step(tmp_path, step, write, keep_last=3)
    (tmp_path / "step-00000040.tmp").mkdir()
    with pytest.raises(OSError, match="no room"):
        write_step(tmp_path, 40, fails, keep_last=3)
    assert (tmp_path / LATEST).read_text() == "step-00000030\n"
    with pytest.raises(OSError, match="no room"):
        write_step(tmp_path, 25, fails, keep_last=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000020"]
    write_step(tmp_path, 25, write, keep_last=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [LATEST, "step-00000020", "step-00000025"]
    assert (tmp_path / LATEST).read_text() == "step-00000025\n"


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
