"""Plans of shipped configs with an adapter: the frozen base has no moment and no gradient."""

import pytest

from jtrain.config.load import load_config
from jtrain.config.run import build_run
from jtrain.plan.estimate.flops import flops_per_token
from jtrain.plan.estimate.machine import make_machine
from jtrain.plan.estimate.memory import memory
from jtrain.plan.from_run import plan_job

TRAINED = {"lora_llama8b": 41_943_040, "lora_qwen3_30b_a3b": 843_841_536}
FROZEN = {"lora_llama8b": 8_030_261_248, "lora_qwen3_30b_a3b": 30_532_122_624}


@pytest.mark.parametrize(("name", "count"), [("lora_llama8b", 1), ("lora_qwen3_30b_a3b", 8)])
def test_a_plan_counts_the_base_once(name: str, count: int) -> None:
    """Two bytes for each frozen parameter; four and two moments of four for each trained one."""
    sets = [f"mesh.data={count // 4 or 1}"]
    job = plan_job(build_run(load_config(name, [], sets)), make_machine("h100", count))
    trained = sum(p.info.size for p in job.layout.trained)
    assert trained == TRAINED[name]
    assert sum(p.info.size for p in job.layout.params) - trained == FROZEN[name]
    plan = memory(job)
    layout = job.layout
    stored = [
        layout.local_size(p.param_partition, p.info.shape) * (2 if p.info.frozen else 4)
        for p in layout.params
    ]
    assert plan.parameters == sum(stored)
    moments = sum(layout.local_size(p.optimizer_partition, p.info.shape) for p in layout.trained)
    assert plan.optimizer == 2 * 4 * moments
    assert plan.gradients <= 4 * trained
    flops, infos = flops_per_token(job.model, seq_len=job.seq_len, infos=job.layout.infos), job.layout.infos
    matrices = [info for info in infos if info.is_matrix and info.path != "embed_VD"]
    frozen, own = (sum(i.active_size for i in matrices if i.frozen == f) for f in (True, False))
    assert flops.matmul_flops == 4 * frozen + 6 * own


def test_the_base_of_qlora_llama70b_is_planned_in_blocks() -> None:
    """4.5 bits for each number of the layers' matrices, two bytes for embeddings and norms; the step fits in 80 GB."""
    sets = ["mesh.data=1", "layout.microbatches=16", "layout.microbatch_tokens=None"]
    job = plan_job(build_run(load_config("qlora_llama70b", [], sets)), make_machine("h100", 1))
    frozen = [p.info for p in job.layout.params if p.info.frozen]
    in_blocks = sum(info.size for info in frozen if info.dtype == "nf4")
    others = sum(info.size for info in frozen) - in_blocks
    assert (in_blocks, others) == (68_451_041_280, 2_102_665_216)
    trained = sum(p.info.size for p in job.layout.trained)
    plan = memory(job)
    assert plan.parameters == in_blocks * 9 // 16 + 2 * others + 4 * trained
    assert plan.total_bytes < 80e9
