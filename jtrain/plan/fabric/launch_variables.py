"""NCCL's environment variables that follow from a fabric, as lines of a shell script."""

from collections.abc import Iterator

from jtrain.plan.fabric.fabric import Network
from jtrain.plan.fabric.nccl_model import Estimate


def choice_lines(kind: str, chosen: Estimate, size: str) -> Iterator[str]:
    """Lines that hold NCCL to an algorithm and a protocol, for one collective and all its sizes.

    Args:
      kind: all-reduce, all-gather or reduce-scatter. size: of the array that the choice was made for, for the
        comment.
    """
    # NCCL writes allreduce, allgather and reducescatter.
    function = kind.replace("-", "")
    yield f"# What NCCL's model chooses by itself for {size}; these lines hold for every size. NCCL 2.28 or newer."
    yield f"export NCCL_ALGO={function}:{chosen.algorithm.lower()}"
    yield f"export NCCL_PROTO={function}:{chosen.protocol.lower()}"


def network_lines(network: Network, queue_pairs: int | None) -> Iterator[str]:
    """Lines for the network.

    Args:
      queue_pairs: per connection; None where switches do not hash, or nothing crosses them.
    """
    if queue_pairs is not None:
        yield "# Flows per connection; the switches must hash the destination queue pair, not only the five-tuple."
        yield f"export NCCL_IB_QPS_PER_CONNECTION={queue_pairs}"
        yield "# Whole messages in turn over the queue pairs: splitting each one made short messages slower at Meta."
        yield "export NCCL_IB_SPLIT_DATA_ON_QPS=0"
    if network.traffic_class is not None:
        yield "# Traffic class of the lossless queue; receivers' clear-to-send messages want the first priority."
        yield f"export NCCL_IB_TC={network.traffic_class}"
    # Only as a comment, because the lossless class is the site's own.
    elif network.routing == "hashed":
        yield "# export NCCL_IB_TC=...   # your lossless traffic class: network.traffic_class in the machine's file"
    if network.sharp:
        yield "export NCCL_COLLNET_ENABLE=1"
