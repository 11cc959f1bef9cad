"""What a run needs before it starts: `python -m jtrain.plan CONFIG --device h200 --count 8`, or `plan table`."""

import argparse
import dataclasses
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jtrain import verb
from jtrain.plan import AOT_ENVIRONMENT

if TYPE_CHECKING:
    from rich.console import Console

    from jtrain.config import Run
    from jtrain.plan.cost import Assumptions
    from jtrain.plan.network import Machine
    from jtrain.plan.search import Job, Point
    from jtrain.plan.sheet import Sheet

_UNITS = {"": 1, "B": 1} | {f"{p}B": 1000**k for k, p in enumerate("KMGT", 1)}
_UNITS |= {f"{p}iB": 1024**k for k, p in enumerate("KMGT", 1)}


TOP = 3
"""Points of a search that are compiled."""


def refuse_options(args: argparse.Namespace, *, keep: tuple[str, ...], why: str) -> None:
    """Refuses options that would do nothing.

    Raises:
      ValueError: the first of them.
    """
    plain = vars(parser().parse_args([args.config]))
    for name, value in vars(args).items():
        if name not in keep and value != plain[name]:
            option = {"fiddlers": "with", "sets": "set"}.get(name, name).replace("_", "-")
            raise ValueError(f"{args.config} --{option}: {why}. Leave --{option} out.")


def parser() -> argparse.ArgumentParser:
    """The command line; no jax is imported to read it."""
    parser = argparse.ArgumentParser(
        prog="python -m jtrain.plan",
        description="Says what a config takes on a machine that need not be here: bytes, seconds, money. `table` in "
        "the place of a config prints what each strategy saves and costs.",
        epilog="Exit codes: 0 a plan that fits; 2 it does not, or a mistake, the message says which and the way out.",
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", help="as for jtrain.launch --config, or `table`")
    parser.add_argument("--with", dest="fiddlers", action="append", default=[], metavar="FIDDLER")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="PATH=VALUE")
    parser.add_argument("--device", metavar="NAME", help="h200, h100, b200, v5p, v5e, ...")
    parser.add_argument("--count", type=int, metavar="N", help="devices (default: those of the config's mesh)")
    parser.add_argument("--host-memory", metavar="SIZE", help="of each host, as in 128GiB; what offload may pin")
    parser.add_argument("--compile", action="store_true", help="compile the real step for that machine (minutes)")
    parser.add_argument("--measured", type=Path, metavar="WORKDIR", help="what a run there measured, beside the plan")
    parser.add_argument("--search", action="store_true", help="find the fastest mesh, ZeRO stage, offload and remat")
    parser.add_argument("--top", type=int, metavar="K", help="points of a search to compile (default: 3)")
    parser.add_argument("--tokens", type=float, metavar="N", help="tokens to train on (default: the config's steps)")
    parser.add_argument("--price", type=float, metavar="USD", help="of one device for an hour")
    parser.add_argument("--network", type=float, metavar="GBIT", help="Gbit/s of one device beyond its links")
    parser.add_argument("--efficiency", type=float, metavar="SHARE", help="of peak in matrix products (default: 0.65)")
    parser.add_argument("--goodput", type=float, metavar="SHARE", help="of wall time that trains (default: 0.9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan there; bytes per device")
    return parser


def parse_bytes(option: str, text: str) -> int:
    """`128GiB`, `2TB`, `1000000`: bytes.

    Raises:
      ValueError: it is no such size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]i?B|B)?", text.strip())
    if found is None or not float(found[1]):
        raise ValueError(f"{option} {text}: expected a size such as 128GiB or 2TB.")
    return int(float(found[1]) * _UNITS[found[2] or ""])


def assumptions(args: argparse.Namespace) -> "Assumptions":
    """What the command line assumes.

    Raises:
      ValueError: a share that is none.
    """
    from jtrain.plan.cost import Assumptions  # lazy: it imports jax, as below

    given = {"matmul": args.efficiency, "goodput": args.goodput}
    for option, value in (("--efficiency", args.efficiency), ("--goodput", args.goodput)):
        if value is not None and not 0 < value <= 1:
            raise ValueError(f"{option} {value} must be a share above 0 and at most 1.")
    for option, value in (("--tokens", args.tokens), ("--price", args.price), ("--network", args.network)):
        if value is not None and not (0 < value < math.inf):
            raise ValueError(f"{option} {value} must be a number above 0.")
    return dataclasses.replace(Assumptions(), **{name: value for name, value in given.items() if value is not None})


def machine_of(args: argparse.Namespace, default_count: int) -> "Machine":
    """The machine that the command line names.

    Raises:
      ValueError: there is none, or a size is none.
    """
    from jtrain.plan.network import make_machine
    from jtrain_kernels.device import DEVICES

    if args.device is None:
        names = [spec.name for spec in DEVICES.values() if spec.peak_bf16_flops]
        raise ValueError(f"a plan is of a machine. Give --device, one of {', '.join(names)}, and --count.")
    return make_machine(
        args.device,
        default_count if args.count is None else args.count,
        host_memory_bytes=None if args.host_memory is None else parse_bytes("--host-memory", args.host_memory),
        network_bytes_per_s=None if args.network is None else args.network * 1e9 / 8,
    )


def largest_rows(job: "Job", point: "Point") -> int:
    """Sequences per device that fit at a time, with as many microbatches; 0 if not even one."""
    from jtrain.plan.search import evaluate, fits

    job = dataclasses.replace(job, memory_share=1.0)

    shards = point.mesh.replica * point.mesh.data * point.mesh.expert * point.spec.microbatches

    def fit(rows: int) -> bool:
        larger = dataclasses.replace(job, global_batch=rows * shards)
        return fits(larger, evaluate(larger, point.spec, point.mesh, timed=False).plan, host_known=False)

    if not fit(1):
        return 0
    high = 2
    while fit(high) and high < 2**20:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit(middle) else (low, middle)
    return low


def compile_point(args: argparse.Namespace, run: "Run", job: "Job", point: "Point") -> Any:
    """What the machine's compiler says of a point.

    Raises:
      ValueError: no such machine to compile for.
    """
    from jtrain.layout import make_layout
    from jtrain.loop import make_optimizer
    from jtrain.plan.aot import compile_step, topology_devices
    from jtrain.plan.topology import topology_of

    devices = topology_devices(topology_of(job.machine.device, job.machine.count))
    return compile_step(
        job.model,
        make_layout(point.spec, point.mesh, job.infos),
        make_optimizer(run),
        global_batch=job.global_batch,
        seq_len=job.seq_len,
        devices=devices,
    )


def sheet_of(
    args: argparse.Namespace, run: "Run", job: "Job", point: "Point", compiled: Any, given: dict[str, str]
) -> "Sheet":
    """Everything about one point."""
    from jtrain.layout import make_layout
    from jtrain.plan.cost import cost
    from jtrain.plan.measured import measured
    from jtrain.plan.report import Parts
    from jtrain.plan.sheet import Sheet

    assert point.timed is not None
    tokens = run.num_steps * job.global_batch * job.seq_len if args.tokens is None else int(args.tokens)
    if tokens < 1:
        raise ValueError(f"--tokens {args.tokens} must be at least 1.")
    goodput = job.assume.goodput
    layout = make_layout(point.spec, point.mesh, job.infos)
    return Sheet(
        args.config,
        Parts(job.model, layout, job.optimizer, job.global_batch, job.seq_len),
        job.machine,
        point.plan,
        point.timed,
        cost(point.timed, job.machine, tokens=tokens, goodput=goodput, usd_per_hour=args.price),
        goodput,
        largest_rows(job, point),
        compiled=compiled,
        measured=None if args.measured is None else measured(args.measured, given),
    )


def command(args: argparse.Namespace, given: dict[str, str], settings: dict[str, object]) -> str:
    """The launch command of a point: the config as given, with what was decided otherwise set.

    Args:
      given: path -> value as text, of the config.
    """
    words = ["python", "-m", "jtrain.launch", f"--config={args.config}"]
    for fiddler in args.fiddlers:
        words += ["--with", fiddler]
    settings = settings | {"layout.auto": False}  # or the launch would decide once more
    decided = [f"{path}={value}" for path, value in settings.items() if repr(value) != given[path]]
    for text in [*args.sets, *decided]:
        words += ["--set", text]
    return shlex.join(words)


def check_good(sheet: "Sheet") -> None:
    """Refuses to call a plan good.

    Raises:
      ValueError: it does not fit, or formula and compiler are too far apart.
    """
    from jtrain.plan.fit import ways_out
    from jtrain.plan.sheet import TOLERANCE

    difference = sheet.difference
    if difference is not None and sheet.compiled is not None and abs(difference) > TOLERANCE:
        raise ValueError(
            f"not a good plan: the formula says {sheet.plan.total_bytes / 2**30:.2f} GiB per device and the compiler "
            f"{sheet.compiled.peak_bytes / 2**30:.2f}, {difference:+.0%}; more than {TOLERANCE:.0%} apart, neither is "
            "to be relied on. Set layout.remat=full or more layout.microbatches for a margin, and report it."
        )
    takes = sheet.plan.total_bytes if sheet.compiled is None else sheet.compiled.peak_bytes
    there = sheet.machine.host_bytes_per_device
    if there is not None and sheet.plan.host_bytes > there:
        needed = math.ceil(sheet.plan.host_bytes * sheet.machine.devices_per_host / 2**30)
        raise ValueError(
            f"{sheet.config} does not fit {sheet.machine}: {sheet.plan.host_bytes / 2**30:.1f} GiB of host memory per "
            f"device, but its share of the host is {there / 2**30:.1f}. Give --host-memory {needed}GiB if there is as "
            "much, or set smaller shares of layout.offload."
        )
    if takes > sheet.machine.hbm_bytes:
        parts = sheet.parts
        ways = ways_out(
            parts.model,
            parts.layout,
            parts.optimizer,
            global_batch=parts.global_batch,
            seq_len=parts.seq_len,
            limit=sheet.machine.hbm_bytes,
            platform=sheet.machine.device.platform,
            host=there is not None,
        )
        # Devices are asked for by --count here: the mesh follows.
        mesh = parts.layout.mesh
        others = mesh.size // mesh.replica // mesh.data
        ways = [re.sub(r"--set mesh\.data=(\d+)", lambda m: f"--count {int(m[1]) * others}", way) for way in ways]
        listed = ", or any of:\n" + "\n".join(ways) if ways else ", --host-memory SIZE or a larger --count."
        raise ValueError(
            f"{sheet.config} does not fit {sheet.machine}: {takes / 2**30:.1f} of "
            f"{sheet.machine.hbm_bytes / 2**30:.1f} GiB per device. Add --search{listed}"
        )


def confirm(
    args: argparse.Namespace, run: "Run", job: "Job", points: list["Point"], console: "Console"
) -> tuple[dict[int, Any], int]:
    """Compiles the first points; returns what was said of each, and which is the first that is good.

    Raises:
      ValueError: the compiler agrees with none of them.
    """
    from jtrain.plan.sheet import TOLERANCE

    said: dict[int, Any] = {}
    good: list[int] = []
    for index, point in enumerate(points[: args.top or TOP]):
        console.print(f"compiling {index + 1} of {min(args.top or TOP, len(points))} ...", highlight=False)
        compiled = said[index] = compile_point(args, run, job, point)
        apart = abs(point.plan.total_bytes / compiled.peak_bytes - 1)
        if compiled.peak_bytes <= job.machine.hbm_bytes and apart <= TOLERANCE:
            good.append(index)
    if not good:
        listed = ", ".join(f"{c.peak_bytes / 2**30:.1f}" for c in said.values())
        raise ValueError(
            f"the compiler confirms none of the first {len(said)}: it says {listed} GiB per device of "
            f"{job.machine.hbm_bytes / 2**30:.1f}, or is more than {TOLERANCE:.0%} from the formula. Raise --top."
        )
    return said, good[0]


def search_command(
    args: argparse.Namespace, run: "Run", job: "Job", console: "Console", given: dict[str, str]
) -> "tuple[Point, Any]":
    """Prints the ranked table and the command to run; returns the point that it is of, and its compilation.

    Raises:
      ValueError: nothing fits, with the nearest miss.
    """
    from jtrain.plan.search import meshes, no_point, search
    from jtrain.plan.sheet import search_table

    over = meshes if args.search else lambda _: [run.mesh]  # layout.auto alone leaves the mesh as it is
    points = search(job, over(job))
    if not points:
        raise no_point(job, over)
    said, best = confirm(args, run, job, points, console) if args.compile else ({}, 0)
    title, table = search_table(job, points[: max(10, args.top or TOP)], said)
    console.print(title, style="bold", highlight=False)
    console.print(table)
    console.print(f"the fastest{' that the compiler confirms' if said else ''}:", style="bold")
    print(command(args, given, points[best].settings), flush=True)
    return points[best], said.get(best)


def execute(args: argparse.Namespace) -> int:
    """What the parsed arguments ask for; returns the exit code."""
    os.environ.update(AOT_ENVIRONMENT)  # a plan is of another machine, so none of this one's devices are looked for
    verb.start_jax(os.environ)
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise ValueError(f"--json {args.json}: there is no folder {args.json.absolute().parent}. Make it first.")
    if args.config == "table":
        refuse_options(args, keep=("config", "json"), why="the tables are of fixed models and machines")
        from jtrain.plan.table import table_command  # lazy, as below: with jax and flax over a second

        return table_command(args.json)

    from jtrain import config, leaves
    from jtrain.loss_chunk import settle_loss_chunk
    from jtrain.plan.report import new_console
    from jtrain.plan.search import SLACK, Job, evaluate, resolve_as_needed
    from jtrain.plan.sheet import print_sheet, to_json

    if args.top is not None and not (args.search and args.compile):
        raise ValueError(f"--top {args.top} says how many points of a search to compile. Add --search --compile.")
    if args.top is not None and args.top < 1:
        raise ValueError(f"--top {args.top} must be at least 1.")
    run_config = config.load(args.config, args.fiddlers, args.sets)
    given = leaves.parse(leaves.flat(run_config))
    machine = machine_of(args, config.mesh_size(run_config))
    if args.search:  # which finds the mesh
        axes = ("replica", "stage", "data", "expert", "context", "tensor")
        config.set_values(run_config, {f"mesh.{axis}": 1 for axis in axes} | {"layout.microbatches": 1})
        notes = []
    else:
        notes = config.for_devices(run_config, machine.count)
    of_loss = settle_loss_chunk(run_config, machine.device)
    run = config.build(run_config)
    if run.layout.offload.unified_memory:
        verb.use_unified_memory(os.environ, topology=f"{args.device}:{machine.count}")
    assume = assumptions(args)
    job = Job(
        run.model,
        run.model.param_infos(),
        run.optimizer,
        run.layout,
        machine,
        run.data.global_batch,
        run.data.seq_len,
        assume,
        # With the compiler's word to come, what the formula puts just above the limit is worth asking about.
        memory_share=1 + SLACK if args.search and args.compile else 1 - SLACK,
    )
    console = new_console()
    compiled = None
    if args.search or run.layout.auto:
        point, compiled = search_command(args, run, job, console, given)
        notes = []
    else:
        job = dataclasses.replace(job, spec=resolve_as_needed(job, run.mesh))
        point = evaluate(job, job.spec, run.mesh)
        compiled = compile_point(args, run, job, point) if args.compile else None
    if notes:
        notes = [f"for --count {machine.count}: {', '.join(notes)}"]
    sheet = sheet_of(args, run, job, point, compiled, given)
    print_sheet(sheet, console, [*notes, *of_loss, str(assume)])
    if args.json is not None:
        args.json.write_text(json.dumps(to_json(sheet), indent=1) + "\n")
    check_good(sheet)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    args = parser().parse_args(argv)
    return verb.run(lambda: execute(args))


if __name__ == "__main__":
    sys.exit(main())
