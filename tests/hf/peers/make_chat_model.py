"""Makes a small chat model as transformers publishes one: random weights, tokenizer, template, generation config.

python make_chat_model.py MODEL_TYPE FOLDER
"""

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SIZES = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=260,  # each has a token: jtrain draws none that has no text
    # Longer than any training here: an export keeps it.
    max_position_embeddings=4096,
)
MIXTURE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True)

model_type, folder = sys.argv[1:]
torch.manual_seed(0)
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
words = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
bytes_alone = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
bytes_alone.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=bytes_alone,
    eos_token="<|end|>",
    additional_special_tokens=words[1:],
    chat_template=TEMPLATE,
)
end = tokenizer.convert_tokens_to_ids("<|end|>")
config = AutoConfig.for_model(
    model_type,
    **SIZES,
    **(MIXTURE if model_type == "qwen3_moe" else {}),
    tie_word_embeddings=model_type == "qwen3",
    bos_token_id=None,
    eos_token_id=end,
)
model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
with torch.no_grad():
    for parameter in model.parameters():
        # Of the size of trained weights: those of initialisation give logits of 0.01, which agree too easily.
        parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 1.0))
model.generation_config = GenerationConfig(eos_token_id=[end], temperature=0.6, top_p=0.9, do_sample=True)
model.save_pretrained(folder)
tokenizer.save_pretrained(folder)
