"""Kills of what runs beside steps: an evaluation, and the commands that prepare and adopt data."""

import os
import random
import signal
import time
from pathlib import Path

from jtrain.bench.fault_trials import processes
from jtrain.bench.fault_trials.kinds import fault
from jtrain.bench.fault_trials.trial import Trial
from jtrain.telemetry import metrics

EVALUATE_EVERY = 2
MOST_KILLS = 3
_PREPARE, _ADOPT = "prepare", "adopt"


@fault(
    "kill-evaluation",
    "while a held-out split is evaluated",
    sets=(f"eval.every_steps={EVALUATE_EVERY}",),
    chains=True,
)
def kill_evaluation(trial: Trial) -> None:
    """Between the line of a step that evaluates and the line of its evaluation."""
    attempt = trial.start()
    step = trial.draw_step(2)
    # The next step that evaluates, as it is every second one.
    step += step % EVALUATE_EVERY
    attempt.until(lambda: trial.workdir.last_step() >= step)
    if _is_evaluated(trial, step):
        trial.result.notes.append(f"the evaluation of step {step} ended before the kill")
    trial.kill(attempt)


def _is_evaluated(trial: Trial, step: int) -> bool:
    lines = metrics.read(trial.workdir.metrics_file)
    # The line of an evaluation has its step, and no loss of a batch.
    return any(line.get("step") == step and "loss_nats" not in line for line in lines)


@fault("kill-prepare", "`jtrain data prepare` is killed up to three times", processes=(1,), chains=True)
def kill_prepare(trial: Trial) -> None:
    """The same command goes on, and the bytes are those of an unbroken one."""
    _kill_command(trial, _PREPARE)


@fault("kill-adopt", "`jtrain data adopt` is killed up to three times", processes=(1,), chains=True)
def kill_adopt(trial: Trial) -> None:
    """Kills as `kill-prepare` does."""
    _kill_command(trial, _ADOPT)


def _kill_command(trial: Trial, verb: str) -> None:
    folder = trial.folder / f"{verb}-{trial.part}"
    folder.mkdir()
    argv = _command(verb, _corpus(trial.folder))
    start_s = time.monotonic()
    # The same name for both: the files repeat the command that made them.
    out, aside = folder / "out", folder / "unbroken"
    argv += ["--out", str(out)]
    _run_to_its_end(trial, argv, folder / "unbroken.log")
    unbroken_s = time.monotonic() - start_s
    out.rename(aside)
    for number in range(trial.rng.randint(1, MOST_KILLS)):
        log = folder / f"killed{number}.log"
        pid = processes.fork(lambda: processes.run_command(argv), log)
        end_s = time.monotonic() + trial.rng.uniform(0, unbroken_s)
        # WNOWAIT leaves the process to `waitpid` below: its number cannot be given to another one meanwhile.
        while time.monotonic() < end_s and not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            time.sleep(0.005)  # until the drawn instant, or the command's own end
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        trial.check_strays()
    _run_to_its_end(trial, argv, folder / "finished.log")
    unbroken, finished = _contents(aside), _contents(out)
    if not unbroken or finished != unbroken:
        names = sorted(name for name in {**unbroken, **finished} if unbroken.get(name) != finished.get(name))
        trial.wrong(f"{verb} that was killed made other files than an unbroken one: {names}")


def _run_to_its_end(trial: Trial, argv: list[str], log: Path) -> None:
    pid = processes.fork(lambda: processes.run_command(argv), log)
    _, status = os.waitpid(pid, 0)
    if status:
        trial.wrong(
            f"{' '.join(argv)} ended with {os.waitstatus_to_exitcode(status)}: {log.read_text()[-500:]}"
        )


def _corpus(folder: Path) -> dict[str, Path]:
    """Writes the same documents as JSON lines for `prepare`, and as ids that end with 0 for `adopt`."""
    rng = random.Random(0)
    texts = [f"{number} " + "word " * rng.randrange(200) for number in range(2000)]
    files = {_PREPARE: folder / "corpus.jsonl", _ADOPT: folder / "ids.bin"}
    files[_PREPARE].write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    # Ids of bytes, of which 0 ends a document.
    files[_ADOPT].write_bytes(b"".join(text.encode() + b"\0" for text in texts))
    return files


def _command(verb: str, corpus: dict[str, Path]) -> list[str]:
    file = str(corpus[verb])
    if verb == _PREPARE:
        return ["jtrain.data", verb, "--config=tiny", "--set", f"data.path={file}", "--workers", "1"]
    return ["jtrain.data", verb, "--from", file, "--tokenizer", "bytes", "--dtype", "uint8"]


def _contents(out: Path) -> dict[str, bytes]:
    """Returns name -> bytes of each file."""
    return {
        str(file.relative_to(out)): file.read_bytes() for file in sorted(out.rglob("*")) if file.is_file()
    }
