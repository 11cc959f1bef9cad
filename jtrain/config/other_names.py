"""Names that other trainers give to fields and options, for suggestions. No jax: a mistake is answered at
once.
"""

OTHER_NAMES = {
    "num_steps": "max_steps train_steps total_steps training_steps max_iters train_iters iterations steps",
    "mesh.replica": "hsdp replicate num_replicas",
    "mesh.stage": "pp pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size",
    "mesh.data": "dp data_parallel data_parallel_size num_gpus world_size",
    "mesh.expert": "ep expert_parallel expert_parallel_size",
    "mesh.context": "cp context_parallel context_parallel_size sequence_parallel sequence_parallel_size",
    "mesh.tensor": "tp tensor_parallel tensor_parallel_size tensor_model_parallel_size",
    "layout.zero_stage": "zero sharding_strategy stage distributed_optimizer",
    "layout.zero_stage=3": "fsdp fsdp2 zero3 full_shard fully_shard",
    "layout.microbatches": "gradient_accumulation_steps gradient_accumulation accumulate_grad_batches "
    "grad_accum_steps grad_accum grad_acc accumulation_steps num_microbatches",
    "layout.remat=full": "gradient_checkpointing activation_checkpointing activation_checkpoint "
    "recompute recompute_granularity remat_policy",
    "layout.offload.optimizer=1.0": "cpu_offload offload_optimizer",
    "precision.compute_dtype": "dtype mixed_precision torch_dtype amp tf32 fp16 float16",
    "precision.compute_dtype=bfloat16": "bf16",
    "precision.compute_dtype=float32": "fp32",
    "precision.matmul_dtype=fp8_current": "fp8 float8",
    "model.num_layers": "n_layer n_layers num_hidden_layers depth",
    "model.d_model": "n_embd hidden_size embed_dim dim width",
    "model.num_heads": "n_head n_heads num_attention_heads",
    "model.num_kv_heads": "num_key_value_heads n_kv_heads num_query_groups",
    "model.d_ff": "intermediate_size ffn_hidden_size hidden_dim mlp_dim",
    "model.rope.theta": "rope_theta rotary_base",
    "model.tie_embeddings": "tie_word_embeddings tied_embeddings weight_tying",
    "adapter=LoRA": "lora use_lora peft use_peft",
    "adapter.rank": "lora_r lora_rank r",
    "adapter.alpha": "lora_alpha",
    "adapter.targets": "lora_target_modules target_modules",
    "adapter.base_dtype=nf4": "qlora load_in_4bit bnb_4bit_quant_type",
    "optimizer.peak_lr": "lr learning_rate max_lr base_lr",
    "optimizer.schedule": "lr_scheduler lr_scheduler_type lr_schedule scheduler lr_decay_style",
    "optimizer.schedule.final_fraction": "min_lr min_lr_ratio final_lr end_lr",
    "optimizer.warmup_steps": "warmup num_warmup_steps lr_warmup_steps warmup_iters warmup_ratio warmup_fraction",
    "optimizer.b1": "beta1 beta_1 adam_beta1",
    "optimizer.b2": "beta2 beta_2 adam_beta2 betas",
    "optimizer.eps": "epsilon adam_epsilon",
    "optimizer.weight_decay": "wd l2",
    "optimizer.clip_norm": "max_grad_norm clip_grad grad_clip clip_grad_norm gradient_clip_val max_norm",
    "optimizer=Muon": "muon",
    "objective=DPO": "dpo",
    "objective=Distillation": "distillation kd kd_trainer",
    "objective.share": "kd_alpha kd_ratio",
    "objective.top_k": "kd_top_k kd_topk logprobs_top_k",
    "objective.beta": "beta dpo_beta",
    "data.path": "dataset dataset_name dataset_path train_file train_data train_dataset data_dir data_files",
    "data.seq_len": "seq_length sequence_length max_seq_len max_seq_length max_length context_length "
    "block_size cutoff_len n_ctx",
    "data.global_batch": "batch_size global_batch_size train_batch_size total_batch_size batch "
    "per_device_train_batch_size per_device_batch_size micro_batch_size microbatch_size",
    "data.epochs": "num_epochs num_train_epochs max_epochs epoch",
    "data.tokenizer": "tokenizer_name tokenizer_path tokenizer_name_or_path",
    "data.eval_fraction": "val_fraction validation_split val_split test_size",
    "data.packing": "pack sample_packing",
    "data.max_loaders": "num_workers dataloader_num_workers",
    "data.lookahead_steps": "prefetch prefetch_factor",
    "checkpoint.every_steps": "save_steps save_every save_interval checkpoint_interval checkpoint_every",
    "checkpoint.keep_last": "save_total_limit keep_checkpoints max_to_keep",
    "eval.every_steps": "eval_steps eval_interval eval_every val_check_interval evaluation_strategy",
    "eval.sets": "eval_dataset eval_data val_data validation_file",
    "metrics.log_every_steps": "logging_steps log_interval log_every log_freq",
    "metrics.tensorboard": "report_to logger",
    "profile.steps": "profiler profile_steps trace_steps",
    "deterministic": "deterministic_mode full_determinism",
    "--workdir": "output_dir out_dir output save_dir run_dir exp_dir log_dir resume resume_from_checkpoint",
    "--config": "model_name model_name_or_path recipe preset",
    "--processes": "nproc_per_node num_processes nproc",
    "--device": "accelerator use_cpu",
}
"""Path of a field, with a value where the name says one, or an option -> what others call it."""

OTHER_UNITS = {
    "the sequences of a step, over all devices and microbatches": "per_device_train_batch_size "
    "per_device_batch_size micro_batch_size microbatch_size",
    "the rate at the end over optimizer.peak_lr": "min_lr final_lr end_lr",
    "bfloat16 or float32": "mixed_precision amp tf32 fp16 float16",
    "a number of steps": "val_check_interval evaluation_strategy",
    "0, 1, 2 or 3": "sharding_strategy",
    "True or False": "report_to logger",
    "a number; the other is optimizer.b1": "betas",
}
"""Values of a field -> names of OTHER_NAMES whose values are something else, and must not be copied."""

_BY_NAME = {name: path for path, names in OTHER_NAMES.items() for name in names.split()}
_UNIT_BY_NAME = {name: unit for unit, names in OTHER_UNITS.items() for name in names.split()}


def known_elsewhere(name: str) -> str | None:
    """Field, `field=value` or option that other trainers call `name`; dashes and case do not matter."""
    return _BY_NAME.get(_normalize(name))


def other_unit(name: str) -> str:
    """Values of the field that others call `name`, where theirs are something else; "" where they are the
    same.
    """
    return _UNIT_BY_NAME.get(_normalize(name), "")


def _normalize(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()
