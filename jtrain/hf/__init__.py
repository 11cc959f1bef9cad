"""Import and export of Hugging Face Llama, Qwen3 and Qwen3-MoE directories (config.json and safetensors).

`model_config` reads and writes config.json, `mapping` maps Hugging Face tensors to jtrain parameters, and
`directory` reads and writes the files. `workdirs` converts between directories and workdirs.
"""
