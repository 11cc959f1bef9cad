"""What transformers makes of an exported chat model, as JSON: a templated chat, a greedy answer, its configs.

python chat.py FOLDER MESSAGES
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, messages = sys.argv[1], json.loads(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype="auto", attn_implementation="eager").float()
text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
with torch.no_grad():
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)[
        0, ids.shape[1] :
    ]
generation = model.generation_config.to_diff_dict()
facts = {
    "text": text,
    "ids": ids[0].tolist(),
    "answer": tokenizer.decode(answer, skip_special_tokens=True),
    "generation": {
        name: generation.get(name) for name in ("eos_token_id", "temperature", "top_p", "do_sample")
    },
    "longest": model.config.max_position_embeddings,
    "dtype": str(AutoModelForCausalLM.from_pretrained(folder, torch_dtype="auto").dtype),
}
print(json.dumps(facts))
