"""Command line of `python -m jtrain.hf inspect`: what a config.json describes, and what its training needs."""

import shlex
from typing import TYPE_CHECKING, Any

from jtrain.cli.machine_options import add_count, add_machine, machine_and_price, start_without_devices
from jtrain.cli.options import add_json
from jtrain.cli.run import Args, Command, Parser, write_json
from jtrain.errors import UserError

if TYPE_CHECKING:
    from jtrain.plan.search_task import Point  # it imports jax, which takes seconds

SEQ_LEN = 4096
"""Tokens of a sequence that is planned, unless config.json says fewer."""


def add_family(parser: Parser) -> None:
    """Adds --as and --part, which choose how a config.json is read."""
    parser.add_argument(
        "--as", dest="family", metavar="NAME", help="read a model_type without a family as this one's"
    )
    parser.add_argument(
        "--part", metavar="FIELD", help="read only this part of config.json: text_config of a model that sees"
    )


def add_options(parser: Parser) -> None:
    """Declares the options."""
    parser.add_argument(
        "--source", required=True, metavar="DIR", help="a config.json, a folder with one, or hf://OWNER/NAME"
    )
    add_family(parser)
    add_machine(parser)
    add_count(parser, "devices (default: those of one host)")
    add_json(parser)


def execute(args: Args) -> int:
    """Prints the inspection, and the fastest layout on a machine; returns the exit code."""
    start_without_devices()
    from jtrain.hf.inspection import inspect
    from jtrain.hf.model_files import read_config
    from jtrain.hf.selection import select
    from jtrain.report.number_formats import gib

    config = select(read_config(args.source), family_name=args.family, part=args.part)
    inspection = inspect(config)
    print(*inspection.lines(), sep="\n")
    sizes = {"weights in bfloat16": 2, "in float32": 4, "with AdamW in float32": 12}
    texts = (f"{name} {gib(bytes_each * inspection.parameters)} GiB" for name, bytes_each in sizes.items())
    print(", ".join(texts), flush=True)
    document: dict[str, Any] = inspection.to_json()
    if args.device is not None or args.machine is not None:
        seq_len = min(SEQ_LEN, int(config.get("max_position_embeddings") or SEQ_LEN))
        point = fastest(args, inspection.model, seq_len=seq_len)
        document["plan"] = {
            "device": point.job.machine.device.name if point.job.machine else None,
            "count": point.mesh.size,
            "seq_len": seq_len,
            "global_batch": point.job.global_batch,
            "bytes_per_device": point.plan.total_bytes,
            "host_bytes_per_device": point.plan.host_bytes,
            "step_s": point.step_s,
            "settings": point.settings,
        }
    elif args.count is not None:
        raise UserError(f"--count {args.count} is of devices: add --device NAME.")
    write_json(args, document)
    return 0


def fastest(args: Args, model: Any, *, seq_len: int) -> "Point":
    """Prints the fastest layout that fits, one sequence per device, and returns it.

    Raises:
      UserError: none fits; the message has the one that comes closest, and what would.
    """
    from jtrain.layout.layout import LayoutSpec, make_layout
    from jtrain.layout.mesh import MeshSpec
    from jtrain.optim import AdamW
    from jtrain.plan.job import Job
    from jtrain.plan.nothing_fits import no_point
    from jtrain.plan.report.plan_sheet import search_table
    from jtrain.plan.search import meshes, search
    from jtrain.plan.search_task import SearchTask
    from jtrain.report.terminal import print_blocks

    machine, _ = machine_and_price(args, args.count)
    layout = make_layout(LayoutSpec(), MeshSpec(), model.param_infos())
    job = Job(model, layout, AdamW(peak_lr=3e-4, warmup_steps=0), machine.count, seq_len, machine)
    task = SearchTask(job, LayoutSpec())
    points = search(task, meshes(task), keep=1)
    if not points:
        raise no_point(task)
    print_blocks([f"training with AdamW on {machine}, {machine.count} sequences of {seq_len} tokens:"])
    print_blocks([search_table(task, points[:1], {})])
    return points[0]


COMMAND = Command(
    "say what a config.json describes, and what its training needs",
    execute,
    add_options,
    "Says of any config.json which family reads it, its layers, sizes and parameters exactly; with --device "
    "what training takes on that machine. What no family reads is named, with what it would need; a "
    "model_type without a family is offered as the nearest one.",
    exits="Exit codes: 0 the model can be imported; 2 it cannot, or an option is wrong: the message says why.",
    subject="source",
    next_command=lambda args: shlex.join(["jtrain", "hf", "prove", args.source]),
)
