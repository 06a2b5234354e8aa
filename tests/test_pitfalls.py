"""Which tests stand for what has gone wrong for users of such tools, and for traps of the formats.

Each row is a public report, a trap of the models' mathematics or an assertion about files, in a few
words, with the tests that keep it from happening here. The tests are where their subject is; this
is the list, and it fails when one of them is renamed or removed.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parent

REPORTS: Final[dict[str, tuple[str, ...]]] = {
    # --- head, embeddings, pairing ---
    "a draft without a head: NVIDIA/TensorRT-Edge-LLM#200": (
        "test_sharing.py::test_one_model_refers_to_the_head",
        "passes/test_bind_shared_weights.py::test_binds_to_what_the_target_uses_in_its_precision",
        "contract/test_report.py::test_a_draft_keeps_its_own_head",
        "frontends/test_lift.py::TestModule::test_draft_alone_verifies_but_has_no_bytes",
    ),
    "a packed head multiplied as a dense one: sgl-project/sglang#35354": (
        "frontends/test_quantization.py::test_packed_weights_are_told_by_dtype_never_by_shape",
        "frontends/test_lift.py::TestPairs::test_packed_width_that_equals_the_draft_width",
        "contract/test_report.py::test_a_packed_head_is_never_taken_by_its_shape",
    ),
    "exclusions in another dialect: vllm-project/vllm#30164": (
        "contract/test_report.py::test_exclusions_in_every_dialect",
        "frontends/test_quantization.py::test_exclude_patterns_of_every_dialect_decide_the_same",
        "frontends/test_quantization.py::test_unused_patterns_are_listed",
    ),
    "a draft under the target's quantization: vllm-project/vllm#49133": (
        "contract/test_report.py::test_a_draft_inherits_nothing",
        "frontends/test_quantization.py::test_a_draft_does_not_inherit_the_targets_quantization",
        "runtime/test_generator.py::test_a_draft_that_is_never_right_is_reported_once",
    ),
    "a wrong conclusion about tied tables: NVIDIA/Model-Optimizer#2194": (
        "frontends/test_qwen3.py::TestHead::test_tied_with_another_head",
        "frontends/test_qwen3.py::TestHead::test_tied_with_an_equal_head_is_one_weight",
        "frontends/test_qwen3.py::TestHead::test_tied_with_a_quantized_head",
        "frontends/test_qwen3.py::TestHead::test_untied_without_a_head",
        "contract/test_report.py::test_a_tied_and_quantized_head_is_no_alias",
    ),
    "a head in a rotated basis: PrismML-Eng/llama.cpp#210": (
        "contract/test_report.py::test_a_rotated_target",
        "contract/test_report.py::test_rotary_embeddings_are_no_rotation",
        "e2e/test_wrong_wiring.py::test_a_wrong_head_is_told",
    ),
    "a reduced vocabulary without its map: NVIDIA-NeMo/Automodel#2447": (
        "contract/test_cases.py::test_broken",
        "frontends/test_vocabulary_map.py::test_refused",
        "frontends/test_vocabulary_map.py::test_zeros_are_the_first_ids_or_a_map_never_filled",
    ),
    # --- layers, positions, hidden states ---
    "two numberings of tapped layers: ggml-org/llama.cpp#26275": (
        "contract/test_report.py::test_both_conventions_of_layer_numbers",
        "frontends/test_dspark_config.py::TestTappedLayers::test_the_report_names_both_numberings",
        "frontends/test_dspark_config.py::TestTappedLayers::test_unusable_lists",
        "e2e/test_wrong_wiring.py::test_acceptance_falls_and_the_text_stays",
    ),
    "slots of a block that are off by one: intel/llm-scaler#620": (
        "frontends/test_dflash.py::test_layouts_differ",
        "frontends/test_dflash.py::test_the_layout_is_told",
        "frontends/test_dspark_config.py::test_layouts_that_contradict_each_other",
        "e2e/test_wrong_wiring.py::test_acceptance_falls_and_the_text_stays",
    ),
    "a name that two networks claim: syv-ai/qwen38-27b-rtx3090#25": (
        "frontends/test_drafts.py::test_dspark_by_its_tensors",
        "frontends/test_drafts.py::test_a_rank_without_tensors_is_an_incomplete_draft",
        "frontends/test_dflash.py::test_other_networks_are_not_taken_for_it",
    ),
    "a head size that is not hidden / heads: NVIDIA/TensorRT-LLM#5912": (
        "frontends/test_config.py::test_head_dim_comes_from_config_or_weights",
        "frontends/test_config.py::test_head_dim_that_contradicts_the_weights",
    ),
    "a bias by a flag: sgl-project/sglang#5773": (
        "frontends/test_dspark.py::test_a_bias_exists_if_it_is_stored",
        "frontends/test_dspark.py::test_bias_flags_that_disagree_are_reported",
        "frontends/test_qwen3.py::test_a_bias_exists_if_it_is_stored",
        "frontends/test_dense_transformers.py::test_logits_and_states",
    ),
    "q, k and v stacked in another order: NVIDIA-NeMo/RL#2802": (
        "passes/test_fuse_qkv.py::test_split_undoes_the_stack_for_any_head_counts",
        "passes/test_fuse_qkv.py::test_constants_per_head_stay_with_their_head",
    ),
    # --- files ---
    "a cut or empty shard: sgl-project/sglang#32279": (
        "frontends/test_checkpoint.py::test_truncation_names_both_sizes",
        "frontends/test_checkpoint.py::test_any_truncation_is_refused",
        "cli/test_malformed.py::test_any_cut_and_any_flipped_bit_of_a_header",
        "hub/test_resolve.py::test_a_damaged_file_of_the_hub",
    ),
    "links of a hub cache: microsoft/onnxruntime#27353": (
        "frontends/test_checkpoint.py::test_hub_cache_layout",
        "frontends/test_checkpoint.py::test_links_that_leave_the_checkpoint",
        "frontends/test_checkpoint.py::test_broken_and_circular_links",
        "hub/test_ids.py::test_bytes_that_several_models_share",
        "hub/test_commands.py::test_from_a_name_to_a_bundle",
        "cli/test_run.py::TestBundles::test_moved_copied_and_linked",
    ),
    "scales that are no positive numbers: NVIDIA/TensorRT-Edge-LLM#192": (
        "frontends/test_quantization.py::test_bad_scales",
        "frontends/test_quantization.py::test_damaged_block_scales_are_found",
        "frontends/test_quantization.py::test_zero_scales_only_over_zeros",
    ),
    "group sizes and widths that do not divide: vllm-project/vllm#18885": (
        "frontends/test_quantization.py::test_width_that_is_no_multiple_of_the_block",
        "frontends/test_broken_layouts.py::test_broken",
        "frontends/test_broken_layouts.py::test_words_that_are_partly_filled",
        "passes/test_quantize.py::test_matrices_that_do_not_fit_the_layout",
    ),
    "a method that is not supported: NVIDIA/TensorRT-Edge-LLM#217": (
        "frontends/test_quantization.py::test_unsupported_methods_are_named_before_anything_else",
        "frontends/test_broken_layouts.py::test_schemes_of_compressed_tensors_that_are_not_read",
        "frontends/test_checkpoint.py::test_folders_without_safetensors",
        "hub/test_resolve.py::test_weights_that_would_run_code",
    ),
    "empty, surplus and repeated tensors: vllm-project/vllm#1687": (
        "frontends/test_checkpoint.py::test_zero_size_scalar_and_empty_file_are_fine",
        "frontends/test_checkpoint.py::test_tensor_in_two_shards",
        "frontends/test_lift.py::TestInventory::test_unknown_extras_are_listed",
        "frontends/test_lift.py::TestOwnTensors::test_equal_tables_become_one",
        "frontends/test_lift.py::TestOwnTensors::test_different_tables_are_kept",
    ),
    "layer numbers with gaps: NVIDIA/TensorRT-LLM#17378": (
        "frontends/test_lift.py::TestInventory::test_a_gap",
        "frontends/test_lift.py::TestInventory::test_more_layers_than_counted",
        "frontends/test_lift.py::TestInventory::test_a_number_with_a_leading_zero_is_another_name",
        "frontends/test_lift.py::TestInventory::test_a_draft_numbered_after_its_target",
    ),
    "a graph of more than 2 GB: onnx/onnx-tensorrt#818": (
        "test_memory.py::test_two_gigabytes_under_a_hard_limit",
        "backends/onnx/test_storage.py::test_models_hold_no_weights",
        "cli/test_main.py::test_another_working_directory",
    ),
    "sharing that folding undoes: pytorch/pytorch#108342": (
        "passes/test_orders.py::test_any_order",
        "backends/onnx/test_storage.py::test_one_model_has_the_head",
    ),
    # --- values at run time ---
    "speculation that changes the text: antirez/ds4#658": (
        "e2e/test_lossless.py::test_goldens_for_every_number_of_proposals",
        "e2e/test_batch.py::test_rows_have_the_bits_of_a_single_sequence",
        "backends/onnxruntime/test_row_invariance.py::test_rows_per_call",
        "runtime/test_near_ties.py::test_where_the_first_difference_is",
    ),
    "states that are not rolled back: sgl-project/sglang#33800": (
        "frontends/test_qwen3_5.py::test_rejected_rows_leave_no_trace",
        "frontends/test_qwen3_5.py::test_a_state_that_is_not_restored_is_noticed",
        "ir/test_ops_state.py::test_rounds_of_any_acceptance_give_the_bits_of_accepted_rows",
        "runtime/test_session.py::test_what_is_replayed_is_what_was_accepted",
    ),
    "structured output with speculation: vllm-project/vllm#27969": (
        "runtime/test_constrained.py::test_the_text_is_the_one_the_target_writes_alone",
        "runtime/test_constrained.py::test_a_draft_that_proposes_letters_where_digits_are_due",
        "e2e/test_constrained.py::test_speculation_changes_nothing",
    ),
    "what is left of an earlier prompt: vllm-project/vllm#47194": (
        "e2e/test_lossless.py::test_two_runs_of_one_generator_do_not_touch_each_other",
        "e2e/test_batch.py::test_any_order_of_joining_and_leaving",
    ),
    "ids at and beyond the vocabulary: ggml-org/llama.cpp#28158": (
        "test_driver.py::TestPaddingRows::test_they_are_never_chosen",
        "frontends/test_dspark.py::test_padding_rows_are_never_proposed",
        "runtime/test_generator.py::test_ids_out_of_range_are_named",
        "runtime/test_rounds.py::test_a_token_that_is_none",
    ),
    "added tokens without a row: LostRuins/koboldcpp#2325": (
        "contract/test_cases.py::test_broken",
        "test_driver.py::TestTokenizer::test_tokens_without_a_row",
        "runtime/test_tokenizer.py::test_ids_and_what_an_embedding_lacks",
    ),
    "rotary embeddings that are ignored or leak: sbryngelson/ANEForge#58": (
        "ir/test_rope.py::test_goldens",
        "ir/test_rope.py::test_other_types_are_refused_by_name",
        "frontends/test_config.py::test_rope_rules",
        "frontends/test_config.py::test_target_and_draft_ropes_are_independent",
        "frontends/test_lift.py::TestSizes::test_beyond_the_trained_length",
    ),
    "capacity, before and while generating: vllm-project/vllm#57941": (
        "e2e/test_lossless.py::test_capacity_edge",
        "cli/test_run.py::TestPrompts::test_up_to_the_capacity",
        "runtime/test_decoder.py::test_capacity_reached_with_drafted_tokens_in_flight",
        "runtime/test_decoder.py::"
        "test_past_its_own_last_position_the_draft_is_off_and_the_text_goes_on",
        "server/test_answers.py::test_a_long_prompt_is_told_with_both_numbers",
    ),
    "nothing to read, nothing to write: vllm-project/vllm#7283": (
        "cli/test_run.py::TestPrompts::test_refused",
        "runtime/test_generator.py::test_zero_tokens_asked",
        "server/test_answers.py::test_bad_requests",
    ),
    "stop lists in two files: NVIDIA/TensorRT-Model-Connect#640": (
        "frontends/test_config.py::test_eos_is_the_union",
        "runtime/test_decoder.py::test_a_stop_token_in_an_accepted_run_ends_the_text_there",
        "runtime/test_generator.py::test_a_stop_string_over_two_tokens_of_one_block",
        "test_inspection.py::test_a_target",
    ),
    "features of chat templates: ggml-org/llama.cpp#11443": (
        "runtime/test_chat.py::test_equals_the_reference_byte_for_byte",
        "runtime/test_chat.py::test_a_template_refuses_with_its_own_message",
        "runtime/test_chat.py::test_no_way_out_of_the_sandbox",
        "runtime/test_chat.py::test_choosing_among_templates",
    ),
    "requests that disturb each other: NVIDIA/TensorRT-Edge-LLM#79": (
        "server/test_answers.py::test_together_as_alone",
        "server/test_answers.py::test_who_leaves_takes_no_slot_along",
        "server/test_limits.py::test_what_is_under_way_is_completed_at_the_end",
        "server/test_load.py::test_a_small_load",
    ),
    "several tokens in an event: hasso5703/dgx-spark-qwen38#2": (
        "server/test_answers.py::test_a_stream_adds_up_to_the_answer",
        "server/test_answers.py::test_events_tell_of_their_rounds",
        "runtime/test_generator.py::test_no_chunk_has_half_a_character",
    ),
    # --- builds and machines ---
    "a stale cache: pytorch/TensorRT#4226": (
        "test_bundle_cache.py::test_a_byte_in_the_middle_of_a_large_file",
        "test_bundle_cache.py::test_what_decides",
        "backends/tensorrt/test_keys.py::test_one_bit_of_a_weight_counts",
        "backends/cache/test_artifact_cache.py::TestHitsAndMisses::test_reasons",
        "cli/test_engines.py::TestCache::test_what_is_told_of_a_first_build",
        "hub/test_commands.py::test_the_key_of_a_served_bundle_has_the_commit",
    ),
    "equal inputs, another engine: NVIDIA/TensorRT#4730": (
        "test_determinism.py::test_bundles_are_equal_byte_for_byte",
    ),
    "paths, permissions and disks: ggml-org/llama.cpp#5802": (
        "contract/test_report.py::test_odd_and_write_protected_folders",
        "test_driver.py::TestOutput::test_names_that_are_not_ascii",
        "test_driver.py::TestOutput::test_nothing_goes_into_a_checkpoint",
        "test_driver.py::TestOutput::test_a_file_in_the_way",
        "backends/cache/test_artifact_cache.py::TestUnusable::test_put_warns",
        "backends/cache/test_location.py::TestDirectory::test_no_home",
        "backends/test_staging.py::test_full_disk",
        "backends/test_staging.py::test_killed_program_leaves_nothing_that_loads",
    ),
    "memory of a build: NVIDIA/TensorRT-Edge-LLM#30": (
        "test_memory.py::test_memory_does_not_grow_with_the_checkpoint",
        "test_memory_plan.py::test_a_dry_run_tells_it",
        "cli/test_engines.py::TestMemory::test_memory_that_cannot_do_is_refused_before_the_work",
    ),
    "a dtype that is taken for granted: NVIDIA/TensorRT-Edge-LLM#199": (
        "contract/test_report.py::test_an_override_matches_whole_paths_only",
        "ir/test_verifier.py::test_finds",
    ),
}

MODELS: Final[dict[str, tuple[str, ...]]] = {
    "query and gate are split by head": ("e2e/test_golden_hybrid.py::test_every_round",),
    "norms are 1 + w, but for one": ("e2e/test_golden_hybrid.py::test_every_round",),
    "axes of positions interleave; a quarter is rotated": (
        "frontends/test_qwen3_5.py::TestText::test_they_matter_where_the_axes_differ",
        "frontends/test_qwen3_5_vision_transformers.py::test_embeddings_and_logits",
    ),
    "a norm that adds to the sum": (
        "ir/test_ops_state.py::test_l2_normalize_adds_to_the_sum_not_the_mean",
    ),
    "which gate swish is about": ("frontends/test_qwen3_5.py::test_other_networks",),
    "order of taps, and what a state holds": (
        "ir/test_ops_state.py::test_values_of_transformers",
        "ir/test_ops_state.py::test_calls_on_few_rows_give_the_bits_of_one_call",
    ),
    "key heads are repeated one by one": ("ir/test_ops_state.py::test_values_of_transformers",),
    "parameters without .weight, in two precisions": (
        "frontends/test_qwen3_5.py::test_missing_tensors",
        "frontends/test_qwen3_5.py::test_gates_and_norms_in_other_precisions",
    ),
    "an end token in one file only": ("frontends/test_config.py::test_eos_is_the_union",),
    "a head size no quotient gives": (
        "frontends/test_config.py::test_head_dim_comes_from_config_or_weights",
    ),
    "keys one level deeper": ("frontends/test_config.py::test_multimodal_nesting",),
    "where a norm is rounded": (
        "frontends/test_qwen3_transformers.py::test_logits_at_every_position",
    ),
    "two kinds of GELU": (
        "ir/test_ops_elementwise.py::test_the_two_forms_of_gelu_differ",
        "frontends/test_qwen3_5_vision_transformers.py::test_features_of_the_tower",
    ),
    "padding decays a state": ("ir/test_ops_state.py::test_padding_leaves_no_trace",),
    "tables of positions, long ones": (
        "ir/test_rope.py::test_tables_are_cos_and_sin_of_float32_angles",
        "ir/test_rope.py::test_long_positions_round_the_angle_like_the_reference",
    ),
    "what 16 bits do to small and large values": (
        "backends/tensorrt/test_state.py::test_float32_stays_float32",
        "test_driver.py::TestValues::test_values_that_overflow",
    ),
    "a scale before a layer that is folded into a norm": (
        "frontends/test_quantization.py::test_unsupported_layouts_are_named_by_their_tensors",
    ),
    # --- what a frontend asserts ---
    "heads agree with projections": (
        "frontends/test_config.py::test_head_dim_that_contradicts_the_weights",
        "frontends/test_config.py::test_key_value_heads_that_contradict_the_weights",
        "frontends/test_qwen3_5.py::test_bad_configs",
    ),
    "one kind for each layer": (
        "frontends/test_qwen3_5.py::test_a_layer_of_both_kinds",
        "frontends/test_config.py::test_window_missing_or_layer_type_unknown",
    ),
    "rows of the projections and taps of a recurrent layer; no bias of them": (
        "frontends/test_qwen3_5.py::test_tensors_of_other_shapes",
        "frontends/test_qwen3_5.py::test_parameters_that_would_not_be_computed",
    ),
    "rotated dims are even, sections cover them": ("frontends/test_qwen3_5.py::test_bad_configs",),
    "rows of embedding and head": ("frontends/test_qwen3.py::test_config_and_tensors_disagree",),
    "sizes of a tower": (
        "frontends/test_qwen3_5_vision.py::test_bad_configs",
        "frontends/test_qwen3_5_vision.py::test_misshapen_tensors",
        "contract/test_cases.py::test_broken",
    ),
    "nothing of the text is left unread": (
        "frontends/test_qwen3.py::test_a_parameter_that_would_not_be_computed_is_refused",
        "frontends/test_lift.py::TestInventory::test_known_extras_are_nothing",
    ),
    "other parts may be absent": (
        "frontends/test_qwen3_5_vision.py::test_targets_without_a_tower_read_text",
        "frontends/test_mtp.py::TestMethods::test_no_block",
    ),
}

FORMATS: Final[dict[str, tuple[str, ...]]] = {
    "NVFP4: dtypes, shapes and values of its parts": (
        "frontends/test_quantization.py::test_bad_scales",
        "frontends/test_quantization.py::test_missing_scale_names_what_was_assumed_and_looked_for",
        "frontends/test_quantization.py::"
        "test_a_scale_byte_is_refused_exactly_when_it_is_no_positive_number",
    ),
    "FP8: scales and elements": (
        "frontends/test_quantization.py::test_bad_fp8",
        "frontends/test_quantization.py::test_fp8_elements_that_are_no_numbers",
        "frontends/test_quantization.py::test_scalars_may_be_vectors_of_one",
    ),
    "siblings that are stacked have one scale": (
        "passes/test_fuse_qkv.py::test_equal_scales_are_compared_bit_for_bit",
        "passes/test_quantize.py::test_layers_that_read_one_value_share_their_scale",
    ),
    "mixed precision, module by module": (
        "frontends/test_quantization.py::test_mixed_precision_of_fp8_and_nvfp4",
        "frontends/test_quantization.py::test_formats_that_are_not_the_declared_ones_are_listed",
    ),
    "every tensor is used or known": (
        "frontends/test_quantization.py::test_consumed_and_unused_tensors",
        "frontends/test_lift.py::TestInventory::test_many_unknown_extras_are_counted",
    ),
    "scales that divide, and scales that multiply whatever their name": (
        "frontends/test_quantized_layouts.py::test_values_are_those_of_the_library",
        "frontends/test_quantized_layouts.py::test_the_goldens_of_the_facts",
    ),
    "scales of the library rounded to 16 bits": (
        "frontends/test_quantized_layouts.py::test_values_are_those_of_the_library",
    ),
    "INT4: the stated shape, the zero points of two formats": (
        "frontends/test_broken_layouts.py::test_broken",
        "frontends/test_broken_layouts.py::"
        "test_a_file_of_the_second_format_that_says_it_is_of_the_first",
    ),
    "4-bit codes along another axis": (
        "frontends/test_quantization.py::test_unsupported_layouts_are_named_by_their_tensors",
    ),
    "scales of blocks that are all zero": (
        "frontends/test_quantization.py::test_zero_scales_only_over_zeros",
    ),
    "activation scales of weight-only modules": (
        "frontends/test_quantization.py::test_weight_only_exports_leave_a_stored_input_scale_out",
    ),
    "metadata in one of two files, or incomplete": (
        "frontends/test_quantization.py::test_metadata_in_the_side_file_only",
        "frontends/test_quantization.py::test_stored_packed_but_not_declared",
        "frontends/test_quantization.py::test_two_files_that_disagree",
    ),
    "names in lower case, scales of four axes": (
        "frontends/test_quantization.py::test_fp8_by_tensor_row_and_block",
    ),
    "a format that is called NVFP4 and is another": (
        "frontends/test_quantization.py::test_unsupported_methods_are_named_before_anything_else",
    ),
    "a quantized cache without scales": (
        "frontends/test_quantization.py::test_what_becomes_of_a_quantized_cache_is_a_decision",
    ),
    "sidecars of another module": (
        "frontends/test_quantization.py::test_missing_scale_names_what_was_assumed_and_looked_for",
    ),
    "a head that changes between revisions": (
        "frontends/test_published_sizes.py::test_both_revisions",
        "hub/test_resolve.py::test_a_revision_is_pinned",
    ),
    "names of 8-bit floats": (
        "contract/test_malformed_files.py::test_no_tensor",
        "frontends/test_checkpoint.py::test_dtypes_without_counterpart_are_kept_out_but_named",
    ),
    "an index: unsafe names, missing shards, tensors in two": (
        "contract/test_malformed_files.py::test_an_index_that_leads_elsewhere",
        "frontends/test_checkpoint.py::test_index_names_a_tensor_its_shard_lacks",
        "frontends/test_checkpoint.py::test_single_file_and_index_together_are_ambiguous",
    ),
    "headers made to cost memory": ("contract/test_hostile.py::test_memory_is_bounded",),
    "pickles": ("frontends/test_checkpoint.py::test_folders_without_safetensors",),
}

TABLES: Final = {"reports": REPORTS, "models": MODELS, "formats": FORMATS}


@cache
def names_in(file: Path) -> frozenset[str]:
    """Tests of a file: functions, and `Class::function`."""
    found = set()
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            methods = (n for n in node.body if isinstance(n, ast.FunctionDef))
            found |= {f"{node.name}::{method.name}" for method in methods}
    return frozenset(name for name in found if name.rpartition("::")[2].startswith("test_"))


@pytest.mark.parametrize("table", TABLES)
def test_every_row_has_its_tests(table: str) -> None:
    missing = {
        row: name
        for row, names in TABLES[table].items()
        for name in names
        if not (ROOT / name.partition("::")[0]).is_file()
        or name.partition("::")[2] not in names_in(ROOT / name.partition("::")[0])
    }
    assert missing == {}
    assert all(names and len(set(names)) == len(names) for names in TABLES[table].values())


def test_no_report_is_forgotten() -> None:
    """Forty reports; each names where it was made."""
    assert len(REPORTS) == 40
    sources = [row.rpartition(": ")[2] for row in REPORTS]
    assert all(source.count("/") == 1 and source.count("#") == 1 for source in sources)
    assert len(set(sources)) == len(sources)


def test_a_test_that_is_not_there_is_noticed() -> None:
    assert "test_a_test_that_is_not_there_is_noticed" in names_in(Path(__file__))
    assert "names_in" not in names_in(Path(__file__))
