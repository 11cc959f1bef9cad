"""Fields of a config: each has a meaning and a place, and is found by its name here or in another trainer."""

import re
import shlex
from collections import Counter
from pathlib import Path

import pytest

from jtrain.cli import launch
from jtrain.cli.explain import main
from jtrain.config import tree
from jtrain.config.fields import all_fields, find
from jtrain.config.load import load_config
from jtrain.config.other_names import OTHER_NAMES, OTHER_UNITS, known_elsewhere
from jtrain.errors import UserError
from jtrain.runtime.user_code import load_python_file

ROOT = Path(__file__).parents[2]
FIELDS = {field.path: field for field in reversed(all_fields())}
FIELD_NAMES = {path: names for path, names in OTHER_NAMES.items() if not path.startswith("--")}


def explained(word: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([word]) == 0
    return capsys.readouterr().out


def test_every_field_of_every_config_is_found() -> None:
    """The walk over classes finds each line that `--print-config` has, of all configs."""
    texts = [file.read_text() for file in (ROOT / "tests" / "golden").glob("*.txt")]
    lines = {line.partition(":")[0] for text in texts for line in text.splitlines() if line[0] != "#"}
    assert len(lines) > 200
    missing = []
    for path in lines:
        try:
            find(path)
        except UserError:
            missing.append(path)
    assert missing == []


def test_every_field_has_a_meaning_and_a_place() -> None:
    """The line of its place defines it."""
    assert len(FIELDS) > 300
    assert [path for path, field in FIELDS.items() if len(field.meaning) < 8] == []
    named = {(field.owner, field.name): field.meaning for field in FIELDS.values()}
    meanings = Counter((owner, meaning) for (owner, _), meaning in named.items())
    assert [key for key, count in meanings.items() if count > 1] == [], (
        "one entry for several fields tells of none"
    )
    for field in FIELDS.values():
        file, _, number = field.place.partition(":")
        line = (ROOT / file).read_text().splitlines()[int(number) - 1]
        assert line.startswith(f"    {field.name}: "), field.place


def test_every_example_is_a_config() -> None:
    """Each command of an example loads, and sets the field that it is about."""
    commands = {
        path: field.example() for path, field in FIELDS.items() if field.example().startswith("jtrain")
    }
    assert len(commands) > 150
    for path, command in commands.items():
        words = shlex.split(command)
        assert words[:3] == ["jtrain", "launch", "--config=tiny"]
        config = load_config("tiny", sets=[word for word in words[3:] if word != "--set"])
        assert any(leaf.path == path or leaf.path.startswith(f"{path}.") for leaf in tree.leaves(config)), (
            path
        )


@pytest.mark.parametrize("path", FIELD_NAMES)
def test_what_other_trainers_call_a_field_leads_to_one(path: str) -> None:
    """Every entry of the table, with its value: the path exists, and the class or the value is taken."""
    field, _, value = path.partition("=")
    assert field in FIELDS, path
    for name in FIELD_NAMES[path].split():
        assert known_elsewhere(name) == known_elsewhere("--" + name.replace("_", "-")) == path
        assert name not in FIELDS, f"{name} is a field by itself"
        assert find(name).fields[0].path.startswith(field)
    if value:
        needs = [f"{field.partition('.')[0]}=LoRA"] if field.startswith("adapter.") else []
        load_config("tiny", sets=[*needs, path])


def test_no_name_is_in_the_table_twice() -> None:
    names = [name for text in OTHER_NAMES.values() for name in text.split()]
    assert sorted(set(names)) == sorted(names)


def test_a_value_of_another_unit_is_of_a_field_that_takes_one() -> None:
    """Names with a unit are in the table, and their entry has no value of its own."""
    names = [name for text in OTHER_UNITS.values() for name in text.split()]
    assert len(names) > 10
    assert [name for name in names if "=" in (known_elsewhere(name) or "=")] == []


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("optimizer.lr=1", "optimizer has no field lr. Did you mean optimizer.peak_lr? "),
        ("lr=1", "the config has no field lr. Did you mean optimizer.peak_lr? "),
        ("batch_size=8", "Did you mean data.global_batch? "),
        ("max_steps=8", "Did you mean num_steps? "),
        ("stage=2", "Did you mean mesh.stage, layout.zero_stage? "),
        ("eval.every=2", "Did you mean eval.every_steps"),
        ("model.n_layer=2", "Did you mean model.num_layers? "),
        ("eval.eval_steps=8", "Did you mean eval.every_steps? "),
        (
            "checkpoint.eval_steps=8",
            "Did you mean checkpoint.every_steps, checkpoint.keep_every_steps, ",
        ),
        (
            "micro_batch_size=2",
            "Did you mean data.global_batch (the sequences of a step, over all devices and microbatches)? ",
        ),
        ("fsdp=1", "Did you mean layout.zero_stage=3? "),
        ("lora_r=8", "Did you mean adapter.rank? "),
        ("adapter.rank=8", "Put one there first (--set adapter=NAME, of LoRA)."),
        ("optimizer=adam", "or replace it by its class (--set optimizer=NAME, of AdamW, Muon)."),
    ],
)
def test_a_name_of_another_trainer_is_understood(setting: str, hint: str) -> None:
    with pytest.raises(UserError, match=re.escape(hint)):
        load_config("tiny", sets=[setting])


def test_a_component_is_chosen_by_its_class() -> None:
    """It keeps the fields that both classes have; the ways out of the refusals above."""
    config = load_config("tiny", sets=["optimizer=Muon", "adapter=LoRA", "adapter.rank=8", "objective=DPO"])
    values = tree.parse(tree.flat(config))
    assert values["optimizer"] == "Muon"
    assert values["optimizer.peak_lr"] == "0.003"
    assert values["adapter.rank"] == "8"
    assert values["objective.beta"] == "0.1"


def test_a_field_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """Meaning, unit, default, values, place, readers, resume, names elsewhere and an example."""
    text = explained("layout.remat", capsys)
    assert "activations that a layer saves for its backward pass" in text
    for line in (
        r"  default +'none'$",
        r"  allowed +one of 'none', 'full', 'named'$",
        r"  defined +jtrain/layout/layout_spec.py:\d+, LayoutSpec$",
        r"  read in +jtrain/",
        r"  on resume +may change: the layout does not change the losses$",
        r"  others say +gradient_checkpointing, ",
        r"  example +jtrain launch --config=tiny --set layout.remat=full$",
    ):
        assert re.search(line, text, re.MULTILINE), line
    assert "  unit        seconds" in explained("supervise.step_s", capsys)
    assert "see also    layout.microbatch_tokens" in explained("layout.microbatches", capsys)
    # Muon has it from AdamW, and both are read by the same line.
    assert "read in     jtrain/optim/optimizer.py:" in explained("optimizer.peak_lr", capsys)
    assert explained("peak_lr", capsys) == explained("lr", capsys) == explained("optimizer.peak_lr", capsys)


def test_a_component_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """By its path and class, or by what other trainers call it; all of its fields with their defaults."""
    text = explained("objective=DPO", capsys)
    assert text.startswith("objective=DPO: DPO, jtrain/step/objective.py:")
    assert "  objective.beta = 0.1: strength of the preference" in text
    assert explained("dpo", capsys) == text
    assert "AdamW | Muon" in explained("optimizer", capsys)
    assert "checkpoint.every_steps: " in explained("every_steps", capsys)
    assert "eval.every_steps: " in explained("every_steps", capsys)


def test_a_field_of_one_of_many_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert explained("data.sources.web.weight", capsys).startswith("data.sources.NAME.weight\n")
    assert "run.data.sources['web'].weight = 1.0" in explained("data.sources.web.weight", capsys)
    text = explained("data.sources.web", capsys)
    assert text.startswith("data.sources.web: Source, jtrain/data/sources/source.py:")
    assert "  data.sources.NAME.weight = 1.0: " in text


def test_a_class_that_a_field_does_not_take_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The message names those that it takes; one of them is explained."""
    assert main(["optimizer=Muom"]) == 2
    message = "optimizer=Muom: optimizer takes no Muom. Did you mean Muon? There are: AdamW, Muon."
    assert capsys.readouterr().err == f"error: {message}\n"
    assert explained("optimizer=Muon", capsys).startswith("optimizer=Muon: Muon, jtrain/optim/spec.py:")


def test_a_name_of_an_option_is_no_field(capsys: pytest.CaptureFixture[str]) -> None:
    """And the option that it names is one of the command that the message names."""
    assert main(["output_dir"]) == 2
    message = "output_dir: no field of a config. It is what jtrain launch has as its option --workdir."
    assert capsys.readouterr().err == f"error: {message}\n"
    options = {
        option
        for action in launch.VERB.alone.parser("")._actions  # pyright: ignore[reportOptionalMemberAccess]
        for option in action.option_strings
    }
    assert {path for path in OTHER_NAMES if path.startswith("--")} <= options


def test_no_field_of_that_name_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    """And the name that it suggests is explained."""
    assert main(["num_stepz"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: num_stepz: no field of a config. Did you mean num_steps")
    assert error.count("\n") == 1
    assert explained("num_steps", capsys).startswith("num_steps\n")


def test_the_page_of_fields_is_what_the_code_says() -> None:
    """`python docs/make_fields_page.py` writes it; nothing is written twice."""
    page = load_python_file(ROOT / "docs" / "make_fields_page.py").page()
    assert (ROOT / "docs" / "fields.md").read_text() == page
    assert page.count("\n| `") > 250
