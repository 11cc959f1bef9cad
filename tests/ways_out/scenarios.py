"""Commands that are refused, one or more for each kind of message that names a way out."""

CORPUS = "CORPUS"
"""Stands for a glob of files with text, which the test makes."""

LAUNCH = ["launch", "--config=tiny", "--with", "debug", "--set", f"data.path={CORPUS}", "--dry-run"]
PLAN = ["plan", "--config=tiny", "--device", "h200"]


def sets(*values: str) -> list[str]:
    return [*LAUNCH, *(word for value in values for word in ("--set", value))]


SCENARIOS: dict[str, list[str]] = {
    # layouts
    "mesh too small": sets("mesh.data=4"),
    "an axis of 0": sets("mesh.data=0"),
    "experts of a dense model": sets("mesh.expert=2"),
    "heads over tensor": sets("mesh.tensor=3", "model.num_kv_heads=8"),
    "overlap without tensor": sets("layout.tensor_overlap=True"),
    "microbatches do not divide": sets("mesh.data=8", "layout.microbatches=3"),
    "no tokens at a time": sets("layout.microbatch_tokens=0"),
    "sequence groups": sets("layout.sequence_groups=3"),
    "batch does not split": sets("mesh.data=8", "data.global_batch=12"),
    "ring in order": sets("mesh.context=2", "data.context_order=contiguous"),
    "ulysses over more than heads": sets("mesh.context=8", "layout.context_attention=ulysses", "data.seq_len=128"),
    "gradients offloaded without shards": sets("layout.offload.gradients=1.0"),
    "gradients of stages in bfloat16": sets("mesh.stage=2", "precision.grad_accum_dtype=bfloat16"),
    "gradients of stages offloaded": sets(
        "mesh.stage=2", "layout.offload.gradients=1.0", "layout.zero_stage=3"
    ),
    "activations of stages offloaded": sets(
        "mesh.stage=2", "layout.offload.activations=1.0", "layout.remat=full"
    ),
    "weights gathered once a step": sets(
        "mesh.stage=2", "layout.offload.params=1.0", "pipeline.gather=step"
    ),
    "positions over context": sets("mesh.context=4", "data.seq_len=60"),
    "a share that moves nothing": sets("layout.offload.optimizer=1e-9"),
    "an update of nothing on the host": sets("layout.offload.update=host"),
    "offload without a scan": sets("layout.offload.params=1.0", "model.scan_layers=False"),
    "two places for pages": sets("layout.offload.unified_memory=True", "layout.offload.optimizer=1.0"),
    "remat without names": sets("layout.remat=named"),
    # models, optimizers, precision
    "key heads": sets("model.num_kv_heads=3"),
    "an odd head": sets("model.head_dim=31"),
    "one expert": ["launch", "--config=tiny_moe", *sets("model.moe.num_experts=1")[2:]],
    "more experts than there are": ["launch", "--config=tiny_moe", *sets("model.moe.top_k=9")[2:]],
    "warm-up longer than the run": sets("optimizer.warmup_steps=100"),
    "moments that come to rest": sets("optimizer.moment_dtype=bfloat16", "optimizer.b2=0.999"),
    "rounding of masters": sets("optimizer.master_dtype=float32", "optimizer.param_rounding=stochastic"),
    "masters of float32": sets("optimizer.master_dtype=float32"),
    "rounding of nothing": sets("optimizer.param_rounding=stochastic"),
    "8 bits on a processor": sets("precision.matmul_dtype=fp8_current"),
    # schedules
    "one chunk interleaved": sets("mesh.stage=2", "pipeline.schedule=interleaved", "pipeline.chunks=1"),
    "two chunks of 1f1b": sets("mesh.stage=2", "pipeline.schedule=1f1b", "pipeline.chunks=2"),
    "too few layers": sets("mesh.stage=4", "model.num_layers=2"),
    "groups in a split backward pass": sets(
        "mesh.stage=2", "layout.sequence_groups=2", "pipeline.schedule=zb-h1", "mesh.data=2",
        "layout.microbatches=2", "mesh.tensor=2",
    ),
    # runs
    "a window at step 1": sets("profile.steps=(0, 5)"),
    "a window of nothing": sets("profile.steps=(3, 3)"),
    "a window after the run": sets("profile.steps=(4, 99)"),
    "nothing to evaluate on": sets("data.eval_fraction=0"),
    "a small vocabulary": sets("model.vocab_size=100"),
    "no such tokenizer": sets("data.tokenizer=nowhere/tokenizer.json"),
    "no path": sets("data.path=''"),
    "all held out": sets("data.eval_fraction=2"),
    "no time to read": sets("data.read_timeout_s=0"),
    "a path and sources": sets("data.sources={'a': {'path': 'CORPUS'}}"),
    "too little text": sets("data.eval_fraction=0.0001"),
    "a source without a weight": sets("data.path=None", "data.sources={'a': {'path': 'CORPUS', 'weight': 0}}"),
    "where nothing is held out": sets("eval.every_steps=None", "data.eval_fraction=0", "eval.every_steps=5"),
    "a batch beyond 31 bits": sets("data.seq_len=1073741824"),
    # the command line
    "processes without a supervisor": [*LAUNCH, "--processes", "1"],
    "a topology that trains": [*LAUNCH[:-1], "--topology", "v5p:2x2x1"],
    "a device that is not here": [*LAUNCH, "--device", "tpu"],
    "a device and emulation": [*LAUNCH, "--device", "gpu", "--emulate-devices", "8"],
    "an empty workdir": [*LAUNCH, "--workdir", ""],
    "the root": [*LAUNCH, "--workdir", "/"],
    "a misspelt config": ["launch", "--config=tinny", *LAUNCH[2:]],
    "a misspelt field": sets("num_stepz=5"),
    "a misspelt path": sets("layout.zero_stag=3"),
    "a misspelt fiddler": ["launch", "--config=tiny", "--with", "debugg", *LAUNCH[4:]],
    "a misspelt option": [*LAUNCH, "--workdirr", "w"],
    "a change of no name": [*LAUNCH, "--allow-change", "optimizer.peak_lrr"],
    # plans
    "no machine": ["plan", "--config=tiny"],
    "two machines": [*PLAN, "--machine", "MACHINE"],
    "no compiler": ["plan", "--config=tiny", "--device", "mi300x", "--compile"],
    "no tokens": [*PLAN, "--tokens", "0"],
    "a calibrated search": [*PLAN, "--search", "--calibrate", "runs/tiny"],
    "efficiency of what was measured": [*PLAN, "--efficiency", "0.5", "--calibrate", "runs/tiny"],
    "a network of no machine": ["plan", "network"],
    "a network of how many": ["plan", "network", "--device", "h200"],
    "an unknown collective": ["plan", "network", "--device", "h200", "--count", "16", "--collective", "sum"],
    "flows alone": ["plan", "ecmp", "--flows", "8"],
    "flows of a machine": ["plan", "ecmp", "--flows", "8", "--links", "8", "--device", "h200"],
    "variables of no machine": ["plan", "ecmp", "--flows", "8", "--links", "8", "--shell", "nccl.sh"],
    "a pipeline of nothing": ["plan", "pipeline"],
    "chunks of no schedule": ["plan", "pipeline", "--stages", "4", "--microbatches", "8", "--chunks", "2"],
    "a picture of all schedules": ["plan", "pipeline", "--stages", "4", "--microbatches", "8", "--svg", "a.svg"],
    "times of no config": ["plan", "pipeline", "--stages", "4", "--microbatches", "8", "--device", "h200"],
    "a change of no config": ["plan", "pipeline", "--stages", "4", "--microbatches", "8", "--set", "seed=1"],
    "two schedules": [
        *("plan", "pipeline", "--stages", "4", "--microbatches", "8", "--schedule", "1f1b", "--csv", "a.csv")
    ],
    "two machines of a network": ["plan", "network", "--machine", "MACHINE", "--device", "h200"],
    "no devices": ["plan", "--config=tiny", "--device", "h200", "--count", "0"],
    "half a host": ["plan", "--config=tiny", "--device", "h200", "--count", "12"],
    "a batch that no search splits": [*PLAN, "--count", "64", "--search"],
    "layouts to compile of no search": [*PLAN, "--top", "1"],
    # others
    "steps of no order": ["data", "inspect", "--config=tiny", "--set", f"data.path={CORPUS}", "--steps", "20"],
    "a step of the order": [
        "data", "inspect", "--config=tiny", "--set", f"data.path={CORPUS}", "--order", "--step", "3",
    ],
    "no profile": ["profile", "runs/tiny"],
    "no such window": ["profile", "runs/tiny-profile", "--step", "3"],
}  # fmt: skip
