"""The dispatcher that all verbs share: help, misspelt names, files to write, exit codes."""

import compileall
import importlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jtrain.cli import verbs
from jtrain.cli.options import add_json, output_file
from jtrain.cli.run import Args, Command, Parser, Verb, write_json
from jtrain.errors import HardwareFault, UserError
from tests.cli.loaded import list_loaded
from tests.processes import program

ROOT = Path(__file__).parents[2]
VERBS: dict[str, Verb] = {
    name: importlib.import_module(f"jtrain.cli.{name}").VERB
    for name in (
        "launch",
        "plan",
        "profile",
        "dashboard",
        "checkpoint",
        "hf",
        "data",
        "generate",
        "explain",
        "survey",
        "node_check",
    )
}
COMMANDS = [(name, word) for name, verb in VERBS.items() for word in ("", *verb.commands)]


def add_options(parser: Parser) -> None:
    """Options of a command that prints a table."""
    parser.add_argument("--width", type=int, default=3)
    parser.add_argument("--picture", type=output_file)
    add_json(parser)


def square(args: Args) -> int:
    """Prints a line and writes it as JSON."""
    print(f"{args.words}: {args.width**2}")
    write_json(args, {"area": args.width**2})
    return 0


SQUARE = Command("print the area of a square", square, add_options)
VERB = Verb("shape", summary="measure shapes", commands={"square": SQUARE})


def test_a_command_gets_its_options_and_its_words(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Table on the standard output, JSON in a file, or alone on the standard output."""
    file = tmp_path / "area.json"
    assert VERB.main(["square", "--width", "4", "--json", str(file)]) == 0
    assert capsys.readouterr().out == f"['--width', '4', '--json', '{file}']: 16\n"
    assert json.loads(file.read_text()) == {"area": 16}
    assert VERB.main(["square", "--json=-"]) == 0
    assert json.loads(capsys.readouterr().out) == {"area": 9}


def test_the_last_line_names_the_next_command(capsys: pytest.CaptureFixture[str]) -> None:
    """On the error stream, below all that is printed: a pipe gets none of it, and a command that fails has none."""
    square_command = Command(
        "square", square, add_options, next_command=lambda args: f"jtrain shape cube --width {args.width}"
    )
    verb = Verb("shape", commands={"square": square_command})
    assert verb.main(["square", "--json=-"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"area": 9}
    assert printed.err == "next: jtrain shape cube --width 3\n"
    assert verb.main(["square", "--width=x"]) == 2
    assert "next:" not in capsys.readouterr().err


@pytest.mark.parametrize(("name", "word"), [pair for pair in COMMANDS if pair[0] != "node_check"])
def test_every_command_of_a_user_has_a_next_one(name: str, word: str) -> None:
    """Checks that each has one; `node_check` is of the scripts of the kits."""
    verb = VERBS[name]
    command = verb.commands[word] if word else verb.alone
    if command is not None:
        assert command.next_command is not Command.next_command


def test_the_subject_of_a_command_may_stand_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """`plan llama8b` is `plan --config llama8b`; a word near a command's name is a misspelt command."""

    def say(args: Args) -> int:
        print(args.config)
        return 0

    def add_config_option(parser: Parser) -> None:
        parser.add_argument("--config", required=True)

    named = Command("print the config", say, add_config_option, subject="config")
    verb = Verb("shape", named, commands={"square": SQUARE})
    assert verb.main(["tiny"]) == verb.main(["--config=tiny"]) == 0
    assert capsys.readouterr().out == "tiny\ntiny\n"
    assert verb.main(["squire"]) == 2
    message = capsys.readouterr().err
    assert "no command squire of `python -m jtrain.shape`. Did you mean square?" in message
    assert "--config=squire is a config of that name" in message
    assert verb.main(["--config=squire"]) == 0, "the way out"


def test_the_subject_may_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    """Before, between or after options, or with its name; two words are no subject."""

    def say(args: Args) -> int:
        print(args.workdir, args.out, args.fast)
        return 0

    def add_workdir_options(parser: Parser) -> None:
        parser.add_argument("--workdir", required=True)
        parser.add_argument("--out")
        parser.add_argument("--fast", action="store_true")
        parser.add_argument("--width", type=int)

    verb = Verb("shape", Command("print", say, add_workdir_options, subject="workdir"))
    for words in (
        "a --out a --fast",
        "--fast a --out a",
        "--out a --fast a",
        "--fast --out a a",
        "--workdir=a --out a --fast",
    ):
        assert verb.main(words.split()) == 0
        assert capsys.readouterr().out == "a a True\n", words
    assert verb.main(["--out", "a", "b", "c"]) == 2
    assert "required: --workdir" in capsys.readouterr().err
    assert verb.main(["a", "b"]) == 2
    assert "unrecognized arguments: b. " in capsys.readouterr().err
    assert verb.main(["--width", "abc"]) == 2
    assert "--width invalid int value: 'abc'. " in capsys.readouterr().err


def test_a_verb_alone_names_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the option that it needs where it works without a command."""
    assert VERBS["checkpoint"].main([]) == 2
    message = "`python -m jtrain.checkpoint` needs a command, one of list, show, verify, or --workdir.\n"
    assert capsys.readouterr().err == f"error: {message}"
    assert VERBS["data"].main([]) == 2
    assert re.search("needs a command, one of prepare, [a-z, ]*, sample.\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "hint", "way_out"),
    [
        (["tiny", "--lr", "1"], "Did you mean --set optimizer.peak_lr=VALUE? ", "optimizer.peak_lr=1.0"),
        (["tiny", "--batch-size=8"], "Did you mean --set data.global_batch=8? ", "data.global_batch=8"),
        (
            ["tiny", "--micro_batch_size=2"],
            "Did you mean --set data.global_batch=VALUE (the sequences of a step, over all devices and microbatches)? ",
            "data.global_batch=8",
        ),
        (
            ["tiny", "--min-lr=1e-5"],
            "Did you mean --set optimizer.schedule.final_fraction=VALUE (the rate at the end over "
            "optimizer.peak_lr)? ",
            "optimizer.schedule.final_fraction=0.01",
        ),
        (
            ["tiny", "--fp16=True"],
            "Did you mean --set precision.compute_dtype=VALUE (bfloat16 or float32)? ",
            "precision.compute_dtype=bfloat16",
        ),
        (["tiny", "--fsdp"], "Did you mean --set layout.zero_stage=3? ", "layout.zero_stage=3"),
        (["tiny", "--model.d_ff=64"], "Did you mean --set model.d_ff=64? ", "model.d_ff=64"),
        (["tiny", "seed=3"], "Did you mean --set seed=3? ", "seed=3"),
        (["tiny", "--dryrun"], "Did you mean --dry-run", "seed=0"),
        (["tiny", "--output_dir", "x"], "Did you mean --workdir? ", "seed=0"),
    ],
    ids=str,
)
def test_options_of_other_trainers_are_understood(
    words: list[str], hint: str, way_out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A refusal names the option or the setting that does it; that one is taken."""
    assert VERBS["launch"].main(words) == 2
    assert hint in capsys.readouterr().err
    assert VERBS["launch"].main(["tiny", "--set", way_out, "--print-config"]) == 0


@pytest.mark.parametrize(
    "words", ["checkpoint list", "checkpoint", "generate", "profile", "hf export --out o"]
)
def test_a_run_that_is_not_there_is_one_message(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every verb that reads a run takes it alone or by --workdir, and names the runs that are there."""
    monkeypatch.chdir(tmp_path)
    verb, *rest = words.split()
    for option in ([], ["--workdir"]):
        assert VERBS[verb].main([*rest, *option, "runs/tni"]) == 2
        error = capsys.readouterr().err
        assert (
            error
            == "error: --workdir runs/tni: there is no such folder. Train one: jtrain launch --config=tiny.\n"
        )
    for name in ("tiny", "zzzz"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.txt").touch()
    assert VERBS[verb].main([*rest, "runs/tni"]) == 2
    message = "there is no such folder. Did you mean runs/tiny? There are: runs/tiny, runs/zzzz.\n"
    assert capsys.readouterr().err == f"error: --workdir runs/tni: {message}"
    assert VERBS[verb].main([*rest, "runs/tiny"]) == 2, "it is empty"
    assert "there is no such folder" not in capsys.readouterr().err


def test_the_version_is_that_of_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    """Read without an import of jax."""
    for option in ("--version", "-V"):
        assert verbs.main([option]) == 0
        jax_version, python = importlib.metadata.version("jax"), platform.python_version()
        assert capsys.readouterr().out.endswith(f", jax {jax_version}, Python {python}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["squire"],
            "no command squire of `python -m jtrain.shape`. Did you mean square? There are: square; "
            "everything",
        ),
        (
            ["runs/tiny"],
            "no command runs/tiny of `python -m jtrain.shape`. There are: square; everything else is an",
        ),
        ([], "`python -m jtrain.shape` needs a command, one of square."),
        (
            ["square", "--widht=4"],
            "no option --widht. Did you mean --width? `python -m jtrain.shape square --help` lists",
        ),
        (["square", "--wid=4"], "no option --wid. Did you mean --width? "),
        (
            ["square", "--width", "x"],
            "--width invalid int value: 'x'. `python -m jtrain.shape square --help` lists",
        ),
        (["square", "4"], "unrecognized arguments: 4. "),
        (
            ["square", "--picture", "no/a.svg"],
            f"--picture no/a.svg: there is no folder {Path.cwd()}/no. Make it first.",
        ),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_and_exit_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the command runs."""
    assert VERB.main(words) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert error.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("raised", "code"),
    [(UserError("no"), 2), (FileNotFoundError(2, "gone", "a"), 2), (HardwareFault("device 3"), 76)],
)
def test_one_place_turns_errors_into_exit_codes(raised: Exception, code: int) -> None:
    def fail(_: Args) -> int:
        raise raised

    assert Verb("shape", Command("fail", fail)).main([]) == code


@pytest.mark.parametrize(("name", "word"), COMMANDS, ids=lambda text: text)
def test_every_command_names_the_nearest_option(
    name: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where a required one is missing; the node check takes the training command's options and ignores
    them.
    """
    words = [word, "--hlep"] if word else ["--hlep"]
    if name == "node_check":
        return
    assert VERBS[name].main(words) == 2
    assert "error: no option --hlep. Did you mean --help" in capsys.readouterr().err


def test_help_of_every_command_needs_neither_jax_nor_numpy(capsys: pytest.CaptureFixture[str]) -> None:
    """So that it answers at once (`jtrain bench startup` has the time)."""
    commands = [[f"jtrain.{name}", *([word] if word else []), "--help"] for name, word in COMMANDS]
    loaded = list_loaded(("jax", "numpy", "rich", "fiddle"), *commands)
    assert loaded.output.count("usage: ") == len(COMMANDS) > 25
    assert loaded.packages == []


def test_every_command_that_reads_a_run_names_it_by_workdir() -> None:
    """One form for all; nothing is named by its place in the command, so a word is always a command."""
    for name, verb in VERBS.items():
        for word, command in {"": verb.alone, **verb.commands}.items():
            if command is None:
                continue
            actions = command.parser(f"{name} {word}")._actions
            assert all(action.option_strings for action in actions), (name, word)
            options = {option for action in actions for option in action.option_strings}
            reads_a_run = (name, word) in {
                ("hf", "export"),
                ("hf", "import"),
                ("data", "reference"),
                ("generate", ""),
                ("launch", ""),
            }
            assert ("--workdir" in options) == (
                reads_a_run or name in {"profile", "checkpoint", "dashboard"}
            ), (
                name,
                word,
            )
            prints_a_table = (name, word) in {("hf", "prove"), ("hf", "inspect")} or (
                name in {"profile", "checkpoint", "data", "plan", "survey"}
                and word not in {"export", "sample", "reference"}
            )
            assert ("--json" in options) == prints_a_table, (name, word)


@pytest.fixture(scope="module")
def compiled_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both packages as .pyc files alone, as some distributions ship Python."""
    site = tmp_path_factory.mktemp("site")
    for package in (ROOT / "jtrain", ROOT / "kernels" / "jtrain_kernels"):
        shutil.copytree(package, site / package.name, ignore=shutil.ignore_patterns("__pycache__", "bench"))
    assert compileall.compile_dir(site, quiet=1, legacy=True)
    for source in site.rglob("*.py"):
        source.unlink()
    return site


def python(site: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(site), "XLA_FLAGS": ""}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_messages_need_no_sources(compiled_only: Path, tmp_path: Path) -> None:
    """Exit 2 and one line; the package is really the compiled one."""
    where = python(
        compiled_only, tmp_path, "-c", "import jtrain.launch; print(jtrain.launch.__file__)"
    ).stdout.strip()
    assert where == str(compiled_only / "jtrain" / "launch.pyc")
    done = python(compiled_only, tmp_path, "-m", "jtrain.launch", "--config=nowhere")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: --config=nowhere: no such config.")
    assert "Traceback" not in done.stderr


def test_a_bug_stays_a_bug_without_sources(compiled_only: Path, tmp_path: Path) -> None:
    """A ValueError that is no UserError keeps its traceback, exit code 1."""
    done = python(compiled_only, tmp_path, *program(__file__, "fail", "bug")[1:])
    assert done.returncode == 1
    assert "ValueError: invalid literal" in done.stderr


def test_faulty_hardware_has_a_code_of_its_own(compiled_only: Path, tmp_path: Path) -> None:
    """Supervisors replace the host on 76; the message stands alone on stderr."""
    done = python(compiled_only, tmp_path, *program(__file__, "fail", "hardware")[1:])
    assert (done.returncode, done.stderr) == (76, "error: device 3 of host a\n")


def test_a_training_frees_cycles_as_other_programs_do() -> None:
    """A start collects rarely; `collect_as_before` ends that."""
    code = (
        "import gc; from jtrain.cli import run; before = gc.get_threshold(); run.run(lambda: 0);"
        "during = gc.get_threshold(); run.collect_as_before();"
        "print(before[0], during[0], gc.get_threshold() == before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, during, is_restored = done.stdout.split()
    assert int(before) < int(during)
    assert is_restored == "True"
