//! The keys inside the sections that are refused, so that a slip in a section that is off is found, too.

/// The keys of the section at `path`; `*` stands for any. Nothing is known of the inside of others.
pub(in super::super) fn keys(path: &str) -> Option<Vec<&'static str>> {
    let (_, keys) = INSIDE.iter().find(|(pattern, _)| fits(pattern, path))?;
    Some(keys.split(' ').collect())
}

/// Whether `path` is what `pattern` says, in which a `*` is any name.
fn fits(pattern: &str, path: &str) -> bool {
    let mut names = path.split('.');
    let all = pattern
        .split('.')
        .all(|wanted| names.next().is_some_and(|name| wanted == "*" || wanted == name));
    all && names.next().is_none()
}

/// Sections by path, and their keys. Keys of a section in a list stand with the list.
#[rustfmt::skip]
const INSIDE: &[(&str, &str)] = &[
    ("elasticity", "enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time prefer_large_batch prefer_larger_batch version ignore_non_elastic_batch_info num_gpus_per_node model_parallel_size"),
    ("amp", "*"),
    ("torch_autocast", "enabled dtype lower_precision_safe_modules"),
    ("zero_optimization.leaf_module", "classes names name_suffixes"),
    ("zero_optimization.zeropp_loco_param", "err_beta reset_T"),
    ("zero_optimization.zenflow", "topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch"),
    ("tensor_parallel", "dtype autotp_size tp_overlap_comm tensor_parallel tp injection_policy_tuple partition_config preset_model keep_module_on_host replace_with_kernel_inject kernel_inject"),
    ("tensor_parallel.tensor_parallel", "tp_size tp_grain_size mpu tp_group"),
    ("tensor_parallel.tp", "tp_size tp_grain_size mpu tp_group"),
    ("tensor_parallel.partition_config", "use_default_specs layer_specs tp_size embedding_partition_dim lm_head_patterns strict_mode"),
    ("tensor_parallel.partition_config.layer_specs", "patterns partition_type shape partition_dim model_types gather_output grad_allreduce"),
    ("hybrid_engine", "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters tp_gather_partition_size enable_cuda_graph"),
    ("expert_parallel", "enabled autoep_size expert_tensor_parallel_size validate_folding_routing preset_model use_grouped_mm disable_triton_grouped_mm moe_layer_pattern router_pattern expert_pattern score_func score_apply combine_impl route_norm route_scale top_k routed_scaling_factor num_expert_groups num_limited_groups load_balance_coeff expert_w1 expert_w2 expert_w3 num_experts_attr top_k_attr has_shared_experts shared_experts_pattern shared_experts_gate_pattern"),
    ("pipeline", "*"),
    ("sparse_attention", "mode block different_layout_per_head num_local_blocks num_global_blocks attention horizontal_global_attention num_different_global_patterns num_random_blocks local_window_blocks global_block_indices global_block_end_indices num_sliding_window_blocks"),
    ("compile", "deepcompile free_activation free_activation_threshold offload_activation offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log offload_parameters sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors keep_all_input_tensors passes"),
    ("progressive_layer_drop", "enabled theta gamma"),
    ("eigenvalue", "enabled verbose max_iter tol stability gas_boundary_resolution layer_name layer_num"),
    ("weight_quantization", "enabled num_bits q_type q_groups quantized_initialization post_init_quant"),
    ("compression_training", "layer_reduction weight_quantization activation_quantization sparse_pruning row_pruning head_pruning channel_pruning"),
    ("compression_training.layer_reduction", "enabled keep_number_layer module_name_prefix teacher_layer other_module_name"),
    ("compression_training.*", "shared_parameters different_groups"),
    ("compression_training.weight_quantization.shared_parameters", "enabled quantizer_kernel schedule_offset quantize_groups quantize_verbose quantization_type rounding quantize_weight_in_forward fp16_mixed_quantize"),
    ("compression_training.weight_quantization.shared_parameters.fp16_mixed_quantize", "enabled quantize_change_ratio"),
    ("compression_training.activation_quantization.shared_parameters", "enabled quantization_type range_calibration schedule_offset"),
    ("compression_training.sparse_pruning.shared_parameters", "enabled schedule_offset schedule_offset_end schedule_offset_stride method block_pattern dense_ratio excluded_modules"),
    ("compression_training.head_pruning.shared_parameters", "enabled schedule_offset method num_heads"),
    ("compression_training.*.shared_parameters", "enabled schedule_offset method"),
    ("compression_training.*.different_groups", "*"),
    ("compression_training.*.different_groups.*", "params modules related_modules"),
    ("compression_training.weight_quantization.different_groups.*.params", "start_bits target_bits quantization_period"),
    ("compression_training.activation_quantization.different_groups.*.params", "bits"),
    ("compression_training.*.different_groups.*.params", "dense_ratio"),
    ("data_efficiency", "enabled seed data_routing data_sampling"),
    ("data_efficiency.data_routing", "enabled random_ltd"),
    ("data_efficiency.data_routing.random_ltd", "enabled total_layer_num random_ltd_layer_num random_ltd_layer_id model_mask_name model_type hidden_state_order random_ltd_schedule micro_batch_size global_batch_size layer_token_lr_schedule"),
    ("data_efficiency.data_routing.random_ltd.random_ltd_schedule", "min_value max_value schedule_type schedule_config"),
    ("data_efficiency.data_routing.random_ltd.random_ltd_schedule.schedule_config", "require_steps seq_per_step"),
    ("data_efficiency.data_sampling", "enabled num_epochs num_workers pin_memory curriculum_learning dynamic_batching"),
    ("data_efficiency.data_sampling.dynamic_batching", "enabled metrics_path lr_scaling_method min_batch_size max_batch_size sequence_picking_order max_tokens verbose"),
    ("data_efficiency.data_sampling.curriculum_learning", "enabled data_cluster_path curriculum_metrics"),
    ("data_efficiency.data_sampling.curriculum_learning.curriculum_metrics", "*"),
    ("data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*", "index_to_sample_path index_to_metric_path difficulty_type clustering_type min_difficulty max_difficulty schedule_type schedule_config"),
    ("data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*.schedule_config", "total_curriculum_step difficulty_step root_degree difficulty max_step"),
    ("curriculum_learning", "enabled curriculum_type min_difficulty max_difficulty schedule_type schedule_config"),
    ("curriculum_learning.schedule_config", "total_curriculum_step difficulty_step root_degree difficulty max_step"),
    ("flops_profiler", "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file"),
    ("comms_logger", "enabled verbose prof_all debug prof_ops"),
    ("autotuning", "enabled fast results_dir exps_dir overwrite metric start_profile_step end_profile_step metric_path max_train_batch_size min_train_batch_size max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes mp_size tuner_type tuner_early_stopping tuner_num_trials arg_mappings model_info model_info_path"),
    ("timers", "throughput"),
    ("timers.throughput", "enabled synchronized"),
    ("checkpoint.writer", "type io_buffer_size io_buffer_double show_statistics data_parallel decoupled io_multiplier"),
    ("nebula", "enabled enable_nebula_load nebula_load_path persistent_storage_path persistent_time_interval num_of_version_in_retention"),
];
