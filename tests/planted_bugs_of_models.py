"""Bugs of layers, families and adapters that quick tests find."""

from tests.planting import Bug

KERNELS = "kernels/jtrain_kernels/"
PACKED = "tests/model/test_recurrent.py::test_documents_of_one_row_know_nothing_of_each_other"
ONE_DEVICE = "tests/bench/test_descriptions.py::test_one_device_computes_what_the_papers_say"
DROPS = "tests/step/test_adapter_dropout.py::"

BUGS_OF_MODELS = {
    # Dropout that depends on who computes it.
    "dropout of an adapter: devices along tensor drop the inputs of the first": Bug(
        "jtrain/model/adapters/dropout_keys.py",
        'first = (jax.lax.axis_index("tensor") * local_inputs)',
        'first = (0 * jax.lax.axis_index("tensor") * local_inputs)',
        DROPS + "test_a_layout_drops_the_same_numbers",
    ),
    "dropout of an adapter: columns as they lie on the device": Bug(
        "jtrain/step/train_step.py",
        "index_in_batch(rows, placement.context.position_L(columns))",
        "index_in_batch(rows, jnp.arange(columns))",
        DROPS + "test_a_layout_drops_the_same_numbers",
    ),
    "dropout of an adapter: the same mask in every step": Bug(
        "jtrain/model/adapters/dropout.py",
        "mix_bits(step.astype(jnp.uint32) +",
        "mix_bits(0 * step.astype(jnp.uint32) +",
        DROPS + "test_the_kept_share_is_what_the_rate_leaves_and_each_draw_is_its_own",
    ),
    "peft: up before gate in a tensor of both": Bug(
        "jtrain/hf/peft_tensors.py",
        "part=int(is_up)",
        "part=int(not is_up)",
        "tests/hf/test_peft_folders.py::test_logits_and_gradients_are_those_of_peft",
    ),
    # What a family gets wrong.
    "a window that reaches beyond its document": Bug(
        KERNELS + "attention/chunks.py",
        "jnp.where(same_BLM & seen_LM[None], 0.0, -jnp.inf)",
        "jnp.where((same_BLM | (self.first > 0)) & seen_LM[None], 0.0, -jnp.inf)",
        "tests/kernels/test_attention.py::test_a_window_is_its_formula_in_any_chunk",
    ),
    "a router's balance counts padding": Bug(
        "jtrain/model/router.py",
        "jnp.where(valid_BL[..., None, None], chosen_BLSX, 0)",
        "chosen_BLSX",
        ONE_DEVICE,
    ),
    "a router's squared log-partition counts padding": Bug(
        "jtrain/model/router.py", "jnp.where(valid_BL, z_BL, 0.0)", "z_BL", ONE_DEVICE
    ),
    "a tied head exported twice": Bug(
        "jtrain/hf/mapping.py",
        "        yield name, theirs\n",
        "        yield name, theirs\n"
        '        if model.tie_embeddings and "embed" in name:\n            yield "lm_head.weight", theirs\n',
        "tests/hf/test_mapping.py::test_a_tied_head_is_exported_once",
    ),
    "the last dims of a head rotated, not its first": Bug(
        "jtrain/model/attention.py",
        "ops.rope(x_BLNH[..., :rotated_dims], cos_BLR, sin_BLR)",
        "ops.rope(x_BLNH[..., -rotated_dims:], cos_BLR, sin_BLR)",
        ONE_DEVICE,
    ),
    "a rotation to the other side": Bug(
        KERNELS + "rope/api.py",
        "[a * cos - b * sin, b * cos + a * sin]",
        "[a * cos + b * sin, b * cos - a * sin]",
        ONE_DEVICE,
    ),
    "groups of sequences: documents of the first group for all": Bug(
        "jtrain/model/sequence_groups.py",
        "in (x_BLD, *rotation, segment_BL)]",
        "in (x_BLD, *rotation, jnp.tile(segment_BL[: len(segment_BL) // groups], (groups, 1)))]",
        "tests/step/test_tensor_overlap.py::test_groups_of_sequences_are_not_a_model",
    ),
    "a convolution sees the document before": Bug(
        KERNELS + "short_conv/api.py",
        "same_BL = segment[:, w : w + L] == segment_BL",
        "same_BL = segment[:, w : w + L] >= 0",
        PACKED,
    ),
    "a state goes on into the next document": Bug(
        KERNELS + "recurrence/documents.py",
        "return jnp.cumsum(filled_BL != before_BL, axis=1, dtype=jnp.int32), filled_BL[:, -1]",
        "return jnp.zeros_like(filled_BL), filled_BL[:, -1]",
        PACKED,
    ),
}
