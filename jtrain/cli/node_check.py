"""Command line of the check of every node (`jtrain/runtime/node_check.py`); it takes the training command's
arguments.
"""

from jtrain.cli.options import add_local_devices
from jtrain.cli.run import Args, Command, Verb


def check(args: Args) -> int:
    """Runs the whole check in this process; returns the exit code."""
    from jtrain.runtime import node_check  # lazy: numpy

    return node_check.check(args.emulate_devices, args.device)


VERB = Verb(
    "node_check",
    Command(
        "check each device, each node's disk and one sum over all devices",
        check,
        add_local_devices,
        description=(
            "Checks each device, each node's disk and one sum over all devices. Takes the arguments "
            "of the training command and reads --emulate-devices and --device."
        ),
        exits=(
            "Exit codes: 0 fine; 76 this node fails, as named; 75 another node does; 2 the sum over all "
            "devices is wrong or does not end."
        ),
        ignores_unknown=True,
    ),
)
main = VERB.main
