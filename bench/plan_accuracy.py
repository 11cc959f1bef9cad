"""The memory plan's formula against the compilers: shipped configs, four layouts each, for v5p and H200.

Nothing runs: the compilers of the extra [aot] say what they would allocate. All of it takes hours on two cores, so
what is compiled can be kept in a file, and part of it asked for.
"""

import json
from pathlib import Path

from jtrain.bench import Options, Row, option, row

LAYOUTS: dict[str, tuple[str, ...]] = {
    "tiny": (
        "",
        "mesh.data=8 layout.zero_stage=3",
        "mesh.data=2 mesh.tensor=4",
        "mesh.data=8 layout.zero_stage=1 layout.remat=full layout.microbatches=2",
    ),
    "mixture": (
        "",
        "mesh.data=8 layout.zero_stage=2",
        "mesh.data=4 mesh.tensor=2 layout.zero_stage=3 layout.remat=full",
        "layout.remat=named layout.remat_save=('mlp_gate','mlp_up') layout.microbatches=4",
    ),
    "llama1b": (
        "",
        "mesh.data=8 layout.zero_stage=3 layout.microbatches=1 layout.remat=full layout.remat_save=()",
        "mesh.data=8 layout.zero_stage=1 layout.microbatches=4 layout.remat=none layout.remat_save=()",
        "mesh.data=8 layout.zero_stage=2 layout.microbatches=2 layout.remat=named "
        "layout.remat_save=('attention','mlp_gate','mlp_up')",
    ),
    "llama8b": (
        "",
        "mesh.data=4 mesh.tensor=2 layout.microbatches=16",
        "layout.microbatches=64 layout.remat=named layout.remat_save=('attention','attention_out')",
        "layout.microbatches=64 layout.offload.optimizer=1.0",
    ),
    "qwen3_8b": (
        "",
        "mesh.data=2 mesh.tensor=4 layout.microbatches=64",
        "layout.microbatches=64 layout.remat=none",
        "precision.param_dtype=bfloat16 layout.zero_stage=2 layout.microbatches=64",
    ),
    "llama70b": (
        "",
        "mesh.data=8 mesh.tensor=8 layout.microbatches=32",
        "mesh.data=32 mesh.tensor=2 layout.microbatches=16 layout.remat=named layout.remat_save=('attention',)",
        "layout.offload.optimizer=0.5",
    ),
}
"""Config -> what is set beside it, ways to lay it out that fit into both machines; the first is the config as it is."""

MACHINES = {
    "v5p": {1: "v5p:2x2x1", 8: "v5p:2x2x2", 64: "v5p:4x4x4"},
    "h200": {1: "h200:1", 8: "h200:8", 64: "h200:64"},
}
"""Name -> devices -> topology with at least as many."""

GIB = 2**30


OPTIONS = (
    option("--configs", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS), help="these only"),
    option("--machines", nargs="+", default=list(MACHINES), choices=list(MACHINES), help="these only"),
    option("--keep", type=Path, metavar="FILE", help="compiled bytes, kept there and not compiled again"),
)
ABSENT_CHIPS = True


def run(args: Options) -> list[Row]:
    """A row per program, then the mean."""
    from jtrain.config.load import for_devices, load_config, mesh_size
    from jtrain.config.run import build_run
    from jtrain.plan.estimate.machine import Machine
    from jtrain.plan.estimate.memory import memory
    from jtrain.plan.from_run import plan_job
    from jtrain_kernels.device import from_name

    kept: dict[str, dict[str, int]] = {}
    if args.keep is not None and args.keep.exists():
        kept = json.loads(args.keep.read_text())
    rows: list[Row] = []
    errors: list[float] = []
    for name, machine, sets in [(n, m, sets) for n in args.configs for m in args.machines for sets in LAYOUTS[n]]:
        what = f"{name} {sets or 'as shipped'}, {machine}"
        config = load_config(name, (), sets.split())
        for_devices(config, mesh_size(config))
        built = build_run(config)
        if what not in kept:
            kept[what] = compiled_bytes(name, machine, sets)
            if args.keep is not None:
                args.keep.write_text(json.dumps(kept, indent=1))
        plan = memory(plan_job(built, Machine(from_name(machine), built.mesh.size)))
        found = kept[what]
        peak = found["peak_bytes"]
        errors.append(100 * abs(plan.total_bytes / peak - 1))
        rows.append(row(f"{what}: formula", plan.total_bytes / GIB, "GiB", baseline=peak / GIB))
        rows.append(row("  off by", errors[-1], "%", bar="<= 10"))
        on_host = plan.host_parameters + plan.host_optimizer
        off = abs(plan.argument_bytes - found["argument_bytes"]) + abs(on_host - found["host_argument_bytes"])
        rows.append(row("  arguments off by", off, "B", bar="<= 8192"))  # XLA:TPU pads scalars and vectors
    rows.append(row("mean", sum(errors) / len(errors), "%", bar="<= 5"))
    rows.append(row("largest", max(errors), "%", bar="<= 10"))
    return rows


def compiled_bytes(name: str, machine: str, sets: str) -> dict[str, int]:
    """What the machine's compiler says of the step of a config with these settings."""
    from jtrain.config.load import for_devices, load_config, mesh_size
    from jtrain.config.run import build_run
    from jtrain.plan.compile.compiled_step import compile_step, topology_devices
    from jtrain.plan.from_run import make_optimizer, plan_job

    config = load_config(name, (), sets.split())
    count = mesh_size(config)
    for_devices(config, count)
    run = build_run(config)
    devices = topology_devices(MACHINES[machine][count])[:count]
    program = compile_step(plan_job(run), make_optimizer(run), devices=devices)
    names = ("argument_bytes", "temp_bytes", "host_argument_bytes", "host_temp_bytes", "peak_bytes")
    return {field: getattr(program, field) for field in names} | {"compile_s": round(program.compile_s)}
