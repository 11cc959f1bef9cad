"""Dataset of a run: opens the sources, splits off held-out documents, gives train and evaluation batches."""

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from jaxtyping import Int

from jtrain.data.chat.turns import compare_blocks
from jtrain.data.constructor.batch_state import DataState
from jtrain.data.constructor.constructor import ConstructorSetup
from jtrain.data.constructor.context_order import context_order
from jtrain.data.constructor.process import ProcessSetup
from jtrain.data.held_out import HeldOutSet
from jtrain.data.mixture.schedule import own_weights
from jtrain.data.plane.data_plane import InlinePlane, Plane, ProcessPlane
from jtrain.data.plane.iterator import BatchIterator, to_json
from jtrain.data.planner.packing import Packing
from jtrain.data.planner.planner import Planner, PlannerSpec
from jtrain.data.sources.file_parts import STRIPE_BYTES
from jtrain.data.sources.opening import opening_of
from jtrain.data.sources.shuffle import epoch_key
from jtrain.data.sources.source import field_of
from jtrain.data.spec import PackedText
from jtrain.data.stream.chunk_order import Chunks
from jtrain.data.stream.chunk_stream import ChunkStream
from jtrain.data.stream.growing_order import WindowAnchor
from jtrain.data.stream.saved_sources import Resumed, resume_source, running_setup, source_to_json, ways_out
from jtrain.data.stream.source_setup import SourceSetup
from jtrain.data.stream.windowed_order import WindowedChunks
from jtrain.errors import UserError
from jtrain.runtime import multihost
from jtrain.runtime.link.meeting import meet

_STATE_VERSION = 6
"""Version of the saved form; a state of another version is refused, as its batches could not be the same."""

SLOTS = 2
"""Batches that a constructor fills ahead in shared memory; the trainer's prefetch holds as many more."""

_PRELOAD = ("pyarrow.parquet", "tokenizers")
"""Modules that the forkserver imports once for all loaders, if opening the sources here has imported them."""

_MOST_LINES = 12
"""Number of sources that the plan lists one by one."""


def open_dataset(spec: PackedText, *, seed: int, say: Callable[[str], None] | None = None) -> "TextDataset":
    """Opens every source, and checks that both sides of the split fill at least one row.

    Reads only as much text as that check needs, except that JSON lines files are searched for line ends (1
    GB/s) and compressed or remote files are first copied into `data.cache_dir`.

    Args:
      say: called, in threads, with a line for the log from time to time while opening a source takes long.

    Raises:
      UserError: there is nothing or not enough to read; the message names field and numbers.
    """
    return TextDataset(spec, seed=seed, say=say)


class TextDataset:
    """Documents of all sources, as train and evaluation batches of packed rows.

    The tokens of batch k are a pure function of spec, seed and k; no thread, process, host or clock changes
    them.

    Attributes:
      names: names of the sources.
      tokenizer: the default tokenizer, for its ids and vocabulary.
      say: argument of `open_dataset`.
    """

    def __init__(self, spec: PackedText, *, seed: int, say: Callable[[str], None] | None = None) -> None:
        self.spec = spec
        self.say = say
        self.seed = seed
        setups = spec.setups(seed=seed)
        self.names = tuple(setup.name for setup in setups)
        self.streams = [self._open(setup) for setup in setups]
        # With what opening has found: a source of text estimates its chunk size then.
        self.setups = tuple(
            dataclasses.replace(stream.setup, chunk_bytes=stream.chunk_bytes, grouped=stream.is_grouped)
            for stream in self.streams
        )
        self.tokenizer = self.streams[0].tokenizer
        # After all sources are open: the check is of all together, one source may be smaller than a row.
        self._check_size("training")
        if spec.eval_fraction:
            self._check_size("evaluation")

    def _open(self, setup: SourceSetup) -> ChunkStream:
        stream = ChunkStream(setup, opening_of(setup.name, self.say))
        self.spec.check_samples(setup.name, setup.source, has_samples=stream.has_samples)
        if self.say is not None and setup.prepared is None:
            mask = setup.source.mask_with(setup.tokenizer, setup.end_token, name=setup.name)
            if mask is not None and (line := compare_blocks(mask.rule)):
                self.say(f"data: {field_of(setup.name)}: {line}")
        chunk_tokens, row_tokens = self.spec.cut_of(has_samples=stream.has_samples)
        if row_tokens == setup.row_tokens:
            return stream
        # An adopted index with labels: no field of the source says that its documents are samples.
        return stream.with_setup(dataclasses.replace(setup, chunk_tokens=chunk_tokens, row_tokens=row_tokens))

    @property
    def vocab_size(self) -> int:
        """Upper bound (exclusive) of the ids of all sources."""
        return max(stream.tokenizer.vocab_size for stream in self.streams)

    def fingerprint(self) -> str:
        """Returns a text that changes whenever the batches could."""
        return " ".join(stream.fingerprint() for stream in self.streams)

    def describe(self) -> str:
        """Returns a line for each source, for the plan of a run."""
        shares = self._schedule().weights(0, self.names)
        lines = []
        for name, stream, share in zip(self.names, self.streams, shares.tolist(), strict=True):
            head = stream.setup.source.path if self.spec.path is not None else f"{name} ({share:.1%})"
            documents = "documents" if stream.num_documents is None else f"{stream.num_documents:,} documents"
            lines.append(
                f"{head}: {documents} in {stream.num_files:,} files, "
                f"{stream.size_bytes / 2**20:,.1f} MiB, about {self.spec.eval_fraction:.2%} held out; "
                f"vocabulary {stream.tokenizer.vocab_size:,}"
            )
            if stream.prepared is not None and stream.prepared.num_skipped:
                lines[-1] += (
                    f"; {stream.prepared.num_skipped:,} bad documents were left out when it was prepared"
                )
            if num_long := stream.count_long_samples():
                rule = stream.setup.source.on_too_long
                lines[-1] += f"; {num_long:,} of them longer than a row (on_too_long={rule!r})"
        if len(lines) > _MOST_LINES:
            # Hundreds of sources would fill the screen.
            lines[_MOST_LINES:] = [f"... and {len(lines) - _MOST_LINES} more sources"]
        # Prepared sources have no corpus.
        corpora = [stream.corpus for stream in self.streams if stream.corpus is not None]
        lines += [corpus.left_out for corpus in corpora if corpus.left_out]
        lines += self._small_windows()
        return "\n".join(lines)

    def _small_windows(self) -> list[str]:
        """Returns a warning if a window of some source is smaller than one of its row groups."""
        largest = {
            name: stream.order.largest_part
            for name, stream, setup in zip(self.names, self.streams, self.setups, strict=True)
            if isinstance(stream.order, WindowedChunks) and stream.order.largest_part > setup.window_bytes
        }
        if not largest:
            return []
        largest_name = max(largest, key=lambda name: largest[name])
        largest_bytes = largest[largest_name]
        weights = self._schedule().weights(0, self.names)
        shares = dict(zip(self.names, (weights / weights.sum()).tolist(), strict=True))
        # Windows go by weight: the total that gives each of these sources a window of two row groups.
        enough = max(math.ceil(2 * size / max(shares[name], 1e-6)) for name, size in largest.items())
        return [
            f"data.shuffle_window_bytes={self.spec.shuffle_window_bytes} is too small for {len(largest)} of "
            f"{len(self.names)} sources ({largest_name}: row groups of up to {largest_bytes:,} bytes of "
            f"text, and a window of {self.setups[self.names.index(largest_name)].window_bytes:,} bytes): "
            "their rows are shuffled within one row group at a time, and such groups are kept in memory "
            f"whole. Set data.shuffle_window_bytes={enough}, or write smaller row groups."
        ]

    def train_batches(
        self,
        start_state: dict[str, Any] | None = None,
        *,
        first_step: int = 0,
        rows: Int[np.ndarray, " rows"] | None = None,
        context: int = 1,
        cost: tuple[float, float] = (1.0, 0.0),
        inline: bool = False,
    ) -> BatchIterator:
        """Starts the data plane; returns batches of `global_batch` rows, from the first or a saved state on.

        The iterator must be closed. A collective where processes have joined, as they divide the reading.

        Args:
          start_state: a state that `BatchIterator.state` returned; None starts from the first batch.
          first_step: step of the first batch if there is no state, for the schedule of the mixture.
          rows: rows of the global batch that this process needs; None for all.
          context: size of the mesh axis that splits rows.
          cost: cost of a token, and of a pair of a token and an earlier one in its document; used to balance
            rows.
          inline: reads in this thread, regardless of `data.engine`.

        Raises:
          UserError: the state was saved with another seed, source or tokenizer, so the batches would differ.
        """
        join_messages: list[str] = []
        if start_state is not None:
            resumed_sources = self._resume_sources(start_state)
            if isinstance(resumed_sources, str):
                raise UserError(resumed_sources)
            # Replaced in place: held-out sets share this list.
            self.streams[:] = [source.stream for source in resumed_sources]
            join_messages = [source.message for source in resumed_sources if source.message]
        setups = tuple(running_setup(stream) for stream in self.streams)
        planner = self._planner_spec(cost)
        change_messages: list[str] = []
        if start_state is not None:
            # A mixture may change at a resume; a source, its order or the seed may not.
            planner_state, change_messages = Planner(planner, _no_lengths).resume(start_state["planner"])
            counts = [start_state["skipped"].get(name, 0) for name in self.names]
            anchors = tuple(_anchor(start_state, name) for name in self.names)
            state = DataState(planner_state, np.asarray(counts, np.int64), anchors)
        else:
            state = self._start_state(planner, first_step)
        constructor_setup = ConstructorSetup(
            sources=setups,
            planner=planner,
            rows=np.arange(self.spec.global_batch) if rows is None else rows,
            column_order=context_order(self.spec.seq_len, context, self.spec.context_order)
            if context > 1
            else None,
            chunk_bytes=tuple(stream.mean_bytes for stream in self.streams),
            lookahead_steps=self.spec.lookahead_steps,
        )
        plane: Plane
        if inline or self.spec.engine == "inline":
            plane = InlinePlane(constructor_setup, state)
        else:
            listening, peers = (
                # Prepared sources need no division: each host reads what its rows need.
                meet() if multihost.is_joined() and self.spec.prepared is None else (None, None)
            )
            setup = ProcessSetup(
                constructor=constructor_setup,
                max_loaders=self.spec.num_loaders(),
                standbys=self.spec.shadows,
                read_timeout_s=self.spec.read_timeout_s,
                slots=SLOTS,
                state=state,
                peers=peers,
            )
            # Importing what no source needs would cost memory in every loader.
            preload = tuple(name for name in _PRELOAD if name in sys.modules)
            plane = ProcessPlane(setup, preload=preload, listening=listening, say=self.say)
        return BatchIterator(
            plane, state, self._identity(setups), self.names, join_messages + change_messages
        )

    def first_state(self) -> dict[str, Any]:
        """Returns the state before the first batch, without starting anything."""
        setups = tuple(running_setup(stream) for stream in self.streams)
        return to_json(self._start_state(self._planner_spec((1.0, 0.0))), self._identity(setups), self.names)

    def _start_state(self, planner: PlannerSpec, first_step: int = 0) -> DataState:
        # No lengths are needed to build a state.
        state = dataclasses.replace(Planner(planner, _no_lengths).start(), step=first_step)
        return DataState(state, np.zeros(len(self.names), np.int64), (None,) * len(self.names))

    def _identity(self, setups: tuple[SourceSetup, ...]) -> dict[str, Any]:
        """Returns the identity of the stream: the part of a saved state that must not change on resume."""
        return {
            "version": _STATE_VERSION,
            "seed": self.seed,
            "sources": {
                setup.name: source_to_json(setup, (stream.corpus or stream).names[-1])
                for setup, stream in zip(setups, self.streams, strict=True)
            },
        }

    def held_out(self) -> HeldOutSet:
        """Returns the documents that `data.eval_fraction` holds out, for evaluation.

        Raises:
          UserError: `data.eval_fraction` is 0.
        """
        if not self.spec.eval_fraction:
            raise UserError(
                "data.eval_fraction=0 holds out no documents for evaluation. Set data.eval_fraction."
            )
        return HeldOutSet(self.streams, self.spec, say=self.say)

    def _schedule(self) -> Any:
        weight_of_source = {name: source.weight for name, source in self.spec.named_sources.items()}
        return own_weights(self.spec.mixture, weight_of_source)

    @property
    def _packing(self) -> Packing:
        return self.spec.packing_of(has_samples=any(stream.has_samples for stream in self.streams))

    def _planner_spec(self, cost: tuple[float, float]) -> PlannerSpec:
        spec = self.spec
        return PlannerSpec(
            names=self.names,
            chunks_per_epoch=tuple(len(stream) for stream in self.streams),
            seq_len=spec.seq_len,
            global_batch=spec.global_batch,
            packing=self._packing,
            unit=spec.mixture_unit,
            schedule=self._schedule(),
            epochs=spec.epochs,
            # Not chunks times epochs: epochs get longer where files join.
            ends=None
            if (epochs := spec.epochs) is None
            else tuple(stream.order.numbers.first_of(epochs) for stream in self.streams),
            balance=spec.balance,
            cost_linear=cost[0],
            cost_quadratic=cost[1],
        )

    def resume_refusal(self, state: dict[str, Any]) -> str | None:
        """Returns why no stream can go on from a saved state, with the way out; None if one can."""
        resumed_sources = self._resume_sources(state)
        return resumed_sources if isinstance(resumed_sources, str) else None

    def _resume_sources(self, state: dict[str, Any]) -> list[Resumed] | str:
        """Returns the sources as they go on from a saved state, or why they cannot."""
        for key, expected in {"version": _STATE_VERSION, "seed": self.seed}.items():
            if state.get(key) != expected:
                way_out = (
                    "Finish the run with the jtrain that began it" if key == "version" else "Restore the seed"
                )
                return (
                    f"the data state was saved with {key}={state.get(key)!r}, but here it is {expected!r}: "
                    f"{ways_out(way_out)}"
                )
        # By its name another packing is meant; by default it changes with the first or last source of
        # samples.
        if (saved_packing := state["planner"]["packing"]) != self._packing and self.spec.packing is None:
            with_samples = [
                field_of(n) for n, s in zip(self.names, self.streams, strict=True) if s.has_samples
            ]
            reason = f"because {with_samples[0]} has" if with_samples else "as no source has"
            way_out = "Set data.packing to the one that is meant, with --allow-change data, to go on with it"
            return (
                f"the data state was saved with data.packing={saved_packing!r}, but here it is "
                f"{self._packing!r}, {reason} samples: {ways_out(way_out)}"
            )
        resumed_sources = []
        for name, stream in zip(self.names, self.streams, strict=True):
            # A source that is new in the config begins at its first document.
            if (saved := state["sources"].get(name)) is None:
                resumed_sources.append(Resumed(stream, ""))
                continue
            planner = state["planner"]
            source = resume_source(
                stream,
                saved,
                cursor=planner["sources"][name][0],
                anchor=_anchor(state, name),
                step=planner["step"],
                epochs=self.spec.epochs,
            )
            if isinstance(source, str):
                return source
            resumed_sources.append(source)
        return resumed_sources

    def _check_size(self, purpose: Literal["training", "evaluation"]) -> None:
        """Refuses a split that does not fill one row. Reads only as many documents as the check needs."""
        tokens = documents_left = 0
        for stream in self.streams:
            if purpose == "training":
                # epoch_key(0, 0): any fixed random order does, as this check is not part of the stream.
                records_at_random = stream.records_at_random(epoch_key(0, 0), most_bytes=1)
                record_batches = (r[~stream.held_out(r)] for r in records_at_random)
            else:
                record_batches = stream.held_out_records(most_bytes=STRIPE_BYTES)
            for records in record_batches:
                documents_left += len(records)
                # A few at a time: reading ends with the first full row.
                for start in range(0, len(records), 16):
                    chunks = stream.chunks_of(records[start : start + 16])
                    # At most 256 chunks: one document may be as long as a corpus.
                    tokens += len(stream.read_chunks(Chunks(*(array[:256] for array in chunks))).ids)
                    if tokens >= self.spec.seq_len:
                        return
        spec = self.spec
        way_out = (
            "or lower data.eval_fraction."
            if purpose == "training"
            else "raise data.eval_fraction, or set it to 0."
        )
        location = (
            f"data.path={spec.path!r} is"
            if spec.path is not None
            else f"the {len(self.names)} data.sources are"
        )
        raise UserError(
            f"{location} too small: data.eval_fraction={spec.eval_fraction} leaves {documents_left} "
            f"documents with {tokens} tokens for {purpose}, and one row needs data.seq_len={spec.seq_len}. "
            f"Add text, lower data.seq_len, {way_out}"
        )


def _anchor(state: dict[str, Any], name: str) -> WindowAnchor | None:
    """Returns the anchor of a source in a saved state, if it has one."""
    return WindowAnchor(*fields) if (fields := state["anchors"].get(name)) else None


def _no_lengths(source: int, first: int, count: int) -> Int[np.ndarray, " count"]:
    raise AssertionError("no step is planned with these lengths")
