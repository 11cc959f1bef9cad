"""Calls a function of test_gpu_fabric.py.

    python call_fabric.py FUNCTION ARGUMENTS

ARGUMENTS: JSON list.
"""

import json
import sys

from tests.kernels.overlap import test_gpu_fabric

getattr(test_gpu_fabric, sys.argv[1])(*json.loads(sys.argv[2]))
