"""Loads an export in transformers and an adapter beside it in peft, and writes the logits of the tokens in ARRAYS.

python peft_logits.py FOLDER ADAPTER ARRAYS OUT
"""

import sys

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

folder, adapter, arrays, out = sys.argv[1:]
base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
model = PeftModel.from_pretrained(base, adapter)
tokens = torch.from_numpy(np.load(arrays)).long()
with torch.no_grad():
    np.save(out, model(input_ids=tokens).logits.numpy())
