"""What a run reads, as its config says it."""

import dataclasses
import os
from typing import Literal

from jtrain.data.documents import SourceSetup
from jtrain.data.schedule import Constant, Custom, Linear, Staged
from jtrain.data.source import ONE_SOURCE, Source

_MOST_LOADERS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedText:
    """Text, tokenised, mixed and packed into rows.

    path: for a run with one source, where it is; see `Source.path`.
    sources: for a run with several, each by its name.
    seq_len: tokens per row.
    global_batch: rows per step, over all devices.
    tokenizer: `bytes`, or the path of a Hugging Face `tokenizer.json`; a source may have another.
    end_token: the token that ends a document, where the tokenizer's files do not say.
    text_field, text_piece_bytes: of `path`; see `Source`.
    mixture: the shares of the sources, step by step; as they stand, each source's own weight.
    mixture_unit: what the shares are shares of: tokens, samples (documents), or rows (each then of one source alone).
    packing: `concat` cuts documents where a row ends; `first_fit` and `best_fit` keep them whole where they fit into a
      row at all, and leave about a thousandth of it empty.
    balance: order the rows of a step so that every rank gets about the same work; which rows they are never changes.
    context_order: which positions a rank of the `context` axis gets: `zigzag` takes one block from the front and one
      from the back, so that causal attention is the same work on each.
    epochs: times each source is read; then it leaves the mixture, and when all have, the run ends. None: without end.
    eval_fraction: documents held out of training, chosen by a hash of file name and number; 0 for none.
    eval_batches: batches of an evaluation, at most.
    on_bad_record: what to do with a document that cannot be read as text: stop, or skip and count.
    engine: `processes`: a constructor and loaders of their own on each host; `ray`: the same as Ray actors; `inline`:
      everything in the trainer.
    max_loaders: Source Loaders per host, at most; None for one per core but one, up to 16. How many there are at a time
      the autoscaler decides.
    shadows: standbys that take over from a loader that has died or hangs.
    read_timeout_s: a loader that stays so long at one document hangs.
    prepared: a folder that `python -m jtrain.data prepare` wrote: nothing is tokenised while training.
    cache_dir: where copies of remote and compressed files are kept.
    lookahead_steps: steps that are read ahead.
    shuffle_window_bytes: Parquet text held decoded for shuffling, over all sources; see `Order`.
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
    packing: Literal["concat", "first_fit", "best_fit"] = "concat"
    balance: bool = True
    context_order: Literal["contiguous", "zigzag"] = "zigzag"
    epochs: int | None = None
    eval_fraction: float = 0.01
    eval_batches: int = 8
    on_bad_record: Literal["fail", "skip"] = "fail"
    engine: Literal["processes", "ray", "inline"] = "processes"
    max_loaders: int | None = None
    shadows: int = 1
    read_timeout_s: float = 60.0
    prepared: str | None = None
    cache_dir: str = "~/.cache/jtrain"
    lookahead_steps: int = 4
    shuffle_window_bytes: int = 1 << 28

    def __post_init__(self) -> None:
        least_of = {"seq_len": 2, "global_batch": 1, "text_piece_bytes": 16, "eval_batches": 1, "epochs": 1}
        least_of |= {"max_loaders": 1, "shadows": 0, "lookahead_steps": 1, "shuffle_window_bytes": 1 << 16}
        for field, least in least_of.items():
            if (value := getattr(self, field)) is not None and value < least:
                raise ValueError(f"data.{field}={value} must be at least {least}. Set data.{field}.")
        if not 0 <= self.eval_fraction < 1:
            raise ValueError(
                f"data.eval_fraction={self.eval_fraction} must be at least 0 (nothing held out) and below 1. "
                "Set data.eval_fraction."
            )
        if not self.read_timeout_s > 0:
            raise ValueError(f"data.read_timeout_s={self.read_timeout_s} must be above 0.")
        for field in ("on_bad_record", "packing", "mixture_unit", "engine", "context_order"):
            choices = PackedText.__annotations__[field].__args__
            if (value := getattr(self, field)) not in choices:
                raise ValueError(f"data.{field}={value!r} must be one of {', '.join(map(repr, choices))}.")
        if (self.path is None) == (not self.sources):
            both = "both are set" if self.sources else "neither is set"
            raise ValueError(f"data.path is for one source and data.sources for several, and {both}. Set one of them.")
        for name, source in self.named_sources.items():
            if not name.replace("-", "_").isidentifier() or (name == ONE_SOURCE and self.sources):
                raise ValueError(
                    f"data.sources: {name!r} is no name: letters, digits, _ and -, no digit first, and not "
                    f"{ONE_SOURCE!r}, which is what data.path is called."
                )
            source.check(name)

    @property
    def named_sources(self) -> dict[str, Source]:
        """All sources by name; `path` is one called `data`."""
        if self.path is None:
            return self.sources
        source = Source(path=self.path, text_field=self.text_field, text_piece_bytes=self.text_piece_bytes)
        return {ONE_SOURCE: source}

    def setups(self, *, seed: int, windows: dict[str, int] | None = None) -> tuple[SourceSetup, ...]:
        """What a process needs to open each source. `windows`: a saved run's, so that its order goes on."""
        sources = self.named_sources
        share = self.shuffle_window_bytes // len(sources)
        return tuple(
            SourceSetup(
                name=name,
                source=source,
                tokenizer=source.tokenizer or self.tokenizer,
                end_token=self.end_token if (source.tokenizer or self.tokenizer) == self.tokenizer else None,
                seed=seed,
                eval_fraction=self.eval_fraction,
                on_bad_record=self.on_bad_record,
                window_bytes=(windows or {}).get(name, share),
                decoded_cache_bytes=self.shuffle_window_bytes,
                cache_dir=os.path.expanduser(self.cache_dir),
                prepared=self.prepared,
            )
            for name, source in sources.items()
        )

    def num_loaders(self) -> int:
        """Loaders per host, at most."""
        return self.max_loaders or max(1, min(_MOST_LOADERS, (os.cpu_count() or 2) - 1))
