"""Prints the hash of the first 20 batches of a corpus.

python hash_batches.py FOLDER
"""

import hashlib
import itertools
import sys

import numpy as np

from jtrain.data import PackedText, open_dataset

spec = PackedText(path=sys.argv[1], seq_len=16, global_batch=4, eval_fraction=0.1, balance=False)
batches = open_dataset(spec, seed=3).train_batches(inline=True)
tokens = (np.asarray(batch.token_BL).tobytes() for batch in itertools.islice(batches, 20))
print(hashlib.sha256(b"".join(tokens)).hexdigest())
