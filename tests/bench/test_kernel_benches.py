"""Benches of kernels say what they need where they cannot run."""

import dataclasses

import pytest

from jtrain.bench import Options, elementwise, loss
from jtrain.hlo.memory_traffic import passes
from jtrain_kernels import triton_call
from jtrain_kernels.compile_only import aot
from jtrain_kernels.device import DEVICES


def test_without_a_gpu_elementwise_ops_are_not_timed() -> None:
    """A CPU's bandwidth would say nothing."""
    with pytest.raises(
        ValueError, match=r"elementwise needs a GPU, but the device here is 'cpu'\. Run the same"
    ):
        list(elementwise.run(Options(repeats=1, only=None, rehearse=False)))


@pytest.mark.aot
def test_calls_of_a_timed_program_are_neither_merged_nor_dropped() -> None:
    """Ten calls, compiled for an H100, are ten kernels that each read and write what the kernel of one call
    does.
    """
    case = next(elementwise.cases())
    assert case.op is not None
    forced = {case.op.name: "xla"}
    program, calls = elementwise.call_several(case.function), (case.arguments,) * elementwise.CALLS
    one, ten = (
        [(p.read_bytes, p.written_bytes) for p in passes(aot.compile_for("h100", f, *a, forced=forced).hlo)]
        for f, a in ((case.function, case.arguments), (program, calls))
    )
    assert one == [(8192 * 4096 * 2 + 4096 * 4, 8192 * 4096 * 2)]
    assert ten == one * 10


@pytest.mark.smoke
def test_without_a_gpu_the_loss_is_not_timed() -> None:
    """Nor its milliseconds; its bytes are another benchmark's."""
    with pytest.raises(
        ValueError, match=r"loss needs a GPU, but the device here is 'cpu'\..* run kernel_bytes"
    ):
        list(loss.run(Options(repeats=1, all_chunks=False, rehearse=False)))


def test_triton_does_not_run_on_gpus_that_are_too_old() -> None:
    """With what is needed, and what there is."""
    old = dataclasses.replace(DEVICES["a100"], name="t4", compute_capability=(7, 5))
    assert triton_call.refusal(old) == "Triton needs compute capability 8.0, and a t4 has 7.5"
    assert triton_call.capability(DEVICES["mi300x"]) == 0
