"""Few files of the planner know an option of the layout by name: a new option is described in layout/ and
step/, and a plan follows by itself.
"""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from jtrain.layout.layout import Layout, LayoutSpec, OffloadSpec
from jtrain.layout.mesh import MeshSpec
from jtrain.layout.offload_spec import OFFLOADABLE
from jtrain.model.block import Block
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW
from jtrain.plan.estimate.memory import MemoryPlan, memory
from jtrain.plan.estimate.memory_passes import MemoryPasses, memory_passes
from jtrain.plan.job import Job
from jtrain.step.description import part_jaxprs, trace_cache
from jtrain.step.description.traced_parts import forget_traces
from tests.layouts import layout_from

PLAN = Path(__file__).parents[2] / "jtrain" / "plan"

KNOW = {
    "from_run.py": "a search chooses the microbatches itself, whatever layout.microbatch_tokens says",
    "estimate/machine.py": "host memory that the driver pages from is memory of the device",
    "estimate/peak_memory.py": "copies that compilers make under a ZeRO stage, in closed form",
    "pipeline_choice.py": "a pipeline is compared with ZeRO-3 alone",
    "report/interconnect_table.py": "published configurations",
    "report/survey_tables.py": "published strategies",
    "smaller_settings.py": "settings in the order of how little they change",
}
"""File -> reason why it names options."""


def options() -> set[str]:
    """Names of options. Without `microbatches`, which is a size of the batch, and names that mean other
    things too.
    """
    names = {field.name for of in (LayoutSpec, OffloadSpec) for field in dataclasses.fields(of)}
    return names - {"microbatches", "auto", "update", *OFFLOADABLE}


def names_of(source: str) -> set[str]:
    """Attributes, arguments and config paths of a source."""
    found = set[str]()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                found.add(name)
            case ast.Dict(keys=keys):
                texts = [
                    key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)
                ]
                found |= {part for text in texts for part in text.split(".")}
            case _:
                pass
    return found


def test_few_files_of_the_planner_know_an_option() -> None:
    """Each has a reason; messages may name options, because they are for people."""
    files = {str(file.relative_to(PLAN)): names_of(file.read_text()) for file in PLAN.rglob("*.py")}
    assert {file for file, names in files.items() if names & options()} == set(KNOW)
    assert {"zero_stage", "remat", "offload", "tensor_overlap"} <= options()
    assert names_of("f(zero_stage=3)") == {"zero_stage"}


LAYERS, ROWS, LENGTH, WIDTH, WIDE = 3, 2, 64, 64, 8192
"""Sizes of a step on 8 devices; `WIDE` is that of the array that the made option adds."""

ARRAY_BYTES = ROWS * LENGTH * 2
"""Bytes of one column of a device's tokens in bfloat16."""


@dataclasses.dataclass(frozen=True)
class MadeSpec(LayoutSpec):
    """Options of a layout with one that nobody else has.

    detour: way of the feed-forward layer's result into the residual stream: none, through a sine, whose
      backward pass needs the result, or through an array that is wider than all others.
    """

    detour: str = "none"


@pytest.fixture
def made_option(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A step that does as `MadeSpec.detour` says, and no traces left behind."""
    detours: list[str] = []
    placement_of, feed_forward = part_jaxprs.placement_of, Block.feed_forward

    def noted(layout: Layout) -> Any:
        assert isinstance(layout.spec, MadeSpec)
        detours.append(layout.spec.detour)
        return placement_of(layout)

    def detoured(self: Block, *args: Any, **settings: Any) -> Any:
        y_BLD, losses = feed_forward(self, *args, **settings)
        if detours[-1] == "sine":
            y_BLD = jnp.sin(y_BLD)
        if detours[-1] == "wide":
            widening = jnp.ones((y_BLD.shape[-1], WIDE // WIDTH * y_BLD.shape[-1]), y_BLD.dtype)
            y_BLD = jnp.sin(y_BLD @ widening) @ widening.T
        return checkpoint_name(y_BLD, "detour"), losses

    monkeypatch.setattr(part_jaxprs, "placement_of", noted)
    monkeypatch.setattr(Block, "feed_forward", detoured)
    monkeypatch.setattr(trace_cache, "folder", lambda: None)
    forget_traces()
    yield
    forget_traces()


def planned(detour: str, remat: str) -> tuple[MemoryPlan, MemoryPasses]:
    """Bytes of a plan, and of its passes over memory."""
    model = Transformer(
        num_layers=LAYERS, d_model=WIDTH, num_heads=8, num_kv_heads=4, head_dim=8, d_ff=96, vocab_size=128
    )
    layout = layout_from(dict(zero_stage=1, remat=remat), MeshSpec(data=8), model.param_infos())
    spec = MadeSpec(
        **{field.name: getattr(layout.spec, field.name) for field in dataclasses.fields(LayoutSpec)}
    )
    layout = dataclasses.replace(layout, spec=dataclasses.replace(spec, detour=detour))
    job = Job(model, layout, AdamW(peak_lr=1e-3), 8 * ROWS, LENGTH)
    return memory(job), memory_passes(job, 1.0)


def test_a_made_option_changes_planned_memory_and_passes(made_option: None) -> None:
    """A layer that keeps one array more takes its bytes more, and passes over it: no file of the planner knows.

    The backward pass reads the array and a gradient, and writes another gradient.
    """
    del made_option
    (plain, plain_passes), (sine, sine_passes) = planned("none", "none"), planned("sine", "none")
    assert sine.activations - plain.activations == LAYERS * ARRAY_BYTES * WIDTH
    assert sine_passes.backward_s - plain_passes.backward_s == 3 * LAYERS * ARRAY_BYTES * WIDTH


def test_a_made_option_changes_the_widest_moment(made_option: None) -> None:
    """Layers that keep their input alone compute a wide array again, which takes most of their memory."""
    del made_option
    (plain, plain_passes), (wide, wide_passes) = planned("none", "full"), planned("wide", "full")
    assert wide.activations == plain.activations
    # The product of the first, its gradient and that of its sine; all others are narrow.
    assert plain.workspace < ARRAY_BYTES * WIDE
    assert 3 * ARRAY_BYTES * WIDE <= wide.workspace < 3.2 * ARRAY_BYTES * WIDE
    # The sine reads and writes.
    assert wide_passes.forward_s - plain_passes.forward_s == 2 * LAYERS * ARRAY_BYTES * WIDE
