"""Files of a model directory beside its weights: config.json, the tokenizer's files, the chat template."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jtrain.config.run import Run
from jtrain.config.trained_params import base_workdir
from jtrain.data import make_tokenizer
from jtrain.data.tokenizer_files import folder_of
from jtrain.hf.directory import write_directory
from jtrain.hf.imported_files import ImportedFiles
from jtrain.hf.model_config import config_from_model
from jtrain.model.families.family import Family
from jtrain.model.param import Params
from jtrain.model.transformer import Transformer


@dataclasses.dataclass(frozen=True)
class FilesBeside:
    """Files of a directory that do not change while a run trains.

    config: contents of config.json.
    dtype: of the weights.
    family: whose names they have; None for the one that describes the model.
    generation: contents of generation_config.json; empty for that of the tokenizer's folder.
    tokenizer_folder: folder whose files are copied; None for a tokenizer without one.
    chat_template: Jinja; empty to leave the folder's.
    """

    model: Transformer
    config: dict[str, Any]
    dtype: str
    family: Family | None
    generation: Mapping[str, Any]
    tokenizer_folder: Path | None
    chat_template: str

    @classmethod
    def of(
        cls, run: Run, workdir: Path, *, dtype: str | None = None, family: Family | None = None
    ) -> "FilesBeside":
        """Returns those of a run; an imported model keeps what training did not change.

        Args:
          dtype: None for that of the directory that the run began with, or of `precision.param_dtype`.
          family: None for the imported one, or the one that describes the model.

        Raises:
          UserError: the model cannot be described by a config.json.
        """
        base = run.adapter.base if run.adapter else None
        imported = ImportedFiles.read(workdir if base is None else base_workdir(base)[0])
        dtype = dtype or imported.dtype or run.precision.param_dtype
        imported_family = None if family is not None else imported.family_of(run.model)
        written = _config(run, family or imported_family, dtype)
        return cls(
            run.model,
            imported.config_with(written, is_same_model=imported_family is not None),
            dtype,
            family or imported_family,
            imported.generation,
            folder_of(run.data.tokenizer),
            _chat_template(run),
        )

    def write_with(self, params: Params, folder: Path) -> list[str]:
        """Writes a directory with these weights, whole arrays; returns the names of its files."""
        return write_directory(
            folder,
            params,
            self.model,
            self.config,
            dtype=self.dtype,
            family=self.family,
            generation=self.generation,
            tokenizer_folder=self.tokenizer_folder,
            chat_template=self.chat_template,
        )


def _config(run: Run, family: Family | None, dtype: str) -> dict[str, Any]:
    """Contents of config.json for the model of a run."""
    tokenizer = make_tokenizer(run.data.tokenizer, end_token=run.data.end_token)
    return config_from_model(
        run.model,
        dtype=dtype,
        # The run's own length: a longer one would promise what the model has not learnt.
        max_seq_len=run.data.seq_len,
        begin_id=tokenizer.begin_id,
        end_id=tokenizer.end_id,
        family=family,
    )


def _chat_template(run: Run) -> str:
    """Returns the template that the run's chats were written with; empty if it had none, or several."""
    sources = {
        template.exported
        for setup in run.data.setups(seed=run.seed)
        if (mask := setup.source.mask_with(setup.tokenizer, setup.end_token, name=setup.name)) is not None
        if mask.is_chat
        for template in (mask.rule.template,)
    }
    return sources.pop() if len(sources) == 1 else ""
