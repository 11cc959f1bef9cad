"""The data plane: memory, mixed reading, resuming, first batches, order, packing, several hosts, scaling.

    python -m jtrain.bench data --torch-python T/bin/python
    python -m jtrain.bench data --only mixing --sources 24 --rounds 3

Each part is a module of `data_parts` whose docstring says what it measures, and beside what. Memory, mixing
and resume compare with readers of other projects, all processes with one protocol (`peers/readers.py`). An
option that is not given is as published, and those that a part does not know leave it as it is.
"""

import inspect
import os
from collections.abc import Iterator
from pathlib import Path

from bench.data_parts import first_batch, hosts, memory, mixing, order, planner, resume, scaling
from jtrain.bench import Options, Row, option

PARTS = {
    "memory": memory.rows,
    "mixing": mixing.rows,
    "resume": resume.rows,
    "first_batch": first_batch.rows,
    "order": order.rows,
    "planner": planner.rows,
    "hosts": hosts.rows,
    "scaling": scaling.rows,
}
"""Part -> its rows, by keyword arguments that are options of the same name."""

OPTIONS = (
    option(
        "--only", nargs="+", choices=tuple(PARTS), default=tuple(PARTS), metavar="PART", help=", ".join(PARTS)
    ),
    option(
        "--torch-python",
        default=os.environ.get("PEER_TORCH_PYTHON"),
        help="interpreter that has torchdata, webdataset and mosaicml-streaming; or $PEER_TORCH_PYTHON",
    ),
    option("--sources", type=int, help="sources in the mixture (306; 24 of hosts)"),
    option("--consumers", type=int, help="ranks with a loader of their own (32)"),
    option("--hosts", type=int, help="hosts (4)"),
    option(
        "--rounds", type=int, help="turns of each reader (7 of mixing), or openings whose fastest counts (3)"
    ),
    option("--seconds", type=float, help="of each turn of mixing (2)"),
    option("--steps", type=int, help="steps of order, planner, hosts and scaling"),
    option("--scale", type=float, help="factor of the large corpora of first_batch (1)"),
    option("--folder", type=Path, help="for the 6 GB of first_batch (a temporary folder)"),
)


def run(args: Options) -> Iterator[Row]:
    """Rows of the parts, one after the other.

    Raises:
      UserError: a part compares with peers that are not here, or cannot take an option's value.
    """
    for name in args.only:
        # Each part takes the options that it knows; one that was not given keeps the part's own default.
        parameters = inspect.signature(PARTS[name]).parameters
        yield from PARTS[name](
            **{key: value for key, value in vars(args).items() if key in parameters and value is not None}
        )
