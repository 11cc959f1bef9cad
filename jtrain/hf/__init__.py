"""Hugging Face Llama, Qwen3 and Qwen3-MoE directories (config.json and safetensors) in and out.

`model_config` reads and writes config.json, `mapping` is the table between their tensors and our parameters,
`directory` the files. `python -m jtrain.hf export|import` joins them to a workdir.
"""
