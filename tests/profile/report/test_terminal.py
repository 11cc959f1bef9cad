import dataclasses
import io
import re

import pytest
from rich.console import Console

from jtrain.profile.analysis import advice, figures
from jtrain.profile.analysis.records import Breakdown
from jtrain.profile.report.profile_page import print_breakdown
from jtrain.report import number_formats
from tests.profile import example


def printed(breakdown: Breakdown, width: int = 110) -> str:
    """Output of the report to a file or a pipe."""
    into = io.StringIO()
    print_breakdown(breakdown, Console(file=into, width=width))
    return into.getvalue()


def test_the_terminal_says_what_the_page_says() -> None:
    """Title, sentence, every part with its seconds and share, collectives, ops, devices, memory, advice,
    notes.
    """
    breakdown = example.breakdown()
    text = printed(breakdown)

    step = figures.mean_step(breakdown)
    assert text.startswith("Steps 20 to 24 on 4 × NVIDIA H200 (cuda)\n")
    for part in figures.PARTS:
        row = re.search(rf"^ *{part.name} .* (\S+ (?:m|µ)?s) +(\S+%) *$", text, re.MULTILINE)
        assert row is not None, part.name
        assert row[1] == number_formats.seconds(step.parts[part.key])
        assert row[2] == number_formats.share(step.parts[part.key], step.duration_s)
    assert re.search(r"all-gather over data +50.00 ms +180.0 ms +14.00 GiB +14.00 GiB +1.00 +83.5 GB/s", text)
    assert re.search(
        r"gemm_fusion_dot.9 +layers/mlp, backward +utilisation +108.0 ms +8.9% +270.0 ms +1,680 MHz", text
    )
    assert re.search(r"computing +150.0 s +71.4% *\n *compile +31.00 s +14.8% *\n *exposed", text)
    assert "energy per token 0.02327 J" in " ".join(text.split())
    assert "at peak speed × instruction 1.261 × utilisation 1.207 × overlap 1.029 × frequency 1.111" in text
    assert "Not Supported" in text
    assert max(map(len, text.splitlines())) <= 110


def test_nothing_is_said_to_be_lost_where_no_peak_is_known() -> None:
    """Without a peak all computing is one part, which is neither the largest loss nor the subject of
    advice.
    """
    breakdown = example.unknown()
    text = printed(breakdown)

    assert re.search(r"computing +█+ +900.0 ms +75.0%", text)
    assert "low utilisation" not in text
    assert "the math's share is unknown; the largest loss is idle: 300.0 ms, 25.0%" in text
    assert "MFU, of" not in text
    assert len(found := advice.advise(breakdown)) == 1
    assert found[0].startswith("Idle: 300.0 ms")


def test_a_cpu_with_a_measured_peak_has_no_unknown_figure() -> None:
    """Tiles and columns that a CPU cannot fill are left out, with a note; the peak is said to be measured."""
    text = " ".join(printed(example.on_cpu()).split())
    known, notes = text.split("Unknown values, with the reason")
    assert "unknown" not in known
    assert "(cpu) reads none" in notes
    assert (
        "MFU, of the measured peak 46.0%; MFU, of the measured peak at the clock while it computed 50"
        in known
    )
    assert "energy per token" not in known
    assert "device 0 156.0 ms" not in known
    assert "core clock" in known
    assert "power" not in known.split("Devices, mean over the steps")[1]


def test_a_part_that_some_steps_do_not_know_keeps_the_sum() -> None:
    """The mean step's parts sum to its duration; an unknown part counts as 0."""
    breakdown = example.breakdown()
    first = breakdown.steps[0]
    merged = first.parts | {"idle": None, "host": (first.parts["host"] or 0.0) + (first.parts["idle"] or 0.0)}
    breakdown = dataclasses.replace(
        breakdown, steps=[dataclasses.replace(first, parts=merged), *breakdown.steps[1:]]
    )

    step = figures.mean_step(breakdown)

    assert sum(value or 0.0 for value in step.parts.values()) == pytest.approx(step.duration_s, rel=1e-12)


def test_mfu_of_a_window_is_all_work_over_all_time() -> None:
    """One step that takes nine times as long as another has a ninth of its MFU, and both together a fifth."""
    first, *_ = example.breakdown().steps
    slow = dataclasses.replace(
        first, duration_s=9 * first.duration_s, mfu={k: v and v / 9 for k, v in first.mfu.items()}
    )
    both = dataclasses.replace(example.breakdown(), steps=[first, slow])
    assert figures.mean_step(both).mfu["spec"] == pytest.approx((first.mfu["spec"] or 0.0) / 5)


def test_energy_per_token_needs_every_steps_energy() -> None:
    """With one step's energy unknown, the window's energy is unknown."""
    breakdown = example.breakdown()
    energies = [step.energy_j or 0.0 for step in breakdown.steps]
    assert figures.joules_per_token(breakdown) == pytest.approx(sum(energies) / (5 * 131_072))

    blind = dataclasses.replace(breakdown.steps[0], energy_j=None)
    assert (
        figures.joules_per_token(dataclasses.replace(breakdown, steps=[blind, *breakdown.steps[1:]])) is None
    )


def test_advice_names_the_seconds_and_the_setting() -> None:
    """Largest gain first: recomputation, the power limit, communication, a collective larger than planned."""
    found = advice.advise(example.breakdown())

    starts = [
        "Extra instructions: 146.4 ms, 12.0%",
        "Clock loss: 97.60 ms",
        "Exposed communication: 158.6 ms, 13.0%",
    ]
    assert [line.startswith(start) for line, start in zip(found, starts, strict=False)] == [True] * 3
    assert "1.26 times" in found[0]
    assert "layout.remat" in found[0]
    assert "73.20 ms of it due to the power limit at 642 W: `nvidia-smi --power-limit`" in found[1]
    assert "reduce-scatter over data: 100.0 ms of 120.0 ms exposed" in found[2]
    assert "precision.reduce_dtype" in found[2]
    assert "at most 50.00 ms of a step, 4.3% more tokens per second" in found[2]
    assert found[3].startswith(
        "reduce-scatter over data sends 9.00 GiB where the plan has 7.00 GiB, 1.29 times"
    )
    assert len(found) == 4


def of_communication(breakdown: Breakdown) -> str:
    """The advice on exposed communication."""
    (line,) = (line for line in advice.advise(breakdown) if line.startswith("Exposed communication"))
    return line


def test_advice_names_the_callback_that_devices_wait_for() -> None:
    """Where one activity of the host is most of its time; else the settings that make steps longer."""
    slow = example.step(20, shares=example.SHARES | {"theoretical": 0.33, "host": 0.15})
    for spent_s, words in (
        (0.17, "`callback SleepyStep` takes 170.0 ms of it"),
        (0.01, "metrics.log_every_steps"),
    ):
        host = {"data_wait": 0.9, "callback SleepyStep": spent_s}
        breakdown = dataclasses.replace(example.breakdown(), steps=[slow], host=host)
        (line,) = [line for line in advice.advise(breakdown) if line.startswith("Host")]
        assert words in line


def test_advice_does_not_name_what_is_set_already() -> None:
    """Without remat, with one microbatch and bfloat16 gradients, the advice is a larger batch."""
    breakdown = example.breakdown()
    settings: dict[str, str | int] = {
        "layout.zero_stage": 1,
        "layout.microbatches": 1,
        "layout.remat": "none",
    }
    settings["precision.reduce_dtype"] = "bfloat16"
    breakdown_with_settings = dataclasses.replace(breakdown, settings=settings)
    assert "try a larger data.global_batch" in of_communication(breakdown_with_settings)
    found = [line for line in advice.advise(breakdown_with_settings) if " where the plan has " not in line]
    assert not any("layout.remat" in line or "microbatches" in line for line in found)
    assert "layout.microbatches=4" in of_communication(_gathering(breakdown))


def test_advice_tells_zeros_traffic_over_context_from_that_of_attention() -> None:
    """Half of mesh.context and twice mesh.data would gather as much; it is less that a ring sends."""
    breakdown = _gathering(example.breakdown())
    [row] = breakdown.communication
    for kind, axes, said in (
        ("all-gather", ("data", "context"), "layout.zero_stage=2"),
        ("reduce-scatter", ("context",), "precision.reduce_dtype=bfloat16"),
        ("collective-permute", ("context",), "try half of mesh.context"),
    ):
        other = dataclasses.replace(row, kind=kind, axes=axes)
        assert said in of_communication(dataclasses.replace(breakdown, communication=[other]))


def _gathering(breakdown: Breakdown) -> Breakdown:
    return dataclasses.replace(breakdown, communication=breakdown.communication[:1])


def test_advice_blames_a_slow_device_on_its_clock() -> None:
    """Device 3 at 1,400 MHz delays the others: its clock is blamed, or without clocks its work."""
    breakdown = example.breakdown()
    steps = [
        dataclasses.replace(
            step,
            devices=[
                one | ({"exposed_communication_s": 0.0} if one["device"] == 3 else {}) for one in step.devices
            ],
        )
        for step in breakdown.steps
    ]
    slow = dataclasses.replace(breakdown.clocks[3], sm_mhz=[1400.0] * 300)
    clocked = dataclasses.replace(breakdown, steps=steps, clocks=[*breakdown.clocks[:3], slow])

    assert any(
        line.startswith("Device 3 computes 156.0 ms longer per step than the median one (19.0%)")
        and "its clock is 1,400 MHz against 1,75" in line
        for line in advice.advise(clocked)
    )
    assert any("data.balance=True" in line for line in advice.advise(dataclasses.replace(clocked, clocks=[])))
    assert not any("Device" in line for line in advice.advise(breakdown))


def test_a_good_step_gets_no_advice() -> None:
    """With every part below its threshold there is no advice."""
    shares = dict.fromkeys(example.SHARES, 0.01) | {"theoretical": 0.92}
    good = dataclasses.replace(example.breakdown(), steps=[example.step(0, shares=shares)], communication=[])
    assert advice.advise(good) == []
