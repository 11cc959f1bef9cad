"""Loads an export in transformers, and writes its logits of the tokens in ARRAYS into OUT.

python logits.py FOLDER DTYPE ARRAYS OUT
"""

import json
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

folder, dtype, arrays, out = sys.argv[1:]
loaded, report = AutoModelForCausalLM.from_pretrained(
    folder, torch_dtype="auto", output_loading_info=True, attn_implementation="eager"
)
assert loaded.dtype == getattr(torch, dtype), loaded.dtype
assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
tokens = torch.from_numpy(np.load(arrays)).long()
with torch.no_grad():
    np.save(out, loaded.float()(input_ids=tokens).logits.numpy())
config = loaded.config
print(json.dumps({"class": type(loaded).__name__, "bos": config.bos_token_id, "eos": config.eos_token_id}))
