"""Weights sent to readers while a run trains: `weight_stream` of the config.

The steps wait while whole weights are copied to the memory of process 0, a layer of one parameter at a time,
and for nothing else: a thread writes or sends the copy. While it is at work further weights are left out, and
so are those that no reader takes or no disk has room for; each loss is a line of the log, and none ends the
run. A process 0 without memory for the copy does: `WeightStream.line` says how much it takes.
"""

import functools
import math
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jtrain.config.run import Run
from jtrain.config.weight_stream_spec import read_token
from jtrain.errors import UserError
from jtrain.hf.files_beside import FilesBeside
from jtrain.hf.mapping import DTYPES, tensors_of, to_hf
from jtrain.hf.peft_folders import filled_tensors, write_adapter
from jtrain.hf.peft_tensors import adapter_tensors
from jtrain.hf.weight_folder import check_owner, write_step
from jtrain.hf.weight_link import send_weights
from jtrain.layout.dims import ADAPTER, ParamInfo
from jtrain.layout.layout import Layout
from jtrain.model.adapters.lora import model_infos
from jtrain.model.adapters.merge import merge
from jtrain.model.param import Params, at_path, map_params
from jtrain.report.number_formats import gib
from jtrain.runtime.link.protocol import LinkError
from jtrain.runtime.multihost import from_process_zero, process_index
from jtrain.runtime.stores import in_store, workdir_path
from jtrain.train.restart_point import replicate

LAST_S = 60.0
"""Seconds that the end of a run waits for the last weights to be written or taken."""

RETRY_S = 1.0
"""Seconds between two calls of a reader that has not taken the last weights."""


class WeightStream:
    """Copies weights and has them written or sent; every process calls `send` at the same steps.

    with WeightStream(run, layout, mesh, workdir, say=print) as stream:
        stream.send(step, state.params)

    Args:
      workdir: folder of the run.
      say: prints a line; called in a thread too.

    Attributes:
      say: as given; a run replaces it once it has a log.

    Raises:
      FileError: the file of the token cannot be read.
      UserError: no family of Hugging Face has names for the model, peft none for a target of the adapter, a
        folder of weights would be in a store, or it is of another run.
    """

    def __init__(
        self, run: Run, layout: Layout, mesh: Mesh, workdir: Path | str, *, say: Callable[[str], None]
    ) -> None:
        assert run.weight_stream is not None
        self._workdir = workdir = workdir_path(str(workdir))
        self._spec, self._run, self.say = run.weight_stream, run, say
        self._layout, self._mesh = layout, mesh
        self._infos = run.param_infos()
        if self._spec.address is None and in_store(workdir) and not Path(self._spec.to).is_absolute():
            raise UserError(
                f"weight_stream.to={self._spec.to} would be in --workdir {workdir}, a store, and weights "
                "are written to a disk. Set weight_stream.to to an absolute path, or to tcp://HOST:PORT."
            )
        to = Path(self._spec.to)
        self._folder = to if to.is_absolute() else workdir / to
        self._files = FilesBeside.of(run, workdir, dtype=self._spec.dtype)
        self._dtype = self._files.dtype
        self._adapter_tensors = (
            adapter_tensors(run.model, run.adapter, self._files.family, joins_experts=False)
            if self._spec.only_adapter and run.adapter is not None
            else None
        )
        self._token = self._admit()
        self._thread: threading.Thread | None = None
        self._is_left = threading.Event()
        replicated = NamedSharding(mesh, P())
        self._layer = jax.jit(self._merge_layer, static_argnums=0, out_shardings=replicated)

    def __enter__(self) -> "WeightStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        # A run that is stopped or fails waits for no reader.
        if kind is not None:
            self.leave()
        if not self._is_left.is_set():
            self.wait()
        elif self._is_busy():
            self.say(f"weight_stream: weights that are on their way to {self._spec.to} are left with the run")

    def _admit(self) -> bytes:
        """Checks the reader's token or the folder; returns the token, b"" in processes that send nothing."""
        token, refusal = b"", None
        # Process 0 alone writes and sends: the others' hosts need neither.
        if process_index() == 0:
            try:
                if self._spec.token_file is not None:
                    token = read_token(self._spec.token_file)
                elif not in_store(self._folder):
                    check_owner(self._folder, self._workdir)
            except UserError as error:
                refusal = error
        if not bool(from_process_zero(np.asarray(refusal is None))):
            raise refusal or UserError("process 0 refuses weight_stream: see its message.")
        return token

    def line(self) -> str:
        """Returns what a set takes of memory and disk, for the plan."""
        infos = [info for info in self._infos if info.is_adapter == self._spec.only_adapter]
        set_bytes = sum(math.prod(info.shape) for info in infos) * DTYPES[self._dtype].itemsize
        disk = ""
        if self._spec.address is None:
            # One more is written before the oldest is removed.
            disk = f", and up to {gib((self._spec.keep_last + 1) * set_bytes)} GiB of its disk"
        return (
            f"weight_stream.to={self._spec.to}: beside the plan, a set takes {gib(set_bytes)} GiB of the "
            f"memory of process 0{disk}"
        )

    def leave(self) -> None:
        """Has the end of the `with` wait for no weights: the run is stopped."""
        self._is_left.set()

    def send(self, step: int, params: Params, *, is_last: bool = False) -> None:
        """Copies the weights and begins to send them; a collective.

        Args:
          params: as `TrainState.params`.
          is_last: these are the last of the run: waits for earlier ones that are still on their way, instead
            of leaving these out, and calls a reader that does not take them again, for `LAST_S`.
        """
        if is_last:
            self.wait()
        # Process 0 alone knows, and all take part in the copy.
        if bool(from_process_zero(np.asarray(self._is_busy()))):
            if process_index() == 0:
                self.say(
                    f"weight_stream: the weights of step {step} are left out, as earlier ones are on their "
                    "way"
                )
            return
        weights = self._copy(params)
        if weights is not None:
            self._thread = threading.Thread(
                target=self._deliver, args=(step, weights, is_last), name="weight-stream", daemon=True
            )
            self._thread.start()

    def _is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Waits until the weights that were sent last are there, at most `LAST_S`."""
        if self._thread is None:
            return
        self._thread.join(LAST_S)
        if self._thread.is_alive():
            # Of a reader that takes a little now and then, or a disk that stands still.
            self.say(
                f"weight_stream: weights are still on their way to {self._spec.to} after {LAST_S:.0f} s, "
                "and are not waited for any longer"
            )

    def _deliver(self, step: int, weights: Params, is_last: bool) -> None:
        try:
            if self._spec.address is None:
                write_step(
                    self._folder,
                    step,
                    functools.partial(self._write, weights),
                    keep_last=self._spec.keep_last,
                    workdir=self._workdir,
                )
            else:
                self._send(self._spec.address, step, weights, retry_s=LAST_S if is_last else 0.0)
        except Exception as error:  # whatever happens to a reader or a disk, the run goes on
            self.say(
                f"WARNING: the weights of step {step} have not come to {self._spec.to} ({error}). "
                + ("They were the last." if is_last else "The run goes on, and sends the next ones.")
            )

    def _write(self, weights: Params, path: Path) -> None:
        run = self._run
        if self._adapter_tensors is None:
            self._files.write_with(weights, path)
            return
        assert run.adapter is not None
        names: Any = dict(dtype=self._dtype, base=run.adapter.base or "", family=self._files.family)
        write_adapter(path, weights, run.model, run.adapter, **names)

    def _send(self, address: tuple[str, int], step: int, weights: Params, *, retry_s: float) -> None:
        """Sends weights; calls a reader that does not take them again until `retry_s` are over."""
        until_s = time.monotonic() + retry_s
        while True:
            try:
                return self._send_once(address, step, weights)
            except LinkError as error:
                # Nobody listens: there is no reader that only works on earlier weights.
                if isinstance(error.__cause__, ConnectionRefusedError) or time.monotonic() >= until_s:
                    raise
                if self._is_left.wait(RETRY_S):
                    raise

    def _send_once(self, address: tuple[str, int], step: int, weights: Params) -> None:
        if self._adapter_tensors is not None:
            adapter = filled_tensors(weights, self._adapter_tensors, dtype=self._dtype)
            tensors, count = iter(adapter.items()), len(adapter)
        else:
            family = self._files.family
            tensors = to_hf(weights, self._run.model, dtype=self._dtype, family=family)
            count = len(tensors_of(self._run.model, family))
        send_weights(address, self._token, step, tensors, count=count)

    def _copy(self, params: Params) -> Params | None:
        """Returns whole weights in host memory, layers in the model's order, an adapter merged; None in
        processes other than the first.
        """
        infos = tuple(info for info in self._infos if info.is_adapter == self._spec.only_adapter)
        is_first = process_index() == 0
        arrays: dict[str, np.ndarray] = {}
        for info in infos:
            group = (info,) if self._spec.only_adapter else (info, *self._adapter_of(info))
            held = map_params(lambda part: at_path(params, part.path), group)
            host = np.empty(info.shape, DTYPES[self._dtype]) if is_first else None
            pipeline = self._layout.pipeline
            for layer in range(info.shape[0]) if info.is_stacked else (None,):
                row = layer if pipeline is None or layer is None else pipeline.order.index(layer)
                number = replicate(self._mesh, np.asarray(row or 0, np.int32))
                array = self._layer(group, held, number)
                if host is not None:
                    host[... if layer is None else slice(layer, layer + 1)] = jax.device_get(
                        array.addressable_data(0)
                    )
            if host is not None:
                arrays[info.path] = host
        if not is_first:
            return None
        return map_params(lambda info: arrays[info.path], infos)

    def _adapter_of(self, info: ParamInfo) -> tuple[ParamInfo, ...]:
        """A and B of a parameter, if it has an adapter."""
        return tuple(part for part in self._infos if part.path.rpartition(".")[0] == f"{info.path}{ADAPTER}")

    def _merge_layer(self, group: tuple[ParamInfo, ...], params: Params, row: jax.Array) -> jax.Array:
        """Row of a stacked parameter, [1, ...], with its adapter, or the whole of one that is not stacked."""

        def part(info: ParamInfo, value: Any) -> Any:
            if not info.is_stacked:
                return value
            layer = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1), value)
            return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), layer)

        layer = map_params(part, group, params)
        if group[0].is_adapter:
            return at_path(layer, group[0].path).astype(jnp.dtype(self._dtype))
        scale = self._layout.adapter_scale or 0.0
        return at_path(merge(group, layer, scale, lambda _: self._dtype), model_infos(group)[0].path)
