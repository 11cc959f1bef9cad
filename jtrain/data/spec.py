"""Config of the data: sources, mixture, packing and the processes that read them."""

import dataclasses
import os
from typing import Literal, get_args

import numpy as np

from jtrain.data.mixture.schedule import Constant, Custom, Linear, Staged, own_weights
from jtrain.data.planner.packing import Packing
from jtrain.data.sources.file_parts import STRIPE_BYTES
from jtrain.data.sources.source import ONE_SOURCE, Source, field_of, is_source_name
from jtrain.data.stream.source_setup import SourceSetup
from jtrain.errors import UserError

_MOST_LOADERS = 16

_LEAST_STRIPES = 64
"""Stripes in the window of a source, however small its share."""

_CHOICES: dict[str, tuple[str, ...]] = {
    "on_bad_record": ("fail", "skip"),
    "packing": get_args(Packing),
    "mixture_unit": ("tokens", "samples", "rows"),
    "engine": ("processes", "inline"),
    "context_order": ("contiguous", "zigzag"),
}
"""Values of the fields that are names."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedText:
    """Text, tokenised, mixed and packed into rows.

    path: location of the source, for a run with one source; see `Source.path`.
    sources: sources by name, for a run with several.
    seq_len: tokens per row.
    global_batch: rows per step, over all devices.
    tokenizer: `bytes`, `bytes_chat` (bytes, marks of chats and a chat template), or the path of a Hugging
      Face `tokenizer.json`; a source may have its own.
    end_token: the token that ends a document, if the tokenizer's files do not name it.
    text_field: field of a record of `path` that holds its text; see `Source`.
    text_piece_bytes: length of the pieces of a text file at `path`, in bytes; see `Source`.
    mixture: the shares of the sources per step; the default uses each source's own weight.
    mixture_unit: the unit of the shares: tokens, samples (chunks: documents, or their parts of at most a
      row), or rows (each row then holds one source).
    packing: how chunks that are shorter than a row share rows: `concat` cuts them at row ends; `first_fit`
      and `best_fit` keep each one whole, and leave a part of the rows empty, about a thousandth in large
      batches. None: `best_fit` if a source has samples (`messages_field`, `prompt_field`, `mask_field`, or an
      adopted index with labels of -100; see `Source.on_too_long`), otherwise `concat`. By its name `concat`
      cuts samples too: the rest of a sample is then learned in another row, without its prompt.
    balance: order the rows of a step so that every rank gets about the same work; the contents of rows never
      change.
    context_order: the positions that a rank of the `context` axis gets: `zigzag` takes one block from the
      front and one from the back, so that every rank has the same causal attention work.
    epochs: how often each source is read; it then leaves the mixture, and the run ends with the last one.
      None: no end.
    eval_fraction: share of documents held out of training, chosen by a hash of file name and number; 0 for
      none.
    eval_batches: at most this many batches per evaluation, of the split and of each of `eval.sets`.
    on_bad_record: what to do with a document that cannot be read as text: stop, or skip and count.
    engine: `processes`: one constructor process and several loader processes per host, which share the
      reading with those of other hosts; `inline`: everything in the trainer.
    max_loaders: at most this many Source Loaders per host; None: one per core except one, up to 16. The
      autoscaler decides how many run.
    shadows: standby loaders, which take over from a loader that dies or hangs.
    read_timeout_s: a loader that needs longer than this for one document counts as hanging.
    prepared: a folder that `python -m jtrain.data prepare` wrote: nothing is tokenised during training.
    cache_dir: folder for copies of remote and compressed files.
    lookahead_steps: number of steps to read ahead.
    shuffle_window_bytes: decoded Parquet text kept for shuffling, over all sources; see `WindowedChunks`.
    """

    path: str | None = None
    sources: dict[str, Source] = dataclasses.field(default_factory=dict)
    seq_len: int
    global_batch: int
    tokenizer: str = "bytes"
    end_token: str | None = None
    text_field: str = "text"
    text_piece_bytes: int = 1 << 16
    mixture: Constant | Staged | Linear | Custom = dataclasses.field(default_factory=Constant)
    mixture_unit: Literal["tokens", "samples", "rows"] = "tokens"
    packing: Literal["concat", "first_fit", "best_fit"] | None = None
    balance: bool = True
    context_order: Literal["contiguous", "zigzag"] = "zigzag"
    epochs: int | None = None
    eval_fraction: float = 0.01
    eval_batches: int = 8
    on_bad_record: Literal["fail", "skip"] = "fail"
    engine: Literal["processes", "inline"] = "processes"
    max_loaders: int | None = None
    shadows: int = 1
    read_timeout_s: float = 60.0
    prepared: str | None = None
    cache_dir: str = "~/.cache/jtrain"
    lookahead_steps: int = 4
    shuffle_window_bytes: int = 1 << 28

    def __post_init__(self) -> None:
        # seq_len 2: a row of one token has no target.
        minimum_of = {"seq_len": 2, "global_batch": 1, "text_piece_bytes": 16, "eval_batches": 1, "epochs": 1}
        minimum_of |= {"max_loaders": 1, "shadows": 0, "lookahead_steps": 1, "shuffle_window_bytes": 1 << 16}
        for field, minimum in minimum_of.items():
            if (value := getattr(self, field)) is not None and value < minimum:
                raise UserError(f"data.{field}={value} must be at least {minimum}. Set data.{field}.")
        if not 0 <= self.eval_fraction < 1:
            raise UserError(
                f"data.eval_fraction={self.eval_fraction} must be at least 0 (nothing held out) and below 1. "
                "Set data.eval_fraction."
            )
        if not self.read_timeout_s > 0:
            raise UserError(
                f"data.read_timeout_s={self.read_timeout_s} must be above 0. Set data.read_timeout_s."
            )
        for field in _CHOICES:
            choices = _CHOICES[field]
            if (value := getattr(self, field)) not in choices and (field, value) != ("packing", None):
                raise UserError(f"data.{field}={value!r} must be one of {', '.join(map(repr, choices))}.")
        if (self.path is None) == (not self.sources):
            both, way_out = (
                ("both are set", "data.path=None, or data.sources={}")
                if self.sources
                else ("neither is set", "data.path to a file, a folder, a glob, a URL or 'stdlib'")
            )
            raise UserError(
                f"data.path is for one source and data.sources for several, and {both}. Set {way_out}."
            )
        for name, source in self.named_sources.items():
            if not is_source_name(name) or (name == ONE_SOURCE and self.sources):
                raise UserError(
                    f"data.sources: {name!r} is not a valid name. Use letters, digits, _ and -, no digit "
                    f"first; not {ONE_SOURCE!r}, which is the name of the source at data.path."
                )
            source.check(name)
            self.check_pairs(name, source)
            if source.message_weights and self.prepared is not None:
                raise UserError(
                    f"{field_of(name)}.message_weights=True, but data.prepared={self.prepared!r} holds "
                    "token ids without weights. Set data.prepared=None, or "
                    f"{field_of(name)}.message_weights=False."
                )
            # An adopted index may hold samples, which is known when it is open.
            if self.prepared is None or source.mask is not None:
                self.check_samples(name, source, has_samples=source.mask is not None)

    @property
    def has_pairs(self) -> bool:
        """True if the samples are preference pairs, those of all sources."""
        return any(source.rejected_field is not None for source in self.named_sources.values())

    def check_pairs(self, name: str, source: Source) -> None:
        """Refuses pairs beside other samples, cut or prepared."""
        field, rejected = field_of(name), source.rejected_field
        if (rejected is not None) != self.has_pairs:
            raise UserError(
                f"{field}.rejected_field={rejected!r}, and data.sources have "
                f"{'preference pairs' if self.has_pairs else 'none'}: a run has pairs in all sources or in "
                f"none. Set {field}.rejected_field, or remove it, or leave the source out."
            )
        if rejected is not None and self.packing == "concat":
            raise UserError(
                f"{field}.rejected_field={rejected!r} has pairs, which are whole, but data.packing='concat' "
                "cuts them at row ends. Remove data.packing."
            )
        if rejected is not None and self.prepared is not None:
            raise UserError(
                f"{field}.rejected_field={rejected!r}: an index of prepared tokens holds no preference "
                "pairs. Set data.prepared=None."
            )

    def check_samples(self, name: str, source: Source, *, has_samples: bool) -> None:
        """Refuses a rule for long samples of a source without samples, or whose samples are cut anywhere.

        Args:
          has_samples: see `ChunkStream.has_samples`.
        """
        if source.on_too_long == "split_turns":
            return
        field = field_of(name)
        if not has_samples:
            raise UserError(
                f"{field}.on_too_long={source.on_too_long!r} is for samples, and text may be cut anywhere. "
                f"Set {field}.messages_field, prompt_field or mask_field, or remove it."
            )
        if self.packing == "concat":
            raise UserError(
                f"{field}.on_too_long={source.on_too_long!r} keeps samples whole, but data.packing='concat' "
                "cuts them at row ends. Remove one of the two."
            )

    def packing_of(self, *, has_samples: bool) -> Packing:
        """Returns the packing of the rows of some sources, of which one has samples or none."""
        return self.packing or ("best_fit" if has_samples else "concat")

    def cut_of(self, *, has_samples: bool) -> tuple[int, int | None]:
        """Returns `chunk_tokens` and `row_tokens` of the setup of a source with samples, or without."""
        if not has_samples or self.packing == "concat":
            return self.seq_len, None
        # Half a row, rounded up: see `SourceSetup.chunk_tokens`.
        return -(-self.seq_len // 2), self.seq_len

    @property
    def has_weights(self) -> bool:
        """True if the targets of a batch have weights."""
        return any(source.message_weights for source in self.named_sources.values())

    @property
    def named_sources(self) -> dict[str, Source]:
        """All sources by name; the source at `path` is called `data`."""
        if self.path is None:
            return self.sources
        source = Source(path=self.path, text_field=self.text_field, text_piece_bytes=self.text_piece_bytes)
        return {ONE_SOURCE: source}

    @property
    def path_fields(self) -> str:
        """Setting that says where the data is, for messages."""
        return (
            f"the paths of the {len(self.sources)} data.sources"
            if self.path is None
            else f"data.path={self.path!r}"
        )

    def setups(self, *, seed: int) -> tuple[SourceSetup, ...]:
        """Returns the settings with which a process opens each source."""
        sources = self.named_sources
        weights = own_weights(self.mixture, {name: source.weight for name, source in sources.items()})
        shares = weights.weights(0, tuple(sources))
        # All may be 0: a schedule need not begin with any of them.
        shares = shares / max(float(shares.sum()), 1e-30)
        # A step draws its rows from the windows of all sources, each by its share: windows in these shares
        # mix the steps of many sources as well as one window of all these bytes mixes those of one source.
        windows = np.maximum(
            shares * self.shuffle_window_bytes, min(self.shuffle_window_bytes, _LEAST_STRIPES * STRIPE_BYTES)
        )
        return tuple(
            SourceSetup(
                name=name,
                source=source,
                tokenizer=source.tokenizer or self.tokenizer,
                # data.end_token names a token of data.tokenizer; another tokenizer has its own.
                end_token=self.end_token if (source.tokenizer or self.tokenizer) == self.tokenizer else None,
                seed=seed,
                eval_fraction=self.eval_fraction,
                on_bad_record=self.on_bad_record,
                chunk_tokens=self.cut_of(has_samples=source.mask is not None)[0],
                row_tokens=self.cut_of(has_samples=source.mask is not None)[1],
                chunk_bytes=None,
                window_bytes=int(window_bytes),
                # Counted epochs need the number of chunks, so every file is opened at the start.
                eager_bytes=self.shuffle_window_bytes if self.epochs is None else None,
                decoded_cache_bytes=self.shuffle_window_bytes,
                cache_dir=os.path.expanduser(self.cache_dir),
                prepared=self.prepared,
            )
            for (name, source), window_bytes in zip(sources.items(), windows.tolist(), strict=True)
        )

    def num_loaders(self) -> int:
        """Returns the largest number of loaders per host."""
        return self.max_loaders or max(1, min(_MOST_LOADERS, (os.cpu_count() or 2) - 1))
