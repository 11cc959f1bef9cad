"""Advice for what does not fit: whoever types what a message offers has a plan that fits, and goes in no
circle.
"""

import dataclasses
import random
import re
import shlex

import jax
import pytest

from jtrain.cli.plan import main
from jtrain.config.load import for_devices, load_config
from jtrain.config.run import Run, build_run
from jtrain.errors import UserError
from jtrain.plan.estimate.machine import make_machine
from jtrain.plan.fit_check import check_fits_devices
from jtrain.plan.from_run import plan_job, search_task
from jtrain.plan.search import resolve_as_needed
from jtrain.step.layout_choices import layout_settings

CONFIGS = ("llama1b", "llama8b", "llama70b", "qwen3_8b", "qwen3_30b_a3b")
DEVICES = ("h100", "h200", "a100", "rtx4090", "b200", "v5p", "v5e")
COUNTS = (1, 1, 2, 4, 8, 8, 16, 64)
SETTINGS = {
    "data.global_batch": (8, 16, 64, 512, 2048),
    "data.seq_len": (1024, 4096, 16384, 65536),
    "layout.zero_stage": (0, 1, 3),
    "layout.remat": ("none", "full"),
    "layout.microbatches": (1, 2, 8),
    "mesh.tensor": (1, 2, 4),
    "optimizer.moment_dtype": ("bfloat16", "int8"),
    "precision.param_dtype": ("bfloat16",),
    "precision.grad_accum_dtype": ("bfloat16",),
}


type Case = tuple[str, str, int, int | None, list[str]]
"""A config, a device, their number, GiB of memory of a host or None, and settings."""


def draw(rng: random.Random) -> Case:
    chosen = rng.sample(sorted(SETTINGS), rng.randrange(5))
    sets = [f"{path}={rng.choice(SETTINGS[path])}" for path in chosen]
    if rng.random() < 0.2 and not any(text.startswith("layout.remat") for text in sets):
        sets += ["layout.remat=named", "layout.remat_save=('attention',)"]
    return rng.choice(CONFIGS), rng.choice(DEVICES), rng.choice(COUNTS), rng.choice((None, 128, 1024)), sets


def checked(name: str, device: str, count: int, host_gib: int | None, sets: list[str]) -> str | None:
    """What a run on such devices says before it starts: None if it fits, else the refusal.

    Raises:
      UserError: the settings are wrong, whatever the devices.
    """
    config = load_config(name, sets=sets)
    if config.mesh.data == "auto":
        for_devices(config, count)
    run: Run = build_run(config)
    machine = make_machine(device, count, host_memory_bytes=None if host_gib is None else host_gib * 2**30)
    if "as_needed" in layout_settings(run.layout).values():  # as `auto_layout.choose_layout` does
        run = dataclasses.replace(run, layout=resolve_as_needed(search_task(run, machine), run.mesh))
    try:
        check_fits_devices(plan_job(run, machine), jax.devices()[:1] * count, available=machine.hbm_bytes)
    except UserError as error:
        return str(error)
    return None


def offered(message: str) -> tuple[list[list[str]], int | None]:
    """The settings that a refusal offers, and the number of devices that they need if it is another."""
    more = re.search(r"Nothing fits on \d+ of them; on (\d+) this does", message)
    words = [shlex.split(line.split("  (")[0]) for line in message.splitlines()[1:]]
    return [line[1::2] for line in words], None if more is None else int(more[1])


def plan_words(case: Case) -> list[str]:
    """The command that plans a case."""
    name, device, count, host_gib, sets = case
    host = [] if host_gib is None else ["--host-memory", f"{host_gib}GiB"]
    return [
        f"--config={name}",
        "--device",
        device,
        "--count",
        str(count),
        *host,
        *(w for text in sets for w in ("--set", text)),
    ]


def plan_refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str | None:
    """What `python -m jtrain.plan` says of a plan that does not fit; None if it fits."""
    code = main(words)
    error = capsys.readouterr().err
    assert code in (0, 2), error
    return error if code == 2 else None


def plan_ways(refusal: str) -> list[list[str]]:
    """The options that a refused plan or search offers; what is in parentheses explains."""
    if "Any of these fits:" in refusal:
        ways = refusal.splitlines()[1:]
    else:
        ways = refusal.partition("any of: ")[2].strip().removesuffix(".").split("; ")
    return [shlex.split(re.split(r"\s+\((?![^']*')", way)[0]) for way in ways if way]


def with_options(words: list[str], way: list[str]) -> list[str]:
    """A command with other options; those that may be given once are replaced."""
    words = list(words)
    for option in {"--count", "--host-memory"} & set(way) & set(words):
        del words[words.index(option) : words.index(option) + 2]
    return words + [word for word in way if word != "--search" or word not in words]


def follow_runs(misfits: int, first_seed: int) -> int:
    """Types all that refused runs offer, of `misfits` random ones; returns how many settings that were."""
    typed, seed = 0, first_seed
    while misfits:
        name, device, count, host, sets = case = draw(random.Random(seed))
        seed += 1
        try:
            refusal = checked(*case)
        except UserError:
            continue  # wrong on any devices
        if refusal is None:
            continue
        misfits -= 1
        assert re.match(r"\d+ devices? (is|are) here: cpu, [\d.]+ GiB", refusal)
        ways, more = offered(refusal)
        assert ways, f"{case}: {refusal}"
        for way in ways:
            assert checked(name, device, more or count, host, [*sets, *way]) is None, (
                f"{case}: {way} of\n{refusal}"
            )
            typed += 1
    return typed


def follow_plan(words: list[str], capsys: pytest.CaptureFixture[str]) -> int:
    """Types all that a refused plan offers, by the command itself; returns how many commands, 0 if it is no
    misfit.
    """
    refusal = plan_refusal(words, capsys)
    if refusal is None or not re.search("does not fit|nothing fits", refusal):
        return 0
    ways = plan_ways(refusal)
    assert ways, f"{words}: {refusal}"
    for way in ways:
        again = with_options(words, way)
        assert plan_refusal(again, capsys) is None, f"{shlex.join(again)} of\n{refusal}"
    return len(ways)


def follow_plans(misfits: int, first_seed: int, capsys: pytest.CaptureFixture[str], *more: str) -> int:
    """The same of random plans, until `misfits` of them are refused."""
    typed, seed = 0, first_seed
    while misfits:
        found = follow_plan([*plan_words(draw(random.Random(seed))), *more], capsys)
        misfits, typed, seed = misfits - (found > 0), typed + found, seed + 1
    return typed


@pytest.mark.slow
def test_settings_that_a_refused_run_offers_fit() -> None:
    """Six random misfits, among them some that need more devices."""
    assert follow_runs(6, 0) > 10


@pytest.mark.slow
def test_options_that_a_refused_plan_offers_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """One H100 is too small for an 8B, whatever the layout: other formats, host memory, more of them."""
    alone = ["--config=llama8b", "--device", "h100", "--count", "1", "--set", "data.global_batch=8"]
    assert follow_plan(alone, capsys) > 2
    assert follow_plan([*alone, "--search"], capsys) > 2


@pytest.mark.slow
def test_no_advice_to_fifty_refused_runs_goes_in_a_circle() -> None:
    """All that they offer fits."""
    assert follow_runs(50, 1000) > 100


@pytest.mark.slow
def test_no_advice_of_refused_plans_goes_in_a_circle(capsys: pytest.CaptureFixture[str]) -> None:
    """Twenty plans and five searches."""
    assert follow_plans(20, 2000, capsys) > 40
    assert follow_plans(5, 3000, capsys, "--search") >= 10
