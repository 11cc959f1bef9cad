"""From names and `--set`s to a run, and every refusal on the way."""

import dataclasses
from pathlib import Path

import pytest

from jtrain.cli.launch import REMARK
from jtrain.config import tree
from jtrain.config.load import load_config
from jtrain.config.resume import (
    config_from_text,
)
from jtrain.config.run import Run, build_run, check_vocabulary
from jtrain.data import ByteTokenizer
from jtrain.optim import Muon

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
SHIPPED = sorted(path.stem for path in (ROOT / "configs").glob("*.py"))


def run(*sets: str, name: str = "tiny", fiddlers: tuple[str, ...] = ()) -> Run:
    return build_run(load_config(name, fiddlers, sets))


def fiddlers_of(name: str) -> list[str]:
    source = (ROOT / "configs" / f"{name}.py").read_text()
    return [line[4 : line.index("(")] for line in source.splitlines() if line.startswith("def ")][1:]


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


# --- shipped configs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_is_what_its_golden_text_says(name: str) -> None:
    """A reviewer sees what moved. After a wanted change: python -m jtrain.launch --config=N --print-config >
    golden.
    """
    assert f"{tree.flat(load_config(name))}{REMARK}\n" == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.smoke
def test_the_configs_are_all_here() -> None:
    """And no golden file outlives its config."""
    assert {"tiny", "llama1b", "llama8b", "llama70b", "qwen3_8b"} <= set(SHIPPED)
    assert sorted(path.stem for path in GOLDEN.glob("*.txt")) == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_every_fiddler_makes_a_valid_run(name: str) -> None:
    """Fiddlers rot unseen otherwise."""
    found = ["debug", "profile", *fiddlers_of(name)]
    for fiddler in found:
        before = tree.flat(load_config(name))
        assert tree.flat(load_config(name, [fiddler])) != before, fiddler
        run(name=name, fiddlers=(fiddler,))


# --- order and values -------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_sets_come_after_fiddlers_and_fiddlers_after_the_base() -> None:
    """debug says 5 steps; the command line has the last word."""
    assert run().num_steps > 5
    assert run(fiddlers=("debug",)).num_steps == 5
    assert run("num_steps=7", fiddlers=("debug",)).num_steps == 7


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("seed=3", 3),
        ("precision.compute_dtype=float32", "float32"),  # a bare word
        ("precision.compute_dtype='float32'", "float32"),
        ("data.path=/my/corpus/*.jsonl", "/my/corpus/*.jsonl"),
        ("data.path=123", "123"),  # a string field takes the text as it stands
        ("data.path=a=b", "a=b"),
        ("optimizer.peak_lr=1", 1.0),
        ("optimizer.warmup_steps=0.1", 0.1),
        ("optimizer.warmup_steps=10", 10),
        ("eval.every_steps=None", None),
        ("model.scan_layers=False", False),
        ("model.rope.theta=5e5", 5e5),
        ("layout.remat_save=['mlp_up']", ("mlp_up",)),
    ],
)
def test_a_set_value_arrives_with_its_type(text: str, value: object) -> None:
    """Also in fields of nested components that the config file did not mention (model.rope)."""
    made = load_config("tiny", (), [text])
    path = text.partition("=")[0]
    owner = made
    for name in path.split("."):
        owner = getattr(owner, name)
    assert owner == value
    assert type(owner) is type(value)
    assert f"{path}: " in tree.flat(made)
    assert tree.parse(tree.flat(made))[path] == repr(value)


def test_named_components_are_set_together_or_field_by_field() -> None:
    """A dict of dicts adds them; each field then has a path of its own, also in the text of the config."""
    sets = ["eval.sets={'wiki': {'path': 'wiki/*.jsonl'}}", "eval.sets.wiki.text_field=body"]
    made = load_config("tiny", (), sets)
    assert "eval.sets.wiki.text_field: str = 'body'\n" in tree.flat(made)
    [source] = build_run(made).eval.sets.values()
    assert (source.path, source.text_field) == ("wiki/*.jsonl", "body")
    assert tree.flat(config_from_text(tree.flat(made))) == tree.flat(made)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_text_is_the_config(name: str) -> None:
    """What a workdir keeps is enough to make the run again: components, tuples, None and all."""
    made = load_config(
        name, (), ["layout.remat=named", "layout.remat_save=('mlp_up',)", "eval.every_steps=None"]
    )
    again = config_from_text(tree.flat(made))
    assert tree.flat(again) == tree.flat(made)
    assert build_run(again).optimizer == build_run(made).optimizer


def test_a_text_of_another_version_is_read_or_refused() -> None:
    """A field added since has its default; one that is gone meant something that nobody knows here."""
    text = tree.flat(load_config("tiny"))
    without = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("model.z_loss"))
    assert build_run(config_from_text(without)).model.z_loss == 0.0
    with pytest.raises(ValueError, match=r"this version of jtrain has no field model\.gone"):
        config_from_text(f"{text}model.gone: int = 3\n")
    with pytest.raises(ValueError, match=r"optimizer = Sgd: neither a value nor one of its components"):
        config_from_text(text.replace("Muon = AdamW", "Muon = Sgd"))


def test_a_component_can_be_swapped_by_a_fiddler(tmp_path: Path) -> None:
    """And its own fields can then be set."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import fiddle as fdl\nfrom jtrain.config.load import load_config\nfrom jtrain.optim import Muon\n"
        "def mine():\n    return load_config('tiny')\n"
        "def muon(run):\n    run.optimizer = fdl.Config(Muon, peak_lr=1e-2)\n"
    )
    made = load_config(str(file), ["muon"], ["optimizer.momentum=0.9"])
    assert build_run(made).optimizer == Muon(peak_lr=1e-2, momentum=0.9)
    assert "optimizer: AdamW | Muon = Muon\n" in tree.flat(made)


def test_an_optional_component_can_be_taken_away() -> None:
    """rope.scaling has its fields in llama8b, and is one line once it is None."""
    assert run(name="llama8b").model.rope.scaling is not None
    assert run("model.rope.scaling=None", name="llama8b").model.rope.scaling is None


def test_a_config_is_found_in_this_folder_first_then_in_a_file_or_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout's configs/ wins over the installed one."""
    text = "from jtrain.config.load import load_config\ndef {name}():\n    made = load_config('llama1b')\n"
    text += "    made.seed = {seed}\n    return made\n"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny.py").write_text(text.format(name="tiny", seed=41))
    (tmp_path / "other.py").write_text(
        text.format(name="other", seed=42) + text.format(name="second", seed=43)
    )
    monkeypatch.chdir(tmp_path)
    assert load_config("tiny").seed == 41
    assert load_config("other.py").seed == 42
    assert load_config(f"{tmp_path}/other.py:second").seed == 43
    monkeypatch.syspath_prepend(tmp_path)
    assert load_config("other:second").seed == 43


def test_a_run_is_built_of_frozen_values() -> None:
    """Nobody downstream can change what config.txt says."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        run().seed = 3  # pyright: ignore[reportAttributeAccessIssue]


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "modle.num_layers=2",
            r"the config has no field modle\. Did you mean model\.num_layers.*Fields of the config: s",
        ),
        ("num_layers=2", r"no field num_layers\. Did you mean model\.num_layers\?"),
        (
            "mesh.dat=2",
            r"mesh has no field dat\. Did you mean mesh\.data.*replica, stage, data, expert, context, tensor",
        ),
        ("seed.x=2", r"seed is 0, which has no fields\. Set seed itself"),
        (
            "model.rope.scaling.factor=8",
            r"model\.rope\.scaling is None, which has no fields\. Put one there first",
        ),
        ("mesh=8", r"mesh is a component \(MeshSpec\).*mesh\.data.*--with"),
        ("num_steps", r"--set num_steps: expected PATH=VALUE"),
        ("=3", r"expected PATH=VALUE"),
        ("num_steps=3.5", r"num_steps=3\.5 is a float, but must be int"),
        ("num_steps=True", r"num_steps=True is a bool, but must be int"),
        ("num_steps=many", r"num_steps='many' is a str, but must be int"),
        ("model.scan_layers=1", r"model\.scan_layers=1 is a int, but must be bool"),
        ("model.scan_layers=true", r"model\.scan_layers='true' is a str, but must be bool"),
        ("optimizer.clip_norm=x", r"optimizer\.clip_norm='x' is a str, but must be float \| None"),
        (
            "layout.remat=fll",
            r"layout\.remat='fll' must be one of 'none', 'full', 'named'\. Did you mean full\?",
        ),
        ("layout.zero_stage=4", r"layout\.zero_stage=4 must be one of 0, 1, 2, 3"),
        (
            "eval.sets={'a': 'x'}",
            r"eval\.sets=\{'a': 'x'\} must be a dict of names .*fields of Source, such as .*'path'",
        ),
        ("eval.sets={'a': {'pat': 'x'}}", r"eval\.sets\.a has no field pat\. It has: path, weight"),
        ("eval.sets={'a': {'path': 1}}", r"eval\.sets\.a\.path=1 is a int, but must be str"),
        ("layout.remat_save=[1]", r"layout\.remat_save=\[1\] is a list, but must be tuple\[str, \.\.\.\]"),
    ],
)
def test_a_bad_set_is_refused(text: str, message: str) -> None:
    """With the nearest names, or the value and its type."""
    with pytest.raises(ValueError, match=message):
        load_config("tiny", (), [text])


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (("num_steps=0",), r"num_steps=0 must be at least 1"),
        (("seed=-1",), r"seed=-1 must be in"),
        (("eval.every_steps=0",), r"eval\.every_steps=0 must be at least 1, or None"),
        (("mesh.data=0",), r"mesh\.data=0 must be at least 1"),
        (("mesh.stage=64",), r"mesh\.stage=64 .* at least 64 layers, but model\.num_layers="),
        (
            ("mesh.stage=2", "layout.microbatches=2", "pipeline.schedule=zbv"),
            r"=2: schedule zbv .* needs at least 3",
        ),
        (("pipeline.schedule=1f2b",), r"pipeline\.schedule='1f2b' .*Did you mean 1f1b\?"),
        (("pipeline.gather='never'",), r"pipeline\.gather='never' must be one of 'tick', 'step'"),
        (
            ("mesh.stage=2", "pipeline.schedule=/no/such.csv"),
            r"schedule /no/such\.csv cannot be read: No such file",
        ),
        (
            ("mesh.stage=3",),
            r"model\.vocab_size=\d+ does not split evenly over mesh axes stage=3 \* tensor=1",
        ),
        (
            ("mesh.stage=2", "layout.offload.activations=1.0"),
            r"layout\.offload\.activations=1\.0 with mesh\.stage=2: .*activations=none",
        ),
        (
            ("mesh.stage=2", "layout.offload.params=0.5", "pipeline.gather=step"),
            r"layout\.offload\.params=0\.5 with pipeline\.gather=step: .*Set pipeline\.gather=tick",
        ),
        (("mesh.expert=2",), r"mesh\.expert=2"),
        (("mesh.context=3", "data.seq_len=255"), r"data\.seq_len=255 over mesh\.context=3: .*multiple of 6"),
        (
            ("mesh.context=2", "data.context_order=contiguous"),
            r"context_attention=ring with data\.context_order=cont",
        ),
        (
            ("mesh.context=16", "layout.context_attention=ulysses"),
            r"ulysses gives each of mesh\.context=16 devices",
        ),
        (("data.global_batch=250", "mesh.data=8"), r"data\.global_batch=250 .*data=8.* 8 shards.*248, 256"),
        (("mesh.data=8", "layout.microbatches=4"), r"is 2 sequences each, .*microbatches=4.*multiple of 32"),
        (
            ("layout.remat=named", "layout.remat_save=('attn',)"),
            r"remat_save names attn, .*There are: attention_q",
        ),
        (
            ("layout.remat=named",),
            r"Set layout\.remat_save=\('attention',\) or other names, or layout\.remat=none",
        ),
        (("kernels=(('attn','xla'),)",), r"no op is called 'attn'.* There are: .*rms_norm"),
        (("kernels=(('rms_norm','nowhere'),)",), r"rms_norm=nowhere: there is no such .*There are: .*xla"),
        (
            ("kernels=(('rope','xla'),('rope','xla'))",),
            r"names an op twice\. Keep one implementation for each",
        ),
        (
            ("layout.remat=full", "layout.offload.activations=0.5"),
            r"activations=0\.5 moves nothing: .*layer_input",
        ),
        (
            ("model.scan_layers=False", "layout.offload.params=as_needed"),
            r"scan_layers=False with layout\.offload",
        ),
        (("model.attention_chunk=0",), r"model\.attention_chunk=0 must be at least 1"),
        (("data.seq_len=254", "mesh.tensor=4"), r"data\.seq_len=254 .*tensor=4 = 4 shards\. .*252, 256"),
        (
            ("mesh.tensor=6", "model.num_heads=12"),
            r"mesh\.tensor=6 cannot split model\.num_heads=12 with model\.num_kv_heads=4: .*to one of 1, 2, "
            r"4, 12, or",
        ),
        (("mesh.tensor=16",), r"mesh\.tensor=16 cannot split model\.num_heads=8 .*to one of 1, 2, 4, 8, or"),
        (
            ("mesh.tensor=8", "mesh.data=2", "layout.zero_stage=1", "model.d_model=24"),
            r"model\.d_model=24 does not split evenly over mesh axes data=2 \* tensor=8 = 16 shards\..*: 16, "
            r"32\. Set",
        ),
        (("model.num_kv_heads=3",), r"model\.num_heads=8 is not a multiple of model\.num_kv_heads=3"),
        (
            ("data.eval_fraction=0",),
            r"eval\.every_steps=\d+ .*data\.eval_fraction=0.*eval\.every_steps=None.*eval\.sets",
        ),
        (("eval.sets={'1 a': {'path': 'x'}}",), r"eval\.sets: '1 a' is not a valid name\. Use letters"),
        (("eval.sets={'a': {'path': ''}}",), r"eval\.sets\.a\.path is empty"),
        (
            ("eval.sets={'a': {'path': 'x', 'weight': 2}}",),
            r"eval\.sets\.a\.weight=2\.0: .*Remove the weight",
        ),
    ],
)
def test_components_that_do_not_fit_are_refused(sets: tuple[str, ...], message: str) -> None:
    """With both numbers and the way out, and without what fiddle says about its own part in it."""
    with pytest.raises(ValueError, match=message) as refusal:
        run(*sets)
    assert "Fiddle" not in str(refusal.value)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused() -> None:
    """256 bytes need 256 rows."""
    check_vocabulary(run().model, ByteTokenizer.vocab_size)
    with pytest.raises(
        ValueError, match=r"data\.tokenizer makes 256 different ids, but model\.vocab_size=255"
    ):
        check_vocabulary(run("model.vocab_size=255").model, ByteTokenizer.vocab_size)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "tinny",
            r"--config=tinny: no such config\. Did you mean tiny, tiny_sft, tiny_moe\? There are: .*llama8b",
        ),
        ("nowhere/mine.py", r"--config=nowhere/mine\.py: there is no file "),
        ("configs/tiny.py:tinny", r"tiny\.py has no base function tinny\. .*Give --config=tiny\.py:tiny\."),
        ("no_such_module:tiny", r"--config=no_such_module:tiny: no module no_such_module"),
    ],
)
def test_an_unknown_config_is_refused(name: str, message: str) -> None:
    """With what there is."""
    with pytest.raises(ValueError, match=message):
        load_config(name)


def test_an_unknown_fiddler_is_refused() -> None:
    """The base function is none, and neither is an import of the file."""
    names = "zero3, tensor, debug, small, lora, dpo, distill, stream, profile"
    said = rf"no fiddler zero. Did you mean zero3\? It has: {names}"
    with pytest.raises(ValueError, match=said):
        load_config("tiny", ["zero"])
    with pytest.raises(ValueError, match="no fiddler tiny"):
        load_config("tiny", ["tiny"])


MINE = "from jtrain.config.load import load_config\ndef mine():\n    made = load_config('tiny')\n"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def mine(:\n", r"mine\.py:1: SyntaxError"),
        ("import no_such\n", r"mine\.py:1: ModuleNotFoundError: No module named 'no_such'"),
        ("def mine():\n    return 3\n", r"mine\(\) must return a fdl\.Config\(Run, \.\.\.\), not int\."),
        (
            f"{MINE}    made.mesh.dat = 3\n    return made\n",
            r"mine\.py:4: AttributeError: No parameter named 'dat'.*valid parameter names: .*data",
        ),
        (
            f"{MINE}    made.layout.remat = 'al'\n    return made\n",
            r"layout\.remat='al' must be one of",
        ),
        (
            "import fiddle as fdl\nfrom jtrain.config.run import Run\ndef mine(): return fdl.Config(Run, "
            "seed=0)\n",
            r"num_steps, mesh, layout, model, optimizer, data: no value\. .*--set num_steps=VALUE",
        ),
    ],
)
def test_a_broken_config_file_is_refused_with_its_line(tmp_path: Path, body: str, message: str) -> None:
    """It is the user's file: they get the place, not a traceback."""
    (tmp_path / "mine.py").write_text(body)
    with pytest.raises(ValueError, match=message):
        build_run(load_config(str(tmp_path / "mine.py")))
