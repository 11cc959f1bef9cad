"""Checks a sum over all devices that does not end."""

import time

from jtrain.runtime import node_check


def hang() -> str:
    """Never returns in the time of the test."""
    time.sleep(600)
    return ""


node_check.all_reduce_fault = hang
node_check.check_all_reduce(wait_s=0.1)
