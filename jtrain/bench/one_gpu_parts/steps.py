"""Steps of the benchmark one_gpu, in order of worth: each a benchmark with options, a limit and needs."""

import dataclasses

FIDDLE = ("fiddle", "libcst")
"""What reading a config imports: fiddle, which imports libcst."""

NO_TENSORBOARD = ("--set", "metrics.tensorboard=False")
"""Spares a run the package tensorboardX."""

TOKAMAX = ("tokamax", "einshape", "fire", "immutabledict", "pydantic", "qwix", "xprof")
"""tokamax and what it imports beside JAX's own packages."""

OUT = "{out}"
"""Stands for the folder of --out in a step's options."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One process of one_gpu.

    name: unique; it names the step's rows.
    options: arguments after `python -m jtrain.bench`.
    limit_s: seconds after which it is ended; at most 120.
    needs: packages that it imports beside those of `one_gpu.CORE`.
    rehearsed: options of the same benchmark for --rehearse; None means `options` and --rehearse.
    uses: packages without which it leaves some kernels out.
    """

    name: str
    options: tuple[str, ...]
    limit_s: int
    needs: tuple[str, ...] = ()
    rehearsed: tuple[str, ...] | None = None
    uses: tuple[str, ...] = ()

    def arguments(self, out: str, *, rehearse: bool) -> list[str]:
        """Arguments after `python -m jtrain.bench`."""
        chosen = self.options
        if rehearse:
            chosen = (*self.options, "--rehearse") if self.rehearsed is None else self.rehearsed
        # Options are constants, so the folder is filled in when the step starts.
        return [argument.replace(OUT, out) for argument in chosen]


_KERNELS = {
    "attention": TOKAMAX,
    "grouped_matmul": TOKAMAX,
    "rms_norm": ("jax_triton",),
    "rms_norm_branch": ("jax_triton",),
}
"""Op -> packages whose kernels are implementations of it on a GPU."""


def _attention(shape: str, implementation: str) -> Step:
    options = ("attention", "--shape", shape, "--only", implementation)
    needs = TOKAMAX if implementation == "tokamax" else ()
    limit_s = 120 if implementation == "xla" else 90  # plain JAX: one program part per chunk of 512 tokens
    return Step(f"attention-{shape}-{implementation}", options, limit_s, needs=needs)


def _tuning_step(op: str, *shapes: str) -> Step:
    """Times of an op's configurations at shapes: `--case NAME`, or `--config NAME` for a config's step."""
    # A rehearsal tunes a small norm: the shapes of an 8B model take a CPU too long.
    small = ("kernels", "--tune", "--op", "rms_norm", "--case", "tiny")
    options = ("kernels", "--tune", "--op", op, *shapes)
    # Reading a config needs fiddle; an op's own cases do not.
    needs = FIDDLE if "--config" in shapes else ()
    return Step(
        f"tune-{shapes[1]}-{op}",
        options,
        limit_s=120,
        needs=needs,
        rehearsed=small,
        uses=_KERNELS.get(op, ()),
    )


def _timing_step(op: str, case: str) -> Step:
    small = ("kernels", "--op", "rms_norm", "--case", "tiny")
    name = f"time-{op}-{case.split()[-1]}"
    options = ("kernels", "--op", op, "--case", case)
    return Step(name, options, limit_s=90, rehearsed=small, uses=_KERNELS.get(op, ()))


def _llama1b(name: str, *sets: str) -> Step:
    options = ("h200", "--only", "llama1b", "--steps", "3")
    return Step(name, (*options, *_set(sets)), limit_s=120, needs=FIDDLE)


def _llama1b_forced(implementation: str) -> Step:
    """llama1b with an implementation of attention, whose place plain JAX takes in a rehearsal."""
    real, small = (
        ("h200", "--only", "llama1b", "--steps", "3", "--set", f"kernels=(('attention','{forced}'),)")
        for forced in (implementation, "xla")
    )
    needs = TOKAMAX if implementation == "tokamax" else ()
    return Step(
        f"llama1b-{implementation}",
        real,
        limit_s=120,
        needs=(*FIDDLE, *needs),
        rehearsed=(*small, "--rehearse"),
    )


def _set(sets: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part for setting in sets for part in ("--set", setting))


def _elementwise(op: str) -> Step:
    return Step(f"elementwise-{op}", ("elementwise", "--only", op), limit_s=90, uses=_KERNELS.get(op, ()))


IMPLEMENTATIONS = ("cudnn", "tokamax", "xla")
"""Implementations of attention on NVIDIA GPUs."""

TUNED = ("attention", "rms_norm", "rms_norm_branch")
"""Ops of the configs' steps that have more than one configuration on an NVIDIA GPU."""

SMALL_WINDOW = (
    "data.seq_len=256", "data.global_batch=2", "layout.microbatches=1", "model.num_layers=2", "model.d_model=64",
    "model.num_heads=4", "model.num_kv_heads=2", "model.head_dim=16", "model.d_ff=128", "model.vocab_size=256",
)  # fmt: skip


def _window() -> Step:
    to = ("profile_window", "--config", "llama1b", "--out", f"{OUT}/profile", *NO_TENSORBOARD)
    # A sixth of the config's batch: steps of a second or two, whose trace is quick to read.
    real = ("data.global_batch=16", "layout.microbatches=2")
    options, small = ((*to, *_set(sets)) for sets in (real, SMALL_WINDOW))
    return Step("profile-llama1b", options, limit_s=120, needs=FIDDLE, rehearsed=small)


TINY_STEP = ("tiny", "--steps", "1", *NO_TENSORBOARD)
SHORT_SOAKS = ("machine", "--soak", "0.3", "--rehearse")

_SIZED = Step(
    "llama8b-sized",
    (
        *("h200", "--only", "llama8b", "--steps", "2"),
        # bfloat16 parameters: with float32 ones 80 GB are too few, however much lies on the host.
        *_set(("precision.param_dtype=bfloat16", "optimizer.param_rounding=stochastic")),
        *_set(("layout.offload.optimizer=as_needed", "layout.offload.params=as_needed")),
    ),
    limit_s=120,
    needs=FIDDLE,
)

STEPS = (
    # Clocks and rates first: every other figure is read against them.
    Step("machine", ("machine",), 60),
    # One step of the smallest config: it shows early whether training works at all.
    Step("tiny-step", TINY_STEP, 90, FIDDLE, TINY_STEP),
    *(_attention(shape, name) for shape in ("llama8b", "llama1b") for name in IMPLEMENTATIONS),
    *(_tuning_step(op, "--config", "llama1b") for op in TUNED),
    *(_tuning_step(op, "--config", "llama8b", "--with", "single_device") for op in TUNED),
    _tuning_step("linear_cross_entropy", "--case", "llama8b"),
    _llama1b("llama1b"),
    *(_llama1b_forced(implementation) for implementation in IMPLEMENTATIONS),
    Step("loss", ("loss",), 90),
    Step("fp8-matmul", ("fp8_speed", "--only", "matmul"), 90),
    Step("fp8-layers", ("fp8_speed", "--only", "layers", "--calls", "10"), 120),
    _elementwise("rms_norm"),
    _elementwise("rope"),
    *(
        Step(f"tile-kernel-{op}", ("gpu_matmul", "--only", op), 120)
        for op in ("matmul", "all_gather_matmul", "matmul_reduce_scatter")
    ),
    _llama1b("llama1b-zero3", "layout.zero_stage=3"),
    _SIZED,
    Step("offload-8B", ("h200", "--only", "8B", "--steps", "1"), 120),
    _window(),
    # Four soaks of ten seconds, each after a warm-up of one.
    Step("random-against-zeros", ("machine", "--soak", "10"), 90, rehearsed=SHORT_SOAKS),
    # The rest.
    *(_attention(shape, name) for shape in ("plain", "documents") for name in IMPLEMENTATIONS),
    _llama1b("llama1b-fp8", "precision.matmul_dtype=fp8_delayed"),
    Step("llama8b", ("h200", "--only", "llama8b", "--steps", "2"), 120, FIDDLE),
    _elementwise("swiglu"),
    _elementwise("AdamW"),
    Step("loss-all-chunks", ("loss", "--all-chunks"), 120),
    _timing_step("grouped_matmul", "qwen3_30b_a3b up"),
    _timing_step("grouped_matmul", "qwen3_30b_a3b down"),
    _timing_step("embedding_lookup", "llama8b"),
    Step("tiny", ("tiny", *NO_TENSORBOARD), 120, FIDDLE, ("tiny", "--steps", "3", *NO_TENSORBOARD)),
    Step("offload-14B", ("h200", "--only", "14B", "--steps", "1"), 120),
)  # fmt: skip
