"""Refused commands: words of the message -> the command. The words tell which message of the source it is."""

from tests.ways_out.follow import Words

TEXT = ["--set", "data.path=corpus/*.txt"]
LAUNCH = ["launch", "--config=tiny", "--with", "debug", *TEXT, "--dry-run"]
MOE = ["launch", "--config=tiny_moe", "--with", "debug", *TEXT, "--dry-run"]
LORA = ["launch", "--config=tiny", "--with", "debug", "--with", "lora", *TEXT, "--dry-run"]
PLAN = ["plan", "--config=tiny", "--device", "h200"]
PIPELINE = ["plan", "pipeline", "--stages", "4", "--microbatches", "8"]
PLANNED = ["plan", "pipeline", "--config=tiny", "--device", "h200"]
COST = ["plan", "cost", "--config=tiny", "--price", "2"]
HASHED = ["plan", "ecmp", "--flows", "8", "--links", "8"]
STREAM = ["launch", "--config=tiny", "--with", "debug", "--with", "stream", *TEXT, "--dry-run"]
STUDENT = ["plan", "--config=tiny_sft", "--with", "distill", "--device", "h200"]
PAIRS = ["launch", "--config=tiny_dpo", "--with", "debug", "--dry-run"]
OWN_PAIRS = "{'pairs': {'path': 'stdlib_pairs', 'messages_field': 'chosen', 'rejected_field': 'rejected'}}"
INSPECT = ["data", "inspect", "--config=tiny", *TEXT]
PREPARE = ["data", "prepare", "--config=tiny", *TEXT]
ADOPT = ["data", "adopt", "--tokenizer", "bytes"]


def sets(*values: str, of: Words = LAUNCH) -> Words:
    return [*of, *(word for value in values for word in ("--set", value))]


_LAYOUTS: dict[str, Words] = {
    "the axis unused.": sets("mesh.data=0"),
    "this model has no experts": sets("mesh.expert=2"),
    "it must divide the query heads, and divide": sets("mesh.tensor=3", "model.num_kv_heads=8"),
    "there are no collectives over `tensor` to overlap": sets("layout.tensor_overlap=True"),
    "to a divisor of ": sets("mesh.data=8", "layout.microbatches=3"),
    "layout.microbatch_tokens=None to leave": sets("layout.microbatch_tokens=0"),
    " does not split evenly over mesh axes ": sets("mesh.data=8", "data.global_batch=12"),
    "under a causal mask the last of mesh.context=": sets("mesh.context=2", "data.context_order=contiguous"),
    "stages sum gradients in float32": sets("mesh.stage=2", "precision.grad_accum_dtype=bfloat16"),
    "stages sum gradients on the device": sets(
        "mesh.stage=2", "layout.offload.gradients=1.0", "layout.zero_stage=3"
    ),
    "does not stream through host memory": sets(
        "mesh.stage=2", "layout.offload.activations=1.0", "layout.remat=full"
    ),
    "with pipeline.gather=step": sets("mesh.stage=2", "layout.offload.params=1.0", "pipeline.gather=step"),
    " moves nothing: the smallest array is ": sets("layout.offload.optimizer=1e-9"),
    "layout.offload.update=host updates": sets("layout.offload.update=host"),
    "only a loop fetches one layer": sets("layout.offload.params=1.0", "model.scan_layers=False"),
    "lets the driver place pages": sets("layout.offload.unified_memory=True", "layout.offload.optimizer=1.0"),
    "remat=named saves": sets("layout.remat=named"),
    "it alternates between the chunks": sets(
        "mesh.stage=2", "pipeline.schedule=interleaved", "pipeline.chunks=1"
    ),
    " per worker. Leave pipeline.chunks at 1": sets(
        "mesh.stage=2", "pipeline.schedule=1f1b", "pipeline.chunks=2"
    ),
    "must be at least 1. Set layout.mlp_chunk": sets("layout.mlp_chunk=0", "layout.remat=full"),
    "which saves the hidden units of all": sets("layout.mlp_chunk=4"),
    "does not hide its collectives over `tensor`": sets(
        *("layout.mlp_chunk=4", "layout.remat=full", "mesh.tensor=2", "layout.tensor_overlap=True")
    ),
    "have one scale for all positions. Set layout.mlp_chunk": sets(
        *("layout.mlp_chunk=4", "layout.remat=full", "precision.matmul_dtype=fp8_delayed")
    ),
    "experts have buffers of their own": sets("layout.mlp_chunk=4", "layout.remat=full", of=MOE),
    "layout.mlp_chunk=\0 with pipeline.schedule=": sets(
        *("mesh.stage=2", "pipeline.schedule=zb-h1", "layout.mlp_chunk=4", "layout.remat=full")
    ),
    "which splits the backward pass": sets(
        *("mesh.stage=2", "mesh.data=2", "mesh.tensor=2", "pipeline.schedule=zb-h1"),
        *("layout.sequence_groups=2", "layout.microbatches=2"),
    ),
}

_ADAPTERS: dict[str, Words] = {
    "has no adapter beside it": sets("mesh.tensor=2", "layout.tensor_overlap=True", of=LORA),
    "masks are of all positions of a device": sets(
        *("adapter.dropout=0.1", "layout.mlp_chunk=4", "layout.remat=full"), of=LORA
    ),
    "groups of sequences have no adapter": sets("mesh.tensor=2", "layout.sequence_groups=2", of=LORA),
    "frozen weights and adapters multiply": sets("precision.matmul_dtype=fp8_delayed", of=LORA),
    " do not divide. Set adapter.base_dtype": sets("model.d_ff=96", "adapter.base_dtype=nf4", of=LORA),
    " do not divide. Use fewer devices along": sets("mesh.tensor=4", "adapter.base_dtype=nf4", of=LORA),
    "blocks stay in device memory": sets("layout.offload.params=1.0", "adapter.base_dtype=nf4", of=LORA),
    "peft has no dropout for experts": sets("adapter.dropout=0.1", of=[*MOE, "--with", "lora"]),
}

_PREFERENCES: dict[str, Words] = {
    "is the model without its adapter, and the run has none": [
        *(*LAUNCH[:4], "--with", "dpo", "--set", "data.path=None", "--set", f"data.sources={OWN_PAIRS}"),
        *("--set", "data.seq_len=256", "--dry-run"),
    ],
    " has preference pairs, whose loss is ": [
        *(*LAUNCH[:4], "--with", "lora", "--set", "data.path=None", "--set", f"data.sources={OWN_PAIRS}"),
        *("--set", "data.seq_len=256", "--dry-run"),
    ],
    "without its adapter the model would not be what it was": sets("adapter.train=('embed',)", of=PAIRS),
    "would be of different random models": sets("adapter.dropout=0.1", of=PAIRS),
    "pairs are compared by their log-probabilities alone": sets("model.z_loss=1e-4", of=PAIRS),
    "log-probabilities that are compared are of one": sets(
        "adapter=None", "objective.reference=none", "precision.matmul_dtype=fp8_current", of=PAIRS
    ),
    " has pairs, which are whole, but data.packing=": sets("data.packing=concat", of=PAIRS),
    "an index of prepared tokens holds no preference pairs. Set": sets("data.prepared=folder", of=PAIRS),
    "objective.form=simpo has no reference": sets("objective.form=simpo", of=PAIRS),
    "with objective.form=ipo, whose margin is ": sets("objective.form=ipo", "objective.margin=1.0", of=PAIRS),
}

_DISTILLATION: dict[str, Words] = {
    "finds what the teacher said by the tokens of": sets("data.packing=concat", of=STUDENT),
    " tokens of model.vocab_size=": sets("objective.top_k=900", of=STUDENT),
    "1 learns from the teacher alone": sets("objective.share=0.0", of=STUDENT),
}

_STREAMS: dict[str, Words] = {
    "must be at least 1. Set weight_stream.": sets("weight_stream.every_steps=0", of=STREAM),
    "weights go to a folder, which needs no token": sets("weight_stream.token_file=token.txt", of=STREAM),
    "knows the run by a token that both read from a file": sets(
        "weight_stream.to=tcp://host:7000", of=STREAM
    ),
    "holds the weights of another run, --workdir ": sets("weight_stream.to=../../policy", of=STREAM),
    "sends A and B of an adapter and nothing else": sets("weight_stream.only_adapter=True", of=STREAM),
}

_MODELS: dict[str, Words] = {
    "each key head serves the same number": sets("model.num_kv_heads=3"),
    "rotary positions rotate pairs": sets("model.head_dim=31"),
    "Set model.moe=None for a dense model": sets("model.moe.num_experts=1", of=MOE),
    " must be from 1 to model.moe.num_experts=": sets("model.moe.top_k=9", of=MOE),
    "a group has one expert": sets(
        "model.moe.num_groups=8",
        "model.moe.top_groups=4",
        of=["launch", "--config=tiny_moe", *TEXT, "--dry-run"],
    ),
    "or give them as fractions of the run": sets("optimizer.warmup_steps=100"),
    "and the moment comes to rest": sets("optimizer.moment_dtype=bfloat16", "optimizer.b2=0.999"),
    "the masters lose nothing": sets("optimizer.master_dtype=float32", "optimizer.param_rounding=stochastic"),
    "such parameters are their own masters": sets("optimizer.master_dtype=float32"),
    "nothing is rounded": sets("optimizer.param_rounding=stochastic"),
}

_RUNS: dict[str, Words] = {
    "which is mostly compilation": sets("profile.steps=(0, 5)"),
    "the second number must be above the first": sets("profile.steps=(3, 3)"),
    "ends after the run, num_steps=": sets("profile.steps=(4, 99)"),
    "holds none out and eval.sets is empty": sets("data.eval_fraction=0"),
    "must be at least \0. Set eval.": sets("eval.answers=-1"),
    " has a prompt with an answer behind it": sets("eval.answers=2"),
    " different ids, but model.vocab_size=": sets("model.vocab_size=100"),
    "Set data.tokenizer to a tokenizer.json": sets("data.tokenizer=nowhere/tokenizer.json"),
    ".path is empty. Set it to a file": sets("data.path=''"),
    " must be at least 0 (nothing held out) and below 1": sets("data.eval_fraction=2"),
    " must be above 0. Set data.read_timeout_s": sets("data.read_timeout_s=0"),
    "layout.offload.gradients=none.": sets("layout.offload.gradients=1.0", "layout.zero_stage=1"),
    "or add --emulate-devices \0 to try the layout on this CPU": sets("mesh.stage=16", "model.num_layers=16"),
    "with \0. Set layout.sequence_groups=1, or change the other": sets("layout.sequence_groups=3"),
    "layout.offload.activations=\0 moves nothing": sets(
        "layout.offload.activations=1e-9", "layout.remat=full"
    ),
    "so that the product is ": sets("mesh.data=4"),
    " too small: data.eval_fraction=": sets("data.eval_fraction=0.0001"),
    "must be at least \0. Set data.": sets("data.seq_len=1"),
    "divide or be a multiple of the latter": sets(
        "mesh.context=5", "layout.context_attention=ulysses", "data.seq_len=80"
    ),
    "stochastic rounding does not run on the host's": sets(
        "layout.offload.optimizer=1.0", "layout.offload.update=host", "optimizer.moment_dtype=int8"
    ),
    "Remove data.end_token": sets("data.end_token=x"),
    "--emulate-devices \0 must be at least 1": [*LAUNCH, "--emulate-devices", "0"],
    "--processes \0 must be at least 1": [
        *(*LAUNCH[:-1], "--supervise", "--processes", "0", "--workdir", "supervised"),
    ],
    "data.path is for one source": sets("data.sources={'a': {'path': 'corpus/*.txt'}}"),
}

_OPTIONS: dict[str, Words] = {
    " starts processes from a supervisor": [*LAUNCH, "--processes", "1"],
    "this host has no ": [*LAUNCH, "--device", "tpu"],
    "emulated devices are CPUs": [*LAUNCH, "--device", "gpu", "--emulate-devices", "8"],
    "--workdir is empty": [*LAUNCH, "--workdir", ""],
    " is the root of the file system": [*LAUNCH, "--workdir", "/"],
    ": no such config. ": ["launch", "--config=tinny", *LAUNCH[2:]],
    "Did you mean num_steps?": sets("num_stepz=5"),
    "has no field zero_stag.": sets("layout.zero_stag=3"),
    "has no fiddler debugg.": ["launch", "--config=tiny", "--with", "debugg", *LAUNCH[4:]],
    "no option ": [*LAUNCH, "--workdirr", "w"],
    "every other field that changes the losses": [*LAUNCH, "--allow-change", "optimizer.peak_lrr"],
    "is a page of tokens": [*INSPECT, "--html", "tokens.html"],
    "is the number of steps that --order reads": [
        *("data", "inspect", "--config=tiny", "--set", "data.path=stdlib", "--steps", "100"),
    ],
    "is after the run, which has num_steps=": [*INSPECT, "--step", "99999999"],
    "--order reads all steps from the first": [
        *("data", "inspect", "--config=tiny", "--set", "data.path=stdlib", "--order", "--step", "3"),
    ],
}

_PLANS: dict[str, Words] = {
    "no machine is named": ["plan", "--config=tiny"],
    ": both name a machine. ": [*PLAN, "--machine", "h200.toml"],
    "--compile: no compiler for ": ["plan", "--config=tiny", "--device", "mi300x", "--compile"],
    "a network needs a machine": ["plan", "network", "--count", "16"],
    ": how many? Give --count": ["plan", "network", "--device", "h200"],
    ": the file says it. Leave --device out": [
        *("plan", "network", "--machine", "h200.toml", "--device", "h200"),
    ],
    " is unknown. Give one of ": [
        *("plan", "network", "--device", "h200", "--count", "16", "--collective", "sum"),
    ],
    "--flows and --links belong together": ["plan", "ecmp", "--flows", "8"],
    "--flows and --links are instead of a machine": [
        *("plan", "ecmp", "--flows", "8", "--links", "8", "--device", "h200"),
    ],
    ": the variables are of a machine": [
        *("plan", "ecmp", "--flows", "8", "--links", "8", "--shell", "nccl.sh"),
    ],
    "a pipeline needs a number of ": ["plan", "pipeline", "--microbatches", "8"],
    " is of one schedule. Add --schedule": [*PIPELINE, "--chunks", "2"],
    " shows one schedule. Add --schedule": [*PIPELINE, "--svg", "a.svg"],
    " is for a config's times": [*PIPELINE, "--device", "h200", "--count", "8"],
    " changes a config. Give --config": [*PIPELINE, "--set", "seed=1"],
    "layouts of a search to compile. Add --search": [*PLAN, "--top", "1"],
    "--top \0 must be at least 1": [*PLAN, "--search", "--compile", "--top", "0"],
    "--tokens \0 must be at least 1": [*PLAN, "--tokens", "0.5"],
    "is not published, so neither ": [*COST, "--device", "v5p", "--carbon", "400"],
    "hardly any interval between saves ends": [
        *(*COST, "--device", "h200", "--mtbf", "0.0001", "--restart", "100"),
    ],
    "--seed \0 must be 0 or more": [*HASHED, "--seed", "-1"],
    "its switches spread flows by load": ["plan", "ecmp", "--machine", "adaptive.toml"],
    "hosts are under one leaf": ["plan", "ecmp", "--machine", "one_leaf.toml"],
    "say the chunks. Leave --chunks out": ["plan", "pipeline", "--csv", "a.csv", "--chunks", "2"],
    "schedules are simulated and drawn pass by ": [*PIPELINE[:-1], "100000"],
    "are the plan's. Leave --costs out": [*PLANNED, "--count", "8", "--costs", "1,1,1"],
    " tokens a step scales on ": ["plan", "walls", "--device", "h200", "--days", "0.0001"],
    "--count \0 must be at least 1": ["plan", "--config=tiny", "--device", "h200", "--count", "0"],
    "is no whole number of domains": ["plan", "network", "--device", "h200", "--count", "12"],
    "count is missing. Set it, or give --count": ["plan", "--config=tiny", "--machine", "no_count.toml"],
    "For memory alone, run python -m jtrain.launch": ["plan", "--config=tiny", "--device", "cpu"],
    "has no 8-bit ": [
        *("plan", "--config=tiny", "--device", "a100", "--set", "precision.matmul_dtype=fp8_current"),
    ],
    ": each device of a stage has ": [*PLANNED, "--count", "8", "--stages", "2", "--microbatches", "7"],
    "each needs at least one layer": [
        *(*PLANNED, "--count", "4", "--stages", "4", "--microbatches", "8", "--schedule", "zbv"),
    ],
    " evenly. Set data.global_batch to a multiple of ": [
        *(*PLAN, "--count", "64", "--search", "--set", "data.global_batch=7"),
    ],
    "Give --host-memory ": [
        *("plan", "--config=llama8b", "--device", "h200", "--host-memory", "0.001GiB"),
        *("--set", "layout.offload.optimizer=1.0"),
    ],
    " devices are not a multiple of ": [*PLAN, "--count", "8", "--set", "mesh.tensor=3"],
}

_DATA: dict[str, Words] = {
    "because the first batch is timed separately": [
        *("data", "bench", "--config=tiny", *TEXT, "--steps", "1"),
    ],
    "the data ends after ": [*INSPECT, "--order", "--set", "data.epochs=1"],
    "--workers \0 must be at least 1": [*PREPARE, "--out", "prepared", "--workers", "0"],
    "indexes can only be written to local folders": [*PREPARE, "--out", "gs://bucket/index"],
    "is not a prepared index. Remove it, or choose": [*PREPARE, "--out", "taken"],
    "is not a prepared index. Remove it, or set --name": [
        *(*ADOPT, "--from", "ids.parquet", "--out", "taken"),
    ],
    "as where uint32 is read as uint16": [*ADOPT, "--from", "wide.bin", "--out", "adopted"],
    "which column holds the ids? Set --column": [*ADOPT, "--from", "mds", "--out", "adopted_mds"],
    "no column \0. Set --column to one of ": [
        *(*ADOPT, "--from", "ids.parquet", "--column", "idz", "--out", "adopted_parquet"),
    ],
    "and ids are bytes or ndarray. Set --column": [
        *(*ADOPT, "--from", "mds", "--column", "id", "--out", "adopted_mds"),
    ],
    "and ids are lists of integers. Set --column": [
        *(*ADOPT, "--from", "words.parquet", "--column", "words", "--out", "adopted_words"),
    ],
}

SCENARIOS: dict[str, Words] = (
    _LAYOUTS
    | _ADAPTERS
    | _PREFERENCES
    | _DISTILLATION
    | _STREAMS
    | _MODELS
    | _RUNS
    | _OPTIONS
    | _PLANS
    | _DATA
)
