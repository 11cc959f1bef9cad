"""Opens the standard library as a corpus; prints which packages that this does not need are loaded."""

import sys

from jtrain.data import PackedText, open_dataset

open_dataset(PackedText(path="stdlib", seq_len=256, global_batch=16), seed=0)
print([name for name in ("grain", "pyarrow", "tokenizers") if name in sys.modules])
