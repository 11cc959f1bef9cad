"""Claims of the survey (arXiv:2603.26823) as data: the survey's figure, and where jtrain's figures are read.

A claim about bytes is decided by the plan, whose bytes compilers confirm within 5 % (`jtrain bench
plan_compiled`), or by a compiler. One about seconds, clocks or throughput is decided by a measurement alone,
so that a prediction that agrees leaves it undecided. Limits of a run are decided by the plan: the survey
calculates them as well.
"""

from jtrain.plan.survey.evidence import Claim, Lookup, Noted

TABLE = "plan table"
FOURTEEN_B = (
    "plan qwen3_8b --device h100 --count 1 --host-memory 256GiB --set model.num_layers=40"
    " --set model.d_model=5120 --set model.num_heads=40 --set model.d_ff=17408 --set data.seq_len=4096"
    " --set data.global_batch=8 --set layout.microbatches=8 --set layout.offload.optimizer=1.0"
    " --set precision.param_dtype=bfloat16 --set optimizer.param_rounding=stochastic"
    " --set optimizer.moment_dtype=bfloat16_sr --set precision.grad_accum_dtype=bfloat16"
)
"""Exits with 0 only if the model fits; with `--compile`, only if the compiler confirms it."""

NEAR = 3.0
"""Factor within which an order of magnitude agrees: half of one, rounded."""

PEERS = "PEER_TORCH_PYTHON, which bench/peers/setup.sh makes"


def _row(what: str, key: str = "value") -> tuple[str, ...]:
    """Path of a figure of a benchmark's row."""
    return ("rows", what, key)


def _ratio(command: str, what: str, published: str) -> Lookup:
    """The ratio of a benchmark's row."""
    return Lookup(command, _row(what, "ratio"), published=published)


def _quotient(command: str, first: str, second: str, published: str, key: str = "value") -> Lookup:
    """A figure of a benchmark's first row over that of the second."""
    return Lookup(command, _row(first, key), _row(second, key), published=published)


def _reduction(command: str, what: str, published: str = "") -> Lookup:
    """The baseline of a benchmark's row over its value."""
    return Lookup(command, _row(what, "baseline"), _row(what), published=published)


def _over_data_parallel(strategy: str, *path: str) -> Lookup:
    """A figure of a strategy of table II over that of data parallelism."""
    return Lookup(TABLE, ("table_2", strategy, *path), ("table_2", "data parallel", *path))


def _table_1(model: str, gb: int, gpus: int) -> Claim:
    text = (
        f"Table I: GPUs of 80 GB that train {model} ({gb:,} GB); predicted with ZeRO-3 and full recomputation"
    )
    lookup = Lookup(TABLE, ("table_1", model, "devices_of_80_gb"))
    return Claim(
        f"table-1-{model}",
        text,
        str(gpus),
        lookup,
        low=float(gpus),
        high=float(gpus),
        unit="",
        decided_by="predicted",
    )


def _table_2(stage: int) -> Claim:
    text = f"Table II: largest model of ZeRO-{stage} on 8 GPUs of 80 GB over that of data parallelism"
    lookup = _over_data_parallel(f"ZeRO-{stage}", "largest", "80 GB")
    return Claim(f"zero-{stage}", text, "2x to 4x", lookup, low=2.0, decided_by="predicted")


def _step_s(network: str) -> tuple[str, ...]:
    # The first such row is the stated configuration.
    return ("table_3", "hierarchical", "step_s", network)


def _table_3(name: str, network: str, seconds: float) -> Claim:
    text = f"Table III: step of a 12B fine-tune on 2 hosts of 8 H100 over {network}, 6,144 tokens a row"
    needs = "2 hosts of 8 H100 with that network"
    return Claim(
        f"table-3-{name}",
        text,
        f"{seconds:g} s",
        Lookup(TABLE, _step_s(network)),
        low=0.9 * seconds,
        high=1.1 * seconds,
        unit="s",
        needs=needs,
    )


def _wall(name: str, flop: float) -> Claim:
    text = f"FLOP of the largest run of 90 days: {name} wall, predicted with 16M tokens a step"
    lookup = Lookup("plan walls --device h100", (f"{name.partition('-')[0]}_wall_flop",))
    low, high = flop / NEAR, flop * NEAR
    return Claim(
        f"wall-{name}", text, f"{flop:.0e}", lookup, low=low, high=high, unit="", decided_by="predicted"
    )


def _cost(name: str, what: str, unit: str, key: str) -> Claim:
    text = f"cost of ownership: {what} of llama8b on 64 x H100, 15T tokens at $2.50 an hour"
    command = "plan cost llama8b --device h100 --count 64 --tokens 15T --price 2.5"
    return Claim(
        f"cost-{name}",
        text,
        "",
        Lookup(command, ("rows", "64", key)),
        unit=unit,
        needs="a figure of the survey",
    )


CLAIMS_BY_SUBJECT = {
    "Data": (
        Claim(
            "data-throughput",
            "OVERLORD, 4,096 GPUs: throughput; measured: ids/s of short documents over Grain's",
            "up to 4.5x",
            measured=_ratio(
                "bench data --only mixing",
                "short documents, 306 sources: ArrayRecord against",
                "data_mixing-xeon",
            ),
            low=4.5,
            needs=PEERS,
        ),
        *(
            Claim(
                f"data-memory-{name}",
                f"OVERLORD: CPU memory of loaders; measured: {name}'s over jtrain's, 32 readers, 306 sources",
                "up to 13.5x",
                measured=_reduction(
                    "bench data --only memory",
                    f"memory (PSS), 32 consumers, 306 sources, against {name}",
                    "data_memory-xeon",
                ),
                low=13.5,
                needs=PEERS,
            )
            for name in ("Grain", "torch")
        ),
        Claim(
            "prefetch",
            "prefetch hides reading, without which GPUs are 25 to 50 % busy; measured: tokens/s of the whole "
            "loop on a CPU over the bare step's",
            "hidden",
            measured=_ratio("bench loop_overhead", "full loop", "loop_overhead-epyc"),
            low=0.97,  # the bar of the benchmark: its rounds differ by 3 %
        ),
    ),
    "Memory": (
        Claim(
            "bytes-per-parameter",
            "memory of a 7B with Adam in float32 on one device, per parameter",
            "about 40 B",
            Lookup(TABLE, ("table_2", "data parallel", "device_bytes"), ("table_1", "7B", "parameters")),
            low=36.0,
            high=44.0,
            unit="B",
            decided_by="predicted",
        ),
        _table_1("1B", 40, 1),
        _table_1("7B", 280, 4),
        _table_1("13B", 520, 7),
        _table_1("70B", 2800, 35),
        _table_1("175B", 7000, 88),
        _table_2(2),
        _table_2(3),
        Claim(
            "offload-10b",
            "ZeRO-Offload (Table II): 10^9 parameters on one H100 of 80 GB, optimizer state in host memory",
            "over 10",
            Lookup(FOURTEEN_B, ("formula", "parameters"), scale=1e-9),
            Lookup(
                f"{FOURTEEN_B} --compile",
                ("formula", "parameters"),
                scale=1e-9,
                noted=Noted("docs/memory.md", "a 14B model takes 61.6 GiB of one H100", 14.77),
            ),
            low=10.0,
            unit="",
            decided_by="compiled",
        ),
        Claim(
            "offload-activations",
            "Table II: peak with activations on the host over without; compiled: llama8b on 8 x H200",
            "below 1x",
            _over_data_parallel("offload: activations", "device_bytes"),
            _quotient(
                "bench plan_compiled",
                "llama8b, 8 x h200, activations on the host: peak",
                "llama8b, 8 x h200, ZeRO-3: peak",
                "plan_compiled-aot",
                "baseline",  # the compiler's bytes; the value is the plan's
            ),
            high=0.99,
            decided_by="compiled",
        ),
        Claim(
            "unified-memory",
            "Table II: one memory of CPU and GPU, transparent: bytes that a run places on the host itself; "
            "hardware dependent: refused elsewhere",
            "",
            Lookup(
                "plan llama1b --device gh200 --count 1 --set layout.offload.unified_memory=True",
                ("formula", "host_argument_bytes"),
            ),
            unit="B",
            needs="a GH200",
        ),
    ),
    "Communication": (
        Claim(
            "overlap",
            "Triton-distributed: a step over the one that overlaps; compiled: llama8b over tensor=8 of H200, "
            "by the two-stream model of both programs",
            "1.09x to 44.97x",
            compiled=_quotient(
                "bench overlap --device h200",
                "h200, plain: seconds of a step",
                "h200, in groups: seconds of a step",
                "overlap-aot",
            ),
            low=1.09,
            needs="8 GPUs joined by NVLink",
        ),
        Claim(
            "portability",
            "UniOrch: one code base for GPU, NPU and DCU; compiled: bytes of attention on a v6e over those "
            "of its arrays",
            "",
            compiled=Lookup(
                "bench kernel_bytes --only attention",
                _row("v6e, attention of a llama8b layer, splash: over each array once"),
                published="attention_bytes-aot",
            ),
            needs="an NPU and a DCU: jtrain has kernels for GPUs and TPUs",
        ),
        Claim(
            "e-ecmp",
            "E-ECMP: all-reduce with 16 queue pairs over one; predicted: 64 flows over 16 links",
            "up to 1.4x",
            Lookup("plan ecmp --flows 64 --links 16", ("rows", "16", "speed")),
            low=1.4,
            needs="a RoCE network whose switches hash queue pairs",
        ),
        _table_3("ethernet", "10 GbE", 39.8),
        _table_3("infiniband", "400G InfiniBand", 4.45),
        Claim(
            "table-3-ratio",
            "Table III: the first of these steps over the second",
            "9x",
            Lookup(TABLE, _step_s("10 GbE"), _step_s("400G InfiniBand")),
            low=0.8 * 9,
            high=1.2 * 9,
            needs="2 hosts of 8 H100 with both networks",
        ),
    ),
    "Computation": (
        Claim(
            "pipeline",
            "Figure 1: efficiency of the executor over that of its static schedule, 8 emulated workers",
            "1x",
            measured=Lookup(
                "", noted=Noted("docs/benchmarks.md", "0.97 to 0.98; 0.96 to 0.98 | 0.9 |", 0.96)
            ),
            low=0.9,
            high=1.1,
        ),
        Claim(
            "pipeline-bubble",
            "Figure 1: bubble of 1F1B's instructions for 8 stages and 32 microbatches; by the formula 7 / 39",
            "0.179",
            Lookup("plan pipeline --schedule 1f1b --stages 8 --microbatches 32", ("bubble",)),
            low=0.1790,
            high=0.1800,
            unit="",
            decided_by="predicted",
        ),
        Claim(
            "fusion",
            "RMSNorm's backward pass in one kernel over XLA's: rate on an H100; compiled: bytes on an H200",
            "1.3x to 2x",
            None,
            _quotient(
                "bench kernel_bytes --only elementwise",
                "h200, rms_norm backward, xla",
                "h200, rms_norm backward, triton",
                "elementwise-aot",
            ),
            _quotient(
                "bench elementwise --only rms_norm",
                "rms_norm backward, triton",
                "rms_norm backward, xla",
                "elementwise-h100",
            ),
            low=1.3,
        ),
        Claim(
            "flash-attention",
            "backward pass of attention over 8,192 tokens on an H100: the kernel over plain XLA",
            "2x to 3x",
            measured=_quotient(
                "bench attention --shape llama8b",
                "2 x 8192, 32/8 heads of 128: tokamax, backward",
                "2 x 8192, 32/8 heads of 128: xla, backward",
                "one_gpu-h100",
            ),
            low=2.0,
        ),
        Claim(
            "mixed-precision",
            "a layer of llama8b on an H200 in 8 bits over bfloat16; bfloat16 over float32 is not measured",
            "1.5x to 3x",
            measured=_ratio("bench fp8_speed --only layers", "8192 tokens: fp8_delayed", "fp8_speed-h200"),
            low=1.5,
        ),
    ),
    "Clocks": (
        Claim(
            "dvfs-loss",
            "Chopper: a lower clock is the largest loss of a step; measured: mean clock with zeros over that "
            "with random numbers",
            "",
            measured=_reduction("bench machine --soak 60", "random numbers against zeros, mean_mhz"),
            needs="GPUs at their power limit, and the profile of a run on them",
        ),
        Claim(
            "dvfs-allocation",
            "Chopper: clock with buffers of one size over that with sizes that change (FSDPv2 over FSDPv1)",
            "about 1.2x",
            measured=_reduction("bench machine --soak 60", "sizes that change against one size, mean_mhz"),
            low=1.1,
            needs="a GPU at its power limit",
        ),
    ),
    "Scale and cost": (
        _wall("data-movement", 2e28),
        _wall("latency", 2e31),
        _cost("money", "dollars", "", "usd"),
        _cost("energy", "energy per token", "J", "joules_per_token"),
    ),
}
"""Subject of the survey -> its claims."""

CLAIMS = tuple(claim for claims in CLAIMS_BY_SUBJECT.values() for claim in claims)
