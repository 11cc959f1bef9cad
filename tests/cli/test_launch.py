"""The command line from outside: what it prints, what it imports, how it ends."""

import json
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path

import pytest

from jtrain.cli import launch
from jtrain.cli.run import run
from jtrain.profile.analysis.breakdown_json import read_breakdown
from jtrain.runtime.multihost import join_processes
from jtrain.runtime.stores import check_workdir, default_workdir
from tests.processes import program
from tests.small_disk import remount, small_disk

ROOT = Path(__file__).parents[2]


def python(
    *arguments: str, cwd: Path = ROOT, env: Mapping[str, str | None] | None = None
) -> subprocess.CompletedProcess[str]:
    """One process as a user starts it: without what conftest.py sets here, or what `env` has as None."""
    dropped = ("XLA_FLAGS", "JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")
    clean = {name: value for name, value in os.environ.items() if name not in dropped}
    clean["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    )
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={name: value for name, value in {**clean, **(env or {})}.items() if value is not None},
        capture_output=True,
        text=True,
        check=False,
    )


def options() -> set[str]:
    assert launch.VERB.alone is not None
    actions = launch.VERB.alone.parser("launch")._actions
    return {option for action in actions for option in action.option_strings if option != "-h"}


# --- the command line -------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_the_command_line_is_frozen() -> None:
    """DESIGN section 5; scripts rely on it."""
    assert options() == {
        *("--help", "--config", "--with", "--set", "--workdir"),
        *(
            "--emulate-devices",
            "--check",
            "--dry-run",
            "--topology",
            "--print-config",
            "--allow-change",
            "--from-scratch",
        ),
        *("--supervise", "--processes", "-n", "--device"),
    }


def test_launch_stays_thin() -> None:
    """DESIGN section 3: at most 150 lines."""
    assert len((ROOT / "jtrain" / "launch.py").read_text().splitlines()) <= 150


@pytest.mark.smoke
def test_print_config_prints_the_golden_text() -> None:
    """And starts no backend, so it works beside a running job."""
    done = python("-m", "jtrain.launch", "--config=tiny", "--print-config")
    assert (done.returncode, done.stderr) == (0, "next: jtrain launch --config=tiny\n")
    assert done.stdout == (ROOT / "tests" / "golden" / "tiny.txt").read_text()


@pytest.mark.parametrize(
    ("config", "workdir"),
    [
        ("tiny", "runs/tiny"),
        ("my/dir/mine.py", "runs/mine"),
        ("my/dir/mine.py:second", "runs/second"),
        ("package.module:function", "runs/function"),
    ],
)
def test_the_workdir_is_named_after_the_config(config: str, workdir: str) -> None:
    assert default_workdir(config) == Path(workdir)


# --- exit codes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config=tiny", "--set", "modle.num_layers=2"], "Did you mean model.num_layers"),
        (["--config=tiny", "--set", "mesh.data=3"], "Nearest sizes that do: "),
        (
            ["--config=tiny", "--topology", "h200:8"],
            "--topology h200:8 compiles for a machine that is not here. Add",
        ),
        (["--config=tiny", "--emulate-devices", "0"], "--emulate-devices 0 must be at least 1"),
        (["--config=tiny", "--device", "tpu"], "--device tpu: this host has no TPU"),
        (["--config=tiny", "-n", "2"], "--processes 2 starts processes from a supervisor. Add --supervise."),
        (["--config=tiny", "--supervise", "-n", "0"], "--processes 0 must be at least 1"),
        (["--confg=tiny"], "error: no option --confg. Did you mean --config"),
        ([], "error: the following arguments are required: --config. `python"),
    ],
    ids=str,
)
def test_what_the_user_can_mend_exits_2_without_a_traceback(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    """And leaves nothing behind."""
    done = python("-m", "jtrain.launch", *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("workdir", "message"),
    [
        ("", "--workdir is empty. Give a folder"),
        ("/", "--workdir / is the root of the file system"),
        ("//../", "is the root of the file system"),
        ("{tmp}/file", "{tmp}/file is a file. Give a folder"),
        ("{tmp}/file/below/it", "is below {tmp}/file, which is a file"),
        ("/proc/run", "/proc belongs to user 0, this process to user"),
    ],
)
@pytest.mark.parametrize("supervised", [(), ("--supervise",)])
def test_a_silly_workdir_is_refused_first_of_all(
    workdir: str,
    message: str,
    supervised: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before the config is looked up: nothing is downloaded, read or compiled, and nothing is left behind."""
    (tmp_path / "file").write_text("")
    argv = ["--config=no_such_config", "--workdir", workdir.format(tmp=tmp_path), *supervised]
    assert launch.main(argv) == 2
    assert message.format(tmp=tmp_path) in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_disk_that_is_full_or_read_only_is_no_matter_of_owners(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 77 where the disk has room for no folder any more; 2, with the way out, where it is read-only."""
    with small_disk(tmp_path / "disk", 64) as disk:
        argv = ["--config=tiny", "--workdir", str(disk / "run")]
        (disk / "file").touch()
        remount(disk, "nr_inodes=2")  # the disk's own folder and the file
        assert launch.main(argv) == 77
        way_out = "Make room there, or set --workdir to a folder on another disk."
        assert f"cannot be written to (No space left on device). {way_out}" in capsys.readouterr().err
        remount(disk, "ro")
        assert launch.main(argv) == 2
        assert f"cannot be written to (Read-only file system). {way_out}" in capsys.readouterr().err


def test_a_new_workdir_below_a_folder_is_fine(tmp_path: Path) -> None:
    """It is not made either."""
    check_workdir(str(tmp_path / "a" / "b"))
    check_workdir("gs://bucket/run")
    assert list(tmp_path.iterdir()) == []


def test_a_bug_keeps_its_traceback() -> None:
    """A ValueError out of a library is no message for a user, and is not presented as one."""

    def library_error() -> int:
        json.loads("{")
        return 0

    def mistake_of_ours() -> int:
        return loop_of_ours.mistake()

    loop_of_ours = types.ModuleType("jtrain.mistaken")
    exec("def mistake():\n    a, b = [1]\n", loop_of_ours.__dict__)
    with pytest.raises(json.JSONDecodeError):
        run(library_error)
    with pytest.raises(ValueError, match="not enough values"):
        run(mistake_of_ours)


def test_our_own_checks_and_bad_paths_are_messages(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`run` prints them and returns 2."""

    def missing_file() -> int:
        (tmp_path / "missing").read_text()
        return 0

    def refusal() -> int:
        join_processes({"JTRAIN_PROCESS_ID": "1"})
        return 0

    assert run(missing_file) == 2
    assert "missing" in capsys.readouterr().err
    assert run(refusal) == 2
    assert capsys.readouterr().err.startswith(
        "error: JTRAIN_PROCESS_ID is set, but JTRAIN_COORDINATOR is not."
    )


def test_an_exit_code_passes_and_ctrl_c_is_no_bug() -> None:
    """75 is the loop's; 130 is what shells show for SIGINT."""

    def interrupted() -> int:
        # A shell starts what it puts behind without it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)
        return 0

    assert run(lambda: 75) == 75
    assert run(interrupted) == 130


# --- starting jax -----------------------------------------------------------------------------------------------


def test_emulated_devices_are_there(tmp_path: Path) -> None:
    """Also where XLA_FLAGS says another number: the last one counts."""
    env = {"XDG_CACHE_HOME": str(tmp_path), "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    env["JAX_COMPILATION_CACHE_DIR"] = ""
    done = python(*program(__file__, "start_jax", 3)[1:], env=env)
    assert done.stdout.split()[:2] == ["3", "cpu"], done.stderr


@pytest.mark.parametrize(("devices", "kept"), [(1, True), (2, False)])
def test_programs_with_collectives_are_not_kept_on_cpus(devices: int, kept: bool, tmp_path: Path) -> None:
    """Read from the cache, XLA:CPU's run their collectives in any order, and stop each other."""
    names = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    done = python(*program(__file__, "start_jax", devices, "compile")[1:], env=names)
    assert done.returncode == 0, done.stderr
    assert any("lambda" in file.name for file in tmp_path.iterdir()) == kept


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="this machine has a GPU")
def test_without_an_accelerator_the_cpu_is_chosen_in_silence() -> None:
    """Though plugins for TPU and CUDA are installed ([aot]): they would look for hardware, at length, on
    stderr.
    """
    done = python(*program(__file__, "start_jax", 0)[1:])
    assert done.stdout.split()[:2] == ["1", "cpu"]
    assert done.stderr == ""


def test_compiled_programs_are_kept_in_the_users_cache(tmp_path: Path) -> None:
    """XDG_CACHE_HOME/jtrain/xla, unless JAX_COMPILATION_CACHE_DIR says another place."""
    start = program(__file__, "start_jax", 1)[1:]
    done = python(*start, env={"XDG_CACHE_HOME": str(tmp_path), "JAX_COMPILATION_CACHE_DIR": None})
    assert done.stdout.split()[-1] == str(tmp_path / "jtrain" / "xla"), done.stderr
    done = python(*start, env={"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "mine")})
    assert done.stdout.split()[-1] == str(tmp_path / "mine"), done.stderr


# --- launch/ ----------------------------------------------------------------------------------------------------


def test_every_kit_is_short_and_ends_in_the_one_command() -> None:
    """DESIGN section 3, and each script is valid shell. Three only prepare what another one starts."""
    prepare = {"kuberay.yaml", "queued_resource.sh", "settings.yaml"}
    kits = [path for path in (ROOT / "launch").rglob("*") if path.suffix in (".sh", ".sbatch", ".yaml")]
    assert len(kits) == 11
    for kit in kits:
        assert len(kit.read_text().splitlines()) <= 60
        assert ("jtrain.launch --supervise" in kit.read_text()) == (kit.name not in prepare), kit
    for script in (*(kit for kit in kits if kit.suffix != ".yaml"), ROOT / ".ci" / "run"):
        subprocess.run(["bash", "-n", str(script)], check=True)


def local_sh(processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "launch" / "local.sh"), "-n", str(processes), *arguments]
    env = os.environ | {"PYTHON": sys.executable}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("processes", [1, 3])
def test_local_sh_starts_every_process_and_keeps_the_exit_code(processes: int) -> None:
    """Arguments arrive as they are, and the code of a refusal comes through."""
    done = local_sh(processes, "--config=a b", "--emulate-devices", "0")
    assert done.returncode == 2
    assert done.stderr.count("--emulate-devices 0 must be at least 1") == processes


PEERS_APART = ("--set", "mesh.context=4", "--set", "mesh.tensor=2")
"""Both processes have devices that need all rows: each fetches half of them."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "devices"),
    [(("--with", "zero3"), 2), pytest.param(PEERS_APART, 4, marks=pytest.mark.slow)],
    ids=str,
)
def test_processes_train_as_one(layout: tuple[str, ...], devices: int, tmp_path: Path) -> None:
    """Two processes of some devices give the losses, batches and checkpoint of one process with all of them."""
    arguments = ["--config=tiny", "--with", "debug", *layout, "--set", "precision.compute_dtype=float32"]
    few, all_devices = ("--emulate-devices", str(devices)), ("--emulate-devices", str(2 * devices))
    arguments += ["--set", "eval.every_steps=None"]  # two compilations less in each process
    window = ["--set", "profile.steps=(2,4)", "--set", "profile.clocks=none"]
    done = local_sh(2, *arguments, *window, *few, "--workdir", str(tmp_path / "two"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("results in") == 1, "process 0 speaks for all"
    assert f"[0] cpu: {2 * devices} x cpu, 2 processes on 1 host (" in done.stdout
    assert_each_traced_its_own(tmp_path / "two", processes=2, devices=devices)
    done = local_sh(1, *arguments, *all_devices, "--workdir", str(tmp_path / "one"))
    assert done.returncode == 0, done.stderr
    assert_starts_in_ten_lines(done.stdout, tmp_path / "one", devices=2 * devices)
    two, one = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("two", "one")
    )
    losses = [line["loss_nats"] for line in one if "loss_nats" in line]
    assert losses[-1] < losses[0] - 0.1, "the loss must move, or equality proves nothing"
    assert [line["loss_nats"] for line in two if "loss_nats" in line] == pytest.approx(losses, rel=1e-5)
    assert [line.get("batch_hash") for line in two] == [line.get("batch_hash") for line in one]
    assert (tmp_path / "two" / "checkpoints" / "5").is_dir()


def assert_starts_in_ten_lines(output: str, workdir: Path, *, devices: int) -> None:
    """What is here comes first, then how it is used, and where the whole plan is."""
    start, _, _ = output.partition("\nstep 1/5 ")
    first, second, *more = start.splitlines()
    assert first.startswith(f"cpu: {devices} x cpu, 1 process on 1 host (")
    assert second.startswith("mesh.data=auto: ")
    assert any(line.endswith(f"; the whole plan: {workdir}/plan.txt") for line in more)
    # A terminal has the names of the columns beside.
    assert 4 <= len(more) <= 7
    plan = (workdir / "plan.txt").read_text()
    assert plan.startswith("164,160 parameters over data=")
    assert "attention.k_DKH" in plan
    assert "collectives per device and step" in plan


def assert_each_traced_its_own(workdir: Path, *, processes: int, devices: int) -> None:
    """A report by each process of its devices, and one table of all in the terminal."""
    window = workdir / "profile" / "2"
    for process in range(processes):
        folder = window if process == 0 else window / f"process-{process}"
        found = read_breakdown(folder / "breakdown.json")
        assert (found.process, found.num_processes) == (process, processes)
        assert (found.num_devices, found.all_devices) == (devices, processes * devices)
        assert [step.step for step in found.steps] == [3, 4]
        assert all(len(step.devices) == devices for step in found.steps)
        assert (
            f"{processes * devices} × cpu (cpu), the {devices} of process {process}"
            in (folder / "report.html").read_text()
        )
    assert '<a href="process-1/report.html">process 1</a>' in (window / "report.html").read_text()
    assert '<a href="../report.html">process 0</a>' in (window / "process-1" / "report.html").read_text()
    said = python("-m", "jtrain.profile", str(workdir)).stdout.partition("processes, mean over the steps")[2]
    assert re.findall(r"^ (\d) +[\d.]+ m?s", said, re.MULTILINE) == ["0", "1"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_a_run_reuses_the_pages_of_the_step_before(tmp_path: Path) -> None:
    """Page faults of each step: 20,000 and more where the allocator is told after XLA's threads have
    begun.
    """
    done = python(
        *program(__file__, "count_faults_of_steps", tmp_path / "run")[1:], env={"JAX_PLATFORMS": "cpu"}
    )
    assert done.returncode == 0, done.stderr
    faults = json.loads(done.stdout)
    assert len(faults) == 15
    assert sorted(faults)[7] < 1000, faults
