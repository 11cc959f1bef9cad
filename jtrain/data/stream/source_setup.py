"""Everything that a process needs to open a source."""

import dataclasses
from typing import Literal

from jtrain.data.sources.formats.masked_text import MaskFields
from jtrain.data.sources.generations import Generation
from jtrain.data.sources.source import Source, field_of
from jtrain.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceSetup:
    """Everything that a process needs to open a source, as plain values that can be sent to it.

    name: name of the source in `data.sources`.
    source: the source, with every default filled in.
    seed: seed of the run.
    chunk_tokens: most tokens of a chunk, `data.seq_len`. With `row_tokens` half of it: pieces of a sample
      that are cut between its turns are at least half a row on average, and each one needs a slot.
    row_tokens: most tokens of a piece of a sample, `data.seq_len`, where the rows hold whole samples; None
      for text that may be cut anywhere.
    chunk_bytes: most bytes of a chunk of a text that is tokenised during the run; None: found when it is
      opened.
    window_bytes: argument of `WindowedChunks` and `GrowingChunks`.
    eager_bytes, num_files: arguments of `Corpus`.
    generations: files that the run began with and those that joined it later; none: all files from the start.
    decoded_cache_bytes: decoded Parquet text that a process keeps, over all its sources.
    prepared: folder that `python -m jtrain.data prepare` wrote; None to read and tokenise documents during
      the run.
    """

    name: str
    source: Source
    tokenizer: str
    end_token: str | None
    seed: int
    eval_fraction: float
    on_bad_record: Literal["fail", "skip"]
    chunk_tokens: int
    chunk_bytes: int | None
    window_bytes: int
    eager_bytes: int | None
    decoded_cache_bytes: int
    cache_dir: str
    prepared: str | None
    row_tokens: int | None = None
    map_ids: bool = False
    """True if the ids of the prepared index are mapped, not read: `ChunkStream.read` then returns their
    places."""
    num_files: int | None = None
    generations: tuple[Generation, ...] = ()
    fingerprint: str | None = None
    """Fingerprint that the trainer found; a process that finds another one refuses the source. None: not
    known yet."""
    grouped: bool = False
    """True if loaders share the groups of the source; see `ChunkStream.is_grouped`."""

    def mask(self) -> MaskFields | None:
        """Returns what is learned of the records, with the chat template that writes them.

        Raises:
          UserError: the template cannot be read, or its texts would be cut.
        """
        mask = self.source.mask_with(self.tokenizer, self.end_token, name=self.name)
        is_template = mask is not None and not mask.rule.template.is_built_in
        if is_template and self.row_tokens is None and self.prepared is None:
            raise UserError(
                f"{field_of(self.name)}: data.packing='concat' cuts chats at row ends, and a part of the "
                "text of a chat template is no chat. Remove data.packing, or set chat_template='roles'."
            )
        return mask
