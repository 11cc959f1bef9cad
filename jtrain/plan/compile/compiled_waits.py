"""Seconds that a compiled step waits for the network, at the rates of the plan that they are compared with.

The two-stream model walks the compiled schedule; matmuls, passes over memory, attention kernels and transfers
take what `jtrain.plan.estimate.step_time` assumes for them. What differs from the plan's waits is then the
schedule alone.
"""

import math

from jtrain.errors import UserError
from jtrain.plan.compile.stream_clock import Timeline
from jtrain.plan.compile.two_streams import Rates, two_streams
from jtrain.plan.estimate.attention_kernel import attention_s
from jtrain.plan.estimate.collectives import Collective, Kind
from jtrain.plan.estimate.matmul_time import bf16_peak, matmuls, rate_of
from jtrain.plan.estimate.network import seconds
from jtrain.plan.estimate.step_time import Assumptions
from jtrain.plan.job import Job
from jtrain_kernels.cost import matmul_rate


def compiled_timeline(hlo: str, job: Job) -> Timeline:
    """One run of a job's compiled step.

    Args:
      hlo: of `jtrain.plan.compile.compiled_step.CompiledStep`.

    Raises:
      UserError: a peak or the speed of a network is not published, or the trip count of a loop is unknown.
    """
    assert job.machine is not None, "rates are those of a machine"
    assume, machine, mesh = Assumptions(), job.machine, job.layout.mesh.shape
    device, rate = machine.device, rate_of(machine.device)
    peak, efficiency = bf16_peak(job), assume.network_of(device)
    assert device.hbm_bytes_per_s is not None

    def network(kind: Kind, axes: tuple[str, ...], array_bytes: int, group: int) -> float:
        if not axes:
            return 0.0
        return seconds(
            Collective("", kind, axes, group, "", 1, array_bytes), machine, mesh, efficiency=efficiency
        )

    rates = Rates(
        flops_16=rate.bf16 * peak,
        flops_8=rate.fp8 * (device.peak_fp8_flops or peak),
        flops_32=rate.bf16 * (matmul_rate(device, "float32") or peak),
        memory=assume.memory * device.hbm_bytes_per_s,
        collective=0.0,
        permute=0.0,
        host=math.inf,  # copies to and from host memory are not the network's
        links="switch" if device.torus_dims is None else "torus",
        network=network,
    )
    return two_streams(hlo, mesh, rates, _kernel_s(job, assume))


def schedule_waits_s(hlo: str, job: Job) -> float | None:
    """Seconds in which a compiled step waits for the network.

    None if they cannot be read: branches of a pipeline are not taken in every tick, and loops may be of
    unknown length.
    """
    if job.layout.pipeline is not None:
        return None
    try:
        return compiled_timeline(hlo, job).waiting_s
    except UserError:
        return None


def _kernel_s(job: Job, assume: Assumptions) -> dict[tuple[str, str], float]:
    """Seconds of the kernels of a step's attention and experts in each phase."""
    forward_s, backward_s = attention_s(job)
    experts = matmuls(job, memory=assume.memory, fraction=assume.matmul).experts
    return {
        ("forward", "layers/attention"): forward_s,
        ("backward", "layers/attention"): backward_s,
        ("forward", "layers/mlp"): experts["forward"],
        ("backward", "layers/mlp"): experts["by_input"] + experts["by_weight"] + experts["again"],
    }
