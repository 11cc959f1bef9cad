"""A pipelined run is the unpipelined run: losses, gradients, weights; every schedule, with all else that
splits.
"""

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jtrain.errors import UserError
from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.norm import NormSpec
from jtrain.optim import AdamW, Muon
from jtrain.pipeline.cells import to_csv
from jtrain.pipeline.published_schedules import PUBLISHED_SCHEDULES
from jtrain.pipeline.schedule import PipelineSchedule
from jtrain.pipeline.spec import PipelineSpec
from tests.pipeline.pipelined_runs import (
    ADAMW,
    EXPERTS,
    OPTIONS,
    SIZES,
    assert_composes,
    assert_same,
    settings,
    trained,
    unpipelined,
)
from tests.pipeline.toy import random_schedule

EIGHT = SIZES | dict(num_layers=8)
"""One unpipelined run serves two tests."""
UNEVEN = EXPERTS | dict(
    num_layers=4,
    tie_embeddings=True,
    vocab_size=66,
    norm=NormSpec(kind="layer", bias=True),
    moe=None,
    pattern=(BlockSpec(AttentionSpec(bias="all"), EXPERTS["moe"], norms="sandwich", stream_scale=True),),
)
"""An identity layer would train its biases and would end the stream, if it were a layer like others."""


def test_stages_are_not_a_model() -> None:
    """1F1B over three stages with ZeRO-3, a tied table and experts, whose routers have losses of their own.

    Four layers leave two stages with an identity layer, and three stages do not divide a microbatch's 64
    tokens.
    """
    got = trained(dict(stage=3, data=2), sizes=UNEVEN, zero_stage=3, microbatches=4, remat="full")
    assert_same(got, unpipelined(UNEVEN))


def test_split_backward_passes_are_not_a_model() -> None:
    """ZBV: two chunks per worker, gradients of weights from stashes; weights gathered once per step."""
    pipeline = dict(schedule="zbv", gather="step")
    axes = dict(stage=2, data=2, tensor=2)
    got = trained(axes, sizes=EIGHT, pipeline=pipeline, zero_stage=3, microbatches=4)
    assert_same(got, unpipelined(EIGHT))


def test_what_workers_compute_without_a_microbatch_is_not_kept() -> None:
    """Keys go round a ring of devices, which takes all of them: workers without a microbatch compute as well.

    With two chunks on each of four workers, what goes from one end to the other does not go where neighbours
    send.
    """
    axes = dict(stage=4, context=2)
    got = trained(axes, sizes=EIGHT, pipeline=settings("interleaved"), zero_stage=1, microbatches=8)
    assert_same(got, unpipelined(EIGHT))


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("schedule", PUBLISHED_SCHEDULES)
@pytest.mark.parametrize("stages", (2, 4))
def test_every_schedule_composes(stages: int, schedule: str, option: str) -> None:
    """With each axis, ZeRO stage, remat and precision."""
    assert_composes(stages, schedule, option)


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_eight_stages(option: str) -> None:
    """Every schedule, in a process with sixteen emulated devices: eight stages and an axis of two."""
    environ = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=16"}
    command = [sys.executable, "-m", "tests.pipeline.eight_stages", option]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [f"{name}: equal" for name in PUBLISHED_SCHEDULES]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", PUBLISHED_SCHEDULES)
@pytest.mark.parametrize("optimizer", (ADAMW, Muon(peak_lr=3e-3, warmup_steps=4)), ids=("adamw", "muon"))
def test_five_layers_over_four_chunks(schedule: str, optimizer: AdamW | Muon) -> None:
    """Three chunks have an identity layer each, which stays zero under weight decay, in parameters and
    moments.

    The first weights, which are drawn by layer, are the same.
    """
    assert optimizer.weight_decay > 0
    sizes = SIZES | dict(num_layers=5)
    pipeline = settings(schedule)
    stages = 4 // PipelineSpec(**pipeline).chunks_per_worker
    axes = dict(stage=stages, data=2)
    got = trained(axes, sizes=sizes, pipeline=pipeline, optimizer=optimizer, microbatches=8, zero_stage=3)
    assert_same(got, unpipelined(sizes, optimizer=optimizer))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gather", "zero_stage", "schedule"),
    list(itertools.product(("tick", "step"), (2, 3), ("1f1b", "zbv"))),
    ids=str,
)
def test_both_ways_of_gathering(gather: str, zero_stage: int, schedule: str) -> None:
    """In each tick, and once per step, with a tied table over stage, tensor and data."""
    sizes = SIZES | dict(tie_embeddings=True)
    axes = dict(stage=2, data=2, tensor=2)
    got = trained(
        axes, sizes=sizes, pipeline=settings(schedule, gather=gather), microbatches=4, zero_stage=zero_stage
    )
    assert_same(got, unpipelined(sizes))


def fits(schedule: PipelineSchedule) -> bool:
    """True if the batch and the vocabulary split over it.

    With 12 layers Adam makes 1e-4 of rounding in one gradient that is 1e-7 of the largest, so there are
    fewer.
    """
    return schedule.stages in (2, 4) and schedule.microbatches != 3 and schedule.virtual_stages <= 8


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_schedules_are_not_a_model(seed: int, tmp_path: Path) -> None:
    """Valid ones as a user would write them, from a file: they may split some backward passes and not
    others.
    """
    rng = random.Random(seed)
    schedule = next(s for s in iter(lambda: random_schedule(rng), None) if fits(s))
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(schedule))
    sizes = SIZES | dict(num_layers=schedule.virtual_stages)
    got = trained(
        dict(stage=schedule.stages),
        sizes=sizes,
        pipeline=dict(schedule=str(path)),
        microbatches=schedule.microbatches,
    )
    assert_same(got, unpipelined(sizes))


@pytest.mark.slow
@pytest.mark.parametrize("schedules", (("gpipe", "1f1b", "zb-h1"), ("zbv", "dualpipev")), ids=str)
def test_schedules_that_add_in_the_same_order_give_the_same_bits(schedules: tuple[str, ...]) -> None:
    """Microbatches add their gradients in their own order under each: losses and last weights are equal bit
    for bit.
    """
    runs = [trained(dict(stage=2, data=2), pipeline=settings(name), microbatches=4) for name in schedules]
    for got in runs[1:]:
        np.testing.assert_array_equal(got.losses, runs[0].losses)
        jax.tree.map(np.testing.assert_array_equal, got.last, runs[0].last)


@pytest.mark.slow
def test_shared_key_heads_under_stages() -> None:
    """Two key heads over four devices: the kernels' exchange once per step is the worker's own."""
    sizes = SIZES | dict(num_kv_heads=2)
    got = trained(dict(stage=2, tensor=4), sizes=sizes, microbatches=2, zero_stage=1)
    assert_same(got, unpipelined(sizes))


def test_groups_of_sequences_with_a_split_backward_pass_are_refused(tmp_path: Path) -> None:
    """Also by a file, whose content decides; the way out works."""
    path = tmp_path / "mine.csv"
    path.write_text("0F0,,0I0,0W0\n,1F0,1B0,\n")
    with pytest.raises(
        UserError, match=r"layout\.sequence_groups=2 with pipeline\.schedule=.*mine\.csv, which splits"
    ):
        trained(dict(stage=2, tensor=2), pipeline=dict(schedule=str(path)), sequence_groups=2)
