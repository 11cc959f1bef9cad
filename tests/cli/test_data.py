import io
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from jtrain.cli import launch
from jtrain.cli.data import main
from jtrain.data import PackedText, open_dataset
from jtrain.data.inspect.step_contents import pieces_of_step
from jtrain.data.pretokenized.build import prepare
from tests.data.masked_sources import write_prompts
from tests.data.sources.object_store import web_store
from tests.data.two_sources import recipes_of, write_lines


def test_every_public_name_can_be_imported_and_no_other() -> None:
    import jtrain.data

    for name in jtrain.data.__all__:
        assert getattr(jtrain.data, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'open_datasets'"):
        jtrain.data.open_datasets  # noqa: B018


def test_the_pieces_of_a_step_are_its_batch(tmp_path: Path) -> None:
    """The texts of the pieces are those of the documents that are named."""
    documents = {f"{i}.txt": "".join(f"{i}.{j} " for j in range(i + 3)) for i in range(30)}
    for name, text in documents.items():
        (tmp_path / name).write_text(text)
    spec = PackedText(path=str(tmp_path), seq_len=16, global_batch=6, eval_fraction=0.1)
    dataset = open_dataset(spec, seed=0)
    pieces = pieces_of_step(dataset, 2)
    iterator = dataset.train_batches(inline=True)
    for _ in range(2):
        next(iterator)
    batch = next(iterator)
    for row in range(6):
        text = "".join(piece["text"] for piece in pieces if piece["row"] == row)
        assert text == dataset.tokenizer.decode(batch.token_BL[row].tolist())
    for piece in pieces:
        whole = "\0" + documents[piece["document"].removesuffix(":0")] + "\0"
        first = 16 * piece["chunk"]
        assert piece["text"] == whole[first + piece["start_token"] : first + piece["end_token"]]


def test_inspect_marks_what_is_learned(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Learned spans of a chunk, and its text with them in brackets."""
    pairs = [(f"what is {i}? ", f"{i}!") for i in range(100, 400)]
    path = write_prompts(tmp_path / "a.jsonl", pairs)
    (tmp_path / "config.py").write_text(
        "import fiddle as fdl\nfrom jtrain.data import Source\nfrom configs.tiny import tiny\n"
        "def config():\n    run = tiny()\n    run.data.path = None\n    run.data.packing = 'best_fit'\n"
        "    run.data.eval_fraction = 0.0\n    run.eval.every_steps = None\n"
        f"    sft = fdl.Config(Source, path={path!r}, prompt_field='prompt', text_field='completion')\n"
        "    run.data.sources = {'sft': sft}\n    return run\n"
    )
    file = tmp_path / "step.json"
    assert main(["inspect", f"--config={tmp_path / 'config.py'}", f"--json={file}"]) == 0
    printed = capsys.readouterr().out
    for piece in json.loads(file.read_text())["pieces"]:
        number = int(piece["text"][9:12])
        assert piece["learned"] == [[14, 19]], "three digits, the sign, and the end of the document"
        assert f"'\\x00what is {number}? ' [['{number}!\\x00']]" in printed


def test_inspect_prints_and_writes_a_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    assert main(["inspect", "--config=tiny", "--step=2", "--set=data.global_batch=4", f"--json={file}"]) == 0
    said = json.loads(file.read_text())
    assert said["tokens"] == 4 * 256
    printed = capsys.readouterr().out
    assert "step 2: 4 rows, 1,024 tokens" in printed
    assert all(piece["document"] in printed for piece in said["pieces"])


def test_a_negative_step_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--config=tiny", "--step=-1"]) == 2
    assert "--step -1 must be at least 0" in capsys.readouterr().err


def test_plan_prints_what_each_role_takes_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    more = ["--set=data.max_loaders=3", "--set=data.shadows=2", f"--json={file}"]
    assert main(["plan", "--config=tiny", *more]) == 0
    said = json.loads(file.read_text())
    assert {role["role"]: role["processes"] for role in said["roles"]} == {
        "forkserver": 1,
        "constructor": 1,
        "loader": 3,
        "standby": 2,
    }
    assert said["processes"] == 7
    printed = capsys.readouterr().out
    assert all(role["role"] in printed for role in said["roles"])
    assert main(["plan", "--config=tiny", "--set=data.engine=inline"]) == 0


def test_bench_prints_throughput_memory_and_balance(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "bench.json"
    assert main(["bench", "--config=tiny", "--steps=20", f"--json={file}"]) == 0
    figures = json.loads(file.read_text())
    assert figures["tokens_per_s"] > 0
    assert figures["fill"] == 1
    assert 1 <= figures["cost_spread"] < 2
    assert figures["loader_documents"]["loader-0"] > 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in figures)
    assert main(["bench", "--config=tiny", "--steps=1"]) == 2
    assert "--steps 1 must be at least 2" in capsys.readouterr().err


def test_sample_prepare_and_inspect_work_raw_and_prepared(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs all steps of `--config=mixture`: six sources in six formats, raw and prepared."""
    config = str(Path("configs/mixture.py").absolute())
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", f"--config={config}"]) == 2
    assert "runs/sources/code.jsonl.gz" in capsys.readouterr().err
    assert main(["sample", "--out=runs/sources"]) == 0
    assert main(["prepare", f"--config={config}", "--out=prepared", "--workers=2"]) == 0
    raw, indexed = Path("raw.json"), Path("indexed.json")
    more = ["--step=6", f"--set=data.cache_dir={tmp_path / 'cache'}"]
    assert main(["inspect", f"--config={config}", f"--json={raw}", *more]) == 0
    assert (
        main(["inspect", f"--config={config}", f"--json={indexed}", "--set=data.prepared=prepared", *more])
        == 0
    )
    capsys.readouterr()
    for folder in ("prepared", "prepared/code"):
        assert main(["verify", "--from", folder]) == 0
        command = capsys.readouterr().err.removeprefix("next: ")
        assert command == f"jtrain launch --config={config} --set data.prepared=prepared\n"
    assert launch.main([*shlex.split(command)[2:], "--print-config"]) == 0, "it is of a config that is there"
    capsys.readouterr()
    Path("prepared/command.txt").unlink()
    assert main(["verify", "--from=prepared"]) == 0
    assert capsys.readouterr().err == "", "no NAME to fill in"
    for file in (raw, indexed):
        step = json.loads(file.read_text())
        assert len({piece["source"] for piece in step["pieces"]}) >= 3
        assert step["tokens"] > 0.9 * 8 * 512
    capsys.readouterr()
    assert main(["inspect", f"--config={config}", "--set=data.prepared=nowhere", *more]) == 2
    assert "python -m jtrain.data prepare" in capsys.readouterr().err


@pytest.fixture
def indexes(tmp_path: Path) -> Path:
    """Two prepared sources, as the command writes them."""
    write_lines(tmp_path, lines=60)
    out = tmp_path / "out"
    prepare(recipes_of(tmp_path), out, workers=1, stream=io.StringIO(), shard_bytes=1024, command="prepare!")
    return out


def test_verify_says_that_indexes_are_intact(
    indexes: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`verify` checks all indexes, or the one that is named."""
    file = tmp_path / "verified.json"
    assert main(["verify", "--from", str(indexes), f"--json={file}"]) == 0
    printed = capsys.readouterr().out
    assert re.fullmatch(
        r"book: intact \(20 records, .* tokens\)\nweb: intact \(60 records, .* tokens\)\n", printed
    )
    assert json.loads(file.read_text()) == {
        "sources": [{"name": name, "damage": []} for name in ("book", "web")]
    }
    assert main(["verify", "--from", str(indexes / "web")]) == 0
    assert capsys.readouterr().out.startswith("web: intact")


@pytest.mark.parametrize(
    "name", ["ids.bin", "lengths.bin", "units.jsonl", "skipped.jsonl", "files.json", "index.json"]
)
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_verify_names_the_damaged_file_and_exits_2(
    name: str, damage: str, indexes: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A flipped bit, a cut end or a missing file is found; the other index is checked all the same."""
    path = indexes / "book" / name
    content = bytearray(path.read_bytes() or b"not empty")
    content[len(content) // 2] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content if damage == "flipped" else content[: len(content) // 2])
    file = tmp_path / "verified.json"
    assert main(["verify", "--from", str(indexes), f"--json={file}"]) == 2
    said = capsys.readouterr()
    assert said.out.splitlines()[0].startswith("book: DAMAGED")
    assert said.out.splitlines()[1].startswith("web: intact")
    *lines, error = said.err.splitlines()
    assert all(line.startswith(f"  {indexes / 'book'}: ") for line in lines)
    assert name in lines[0] or (name, damage) == ("index.json", "gone")
    assert (
        error == f"error: 1 of 2 indexes are damaged. Make them again: rm -r {indexes / 'book'} && prepare!"
    )
    [book, web] = json.loads(file.read_text())["sources"]
    assert len(book["damage"]) == len(lines)
    assert web["damage"] == []


def test_verify_of_a_folder_without_an_index_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert main(["verify", "--from", str(folder)]) == 2
        assert f"error: {folder} has no prepared index. Make one: python -m jtrain" in capsys.readouterr().err


def test_adopt_makes_an_index_that_verify_reads(
    capsys: pytest.CaptureFixture[str], tokenizer_json: Path, tmp_path: Path
) -> None:
    ids = np.asarray([5, 6, 1, 7, 8, 9, 1], np.uint16)
    ids.tofile(tmp_path / "train.bin")
    options = [
        "adopt",
        f"--from={tmp_path / 'train.bin'}",
        f"--out={tmp_path / 'out'}",
        f"--tokenizer={tokenizer_json}",
    ]
    assert main([*options, "--name=web", f"--json={tmp_path / 'made.json'}"]) == 0
    assert "web: 2 documents, 7 tokens, 1 files read in place (raw)" in capsys.readouterr().out
    assert json.loads((tmp_path / "made.json").read_text())["tokens"] == 7
    assert main(["verify", "--from", str(tmp_path / "out")]) == 0
    # No training command: no config of ours has the vocabulary of this tokenizer.
    assert capsys.readouterr() == ("web: intact (2 records, 7 tokens)\n", "")
    ids[:2] = 6, 5
    ids.tofile(tmp_path / "train.bin")
    assert main(["verify", "--from", str(tmp_path / "out" / "web")]) == 2
    assert "train.bin, which moved or changed since it was adopted" in capsys.readouterr().err
    assert main([*options, "--name=web"]) == 0
    assert main(["verify", "--from", str(tmp_path / "out" / "web")]) == 0
    assert main([*options[:3], "--tokenizer=nowhere.json"]) == 2
    assert "--tokenizer='nowhere.json': no such file" in capsys.readouterr().err


def test_verify_reads_an_index_behind_a_url(
    capsys: pytest.CaptureFixture[str], indexes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # its cache keeps the lengths
    with web_store() as store:
        store.files.update({f"web/{path.name}": path.read_bytes() for path in (indexes / "web").iterdir()})
        assert main(["verify", "--from", f"{store.url}/web"]) == 0
        assert capsys.readouterr().out.startswith("web: intact (60 records")
        store.files["web/ids.bin"] = bytes(len(store.files["web/ids.bin"]))
        assert main(["verify", "--from", f"{store.url}/web"]) == 2
        assert "Copy it there again, or make it again" in capsys.readouterr().err
