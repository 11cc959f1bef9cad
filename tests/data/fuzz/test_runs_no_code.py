"""Loading a dataset, tokenizer, model or checkpoint runs no code of its files."""

import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jtrain.data.pretokenized.foreign.find import find_layout
from jtrain.data.sources.formats import RowGroupCache, open_file
from jtrain.data.sources.formats.masked_text import TextFields
from jtrain.data.sources.storage import StoredFile
from jtrain.data.tokenizer import make_tokenizer
from jtrain.errors import UserError
from tests.data.fuzz.__main__ import CORPUS
from tests.data.fuzz.targets import SEPARATOR

ROOT = Path(__file__).parents[3]

UNPICKLERS = {
    "jtrain/data/plane/data_plane.py": "from the loop's own child process, over its pipe",
    "jtrain/hf/peers/reference.py": "nothing: `model.eval()` of torch turns dropout off",
}
"""Modules that unpickle, and where the bytes come from: never from a file."""

_RUNS_CODE = re.compile(
    r"pickle\.loads?\(|Unpickler|torch\.load|marshal\.load|shelve\.|\beval\(|\bexec\(|joblib\.load"
)


class Payload:
    """Object whose unpickling creates a file."""

    def __init__(self, owned: Path) -> None:
        self._owned = owned

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._owned,)


@pytest.fixture
def owned(tmp_path: Path) -> Path:
    """Path of the file that a payload would create; the payload works."""
    path = tmp_path / "owned"
    pickle.loads(pickle.dumps(Payload(path)))
    path.unlink()
    return path


def test_npy_files_with_pickled_objects_are_refused(tmp_path: Path, owned: Path) -> None:
    folder = tmp_path / "ids"
    folder.mkdir()
    np.save(folder / "a.npy", np.asarray([Payload(owned)], object), allow_pickle=True)
    with pytest.raises(UserError, match=r"a\.npy: ids must be little-endian integers, and these are object"):
        find_layout(str(folder), end_id=0, vocab_size=256, dtype=None, column=None)
    assert not owned.exists()


def test_pickles_beside_the_weights_are_not_read(tmp_path: Path, owned: Path) -> None:
    """A model directory of pickles alone is refused; beside safetensors a pickle and Python files are
    inert.
    """
    from jtrain.hf.model_config import model_from_config
    from jtrain.hf.model_files import open_tensors, read_config

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(owned)))
    with (
        pytest.raises(
            UserError, match="Only safetensors are read: save the model with safe_serialization=True"
        ),
        open_tensors(tmp_path),
    ):
        pass
    config, weights = (CORPUS / "hf" / "found_auto_map").read_bytes().split(SEPARATOR)
    assert json.loads(config)["trust_remote_code"]
    (tmp_path / "config.json").write_bytes(config)
    (tmp_path / "model.safetensors").write_bytes(weights)
    (tmp_path / "evil.py").write_text(f"open({str(owned)!r}, 'w')")
    assert model_from_config(read_config(tmp_path)).num_layers == 1
    with open_tensors(tmp_path) as tensors:
        assert [read().shape for read in tensors.values()] == [(4,)]
    assert not owned.exists()


def test_a_tokenizers_own_class_is_not_imported(tmp_path: Path, owned: Path) -> None:
    """`auto_map`, `tokenizer_class` and chat templates of tokenizer_config.json name code; none of it
    runs.
    """
    file, _ = (CORPUS / "tokenizer" / "bpe").read_bytes().split(SEPARATOR)
    (tmp_path / "tokenizer.json").write_bytes(file)
    (tmp_path / "evil.py").write_text(f"open({str(owned)!r}, 'w')")
    config = {
        "eos_token": "</s>",
        "tokenizer_class": "Evil",
        "auto_map": {"AutoTokenizer": ["evil.Evil", None]},
    }
    config["chat_template"] = f"{{{{ ''.__class__.__mro__[1].__subclasses__() }}}}{{% include '{owned}' %}}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = make_tokenizer(str(tmp_path))
    assert tokenizer.decode(tokenizer.encode("abc")) == "a b c"
    assert not owned.exists()


def test_a_pickle_is_a_bad_file_of_every_format(tmp_path: Path, owned: Path) -> None:
    content = pickle.dumps(Payload(owned))
    for suffix in (".jsonl", ".json", ".csv", ".parquet", ".arrow", ".tar", ".arrayrecord", ".txt"):
        path = tmp_path / f"a{suffix}"
        path.write_bytes(content)
        stored = StoredFile(str(path), path.name, len(content), "1", str(path))
        with pytest.raises(UserError, match=rf"a\{suffix}"):
            open_file(
                stored,
                format="auto",
                fields=TextFields("text", "data"),
                text_piece_bytes=4096,
                cache_dir=tmp_path,
                groups=RowGroupCache(1),
                check_content=True,
            )[0]
    assert not owned.exists()


def test_only_one_module_unpickles_and_no_file() -> None:
    """A new call of pickle, eval or torch.load needs an entry above, with where its bytes come from."""
    found = set()
    for folder in ("jtrain", "kernels"):
        for file in (ROOT / folder).rglob("*.py"):
            name = file.relative_to(ROOT).as_posix()
            if "/bench/" not in name and _RUNS_CODE.search(file.read_text()):
                found.add(name)
    assert found == set(UNPICKLERS)
