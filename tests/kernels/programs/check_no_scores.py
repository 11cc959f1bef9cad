"""Fails if the attention of a config has its scores in a chip's memory.

python check_no_scores.py CHIP CONFIG
"""

import sys

from tests.kernels.test_attention_compiled import check_no_scores

check_no_scores(*sys.argv[1:])
