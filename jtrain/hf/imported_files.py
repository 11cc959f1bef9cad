"""Files of a model directory that an import keeps beside its weights; an export changes only what training
did.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jtrain.errors import UserError
from jtrain.hf.directory import write_json
from jtrain.hf.mapping import DTYPES
from jtrain.hf.model_config import family_in, model_differences, model_from_config
from jtrain.hf.model_files import CONFIG, GENERATION, parse_json
from jtrain.model.families.family import Family
from jtrain.model.transformer import Transformer

FOLDER = "imported"
"""Folder of a workdir that holds these files."""

_DTYPE_FIELDS = "dtype", "torch_dtype"
_IDS = "bos_token_id", "eos_token_id", "pad_token_id"
_LENGTH = "max_position_embeddings"
# Dtypes are the export's; quantised weights and code of its own it does not have.
_NOT_KEPT = *_DTYPE_FIELDS, "quantization_config", "auto_map"


@dataclasses.dataclass(frozen=True)
class ImportedFiles:
    """Contents of files of the directory.

    config: config.json, or the part of it that was imported.
    generation: generation_config.json; empty if there was none.
    """

    config: Mapping[str, Any]
    generation: Mapping[str, Any]

    def write(self, workdir: Path) -> None:
        """Writes them into a workdir."""
        (workdir / FOLDER).mkdir(exist_ok=True)
        write_json(workdir / FOLDER / CONFIG, self.config)
        if self.generation:
            write_json(workdir / FOLDER / GENERATION, self.generation)

    @classmethod
    def read(cls, workdir: Path) -> "ImportedFiles":
        """Reads those of a workdir; empty ones if it did not begin with an import.

        Raises:
          UserError: a file is not a JSON object.
        """
        files = (workdir / FOLDER / name for name in (CONFIG, GENERATION))
        config, generation = (
            parse_json(str(file), file.read_bytes()) if file.exists() else {} for file in files
        )
        return cls(config, generation)

    @property
    def dtype(self) -> str | None:
        """Dtype of the directory's weights, if an export can have it."""
        dtype_name = next((self.config[field] for field in _DTYPE_FIELDS if field in self.config), None)
        return dtype_name if dtype_name in DTYPES else None

    def family_of(self, model: Transformer) -> Family | None:
        """The directory's family, if a run has still the directory's model."""
        try:
            is_same = bool(self.config) and not model_differences(model_from_config(self.config), model)
        except UserError:
            return None
        return family_in(self.config) if is_same else None

    def config_with(self, written: dict[str, Any], *, is_same_model: bool) -> dict[str, Any]:
        """Returns the config.json of an export.

        Args:
          written: from `config_from_model`.
        """
        if not is_same_model:
            return written | {field: self.config[field] for field in _IDS if field in self.config}
        fields = {field: value for field, value in self.config.items() if field not in _NOT_KEPT}
        length = max(written[_LENGTH], fields.get(_LENGTH) or 0)
        ours = {field: written[field] for field in ("architectures", "torch_dtype")}
        return fields | ours | {_LENGTH: length}
