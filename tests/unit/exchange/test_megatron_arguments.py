"""Each of Megatron's arguments that changes the function of a model is understood or refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gptpar.errors import CheckpointError
from gptpar.exchange.megatron.arguments import ABSENT_HERE, model_of
from tests.unit.exchange.megatron_models import GPT2, LLAMA, arguments

# The names of the fields of megatron-core 0.16.1's TransformerConfig, its base class's included.
NAMES = """
tensor_model_parallel_size pipeline_model_parallel_comm_backend pipeline_model_parallel_size
virtual_pipeline_model_parallel_size sequence_parallel context_parallel_size hierarchical_context_parallel_sizes
max_seqlen_per_dp_cp_rank hybrid_context_parallel expert_model_parallel_size expert_tensor_parallel_size
moe_extended_tp perform_initialization use_cpu_initialization fp16 bf16 params_dtype timers finalize_model_grads_func
grad_scale_func no_sync_func grad_sync_func param_sync_func deterministic_mode enable_autocast autocast_dtype
num_microbatches_with_partial_activation_checkpoints gradient_accumulation_fusion
async_tensor_model_parallel_allreduce use_te_rng_tracker tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad
tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs
tp_comm_atomic_rs cross_entropy_loss_fusion cross_entropy_fusion_impl tp_comm_overlap_disable_qkv
tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend overlap_moe_expert_parallel_comm delay_wgrad_compute
ep_overlap_early_attn_memory_release pipeline_dtype variable_seq_lengths overlap_p2p_comm batch_p2p_comm
batch_p2p_sync use_ring_exchange_p2p deallocate_pipeline_outputs defer_embedding_wgrad_compute wgrad_deferral_limit
overlap_p2p_comm_warmup_flush microbatch_group_size_per_vp_stage mtp_standalone cpu_offloading
cpu_offloading_num_layers _cpu_offloading_context cpu_offloading_activations cpu_offloading_weights
cpu_offloading_double_buffering barrier_with_L1_time num_layers mtp_num_layers mtp_loss_scaling_factor
num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage pipeline_model_parallel_layout
account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split hidden_size num_attention_heads
attention_backend softmax_scale softmax_type num_query_groups ffn_hidden_size kv_channels hidden_dropout
attention_dropout fp32_residual_connection apply_residual_connection_post_layernorm layernorm_epsilon
layernorm_zero_centered_gamma add_bias_linear add_qkv_bias gated_linear_unit activation_func
activation_func_fp8_input_store glu_linear_offset activation_func_clamp_value num_moe_experts rotary_interleaved
window_size window_attn_skip_freq normalization qk_layernorm qk_l2_norm qk_clip qk_clip_alpha qk_clip_threshold
log_max_attention_logit attention_output_gate test_mode calculate_per_token_loss multi_latent_attention no_rope_freq
experimental_attention_variant dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff
dsa_indexer_use_sparse_loss linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim
linear_num_key_heads linear_num_value_heads init_method output_layer_init_method init_method_std embedding_init_method
embedding_init_method_std init_model_with_meta_device apply_query_key_layer_scaling attention_softmax_in_fp32
disable_bf16_reduced_precision_matmul bias_activation_fusion masked_softmax_fusion persist_layer_norm
memory_efficient_layer_norm bias_dropout_fusion apply_rope_fusion use_fused_weighted_squared_relu
fused_single_qkv_rope recompute_granularity recompute_method recompute_num_layers distribute_saved_activations
recompute_modules fp8 fp8_recipe fp8_param fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len
fp8_amax_compute_algo fp8_wgrad fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red
first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 use_kitchen use_kitchen_attention
kitchen_attention_backend fp4 fp4_recipe fp4_param fp4_quantizer_factory moe_shared_expert_intermediate_size
moe_shared_expert_gate moe_shared_expert_overlap moe_layer_freq moe_ffn_hidden_size moe_router_load_balancing_type
moe_router_topk moe_enable_routing_replay moe_router_topk_limited_devices moe_router_padding_for_quantization
moe_router_padding_for_fp8 moe_router_num_groups moe_router_group_topk moe_router_pre_softmax
moe_router_topk_scaling_factor moe_router_score_function moe_router_dtype moe_router_enable_expert_bias
moe_router_bias_update_rate moe_router_force_load_balancing moe_grouped_gemm moe_use_legacy_grouped_gemm
moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps moe_token_dropping moe_token_dispatcher_type
moe_enable_deepep moe_flex_dispatcher_backend moe_per_layer_logging moe_expert_capacity_factor
moe_pad_expert_input_to_capacity moe_token_drop_policy moe_layer_recompute moe_permute_fusion moe_router_fusion
moe_apply_probs_on_input moe_latent_size moe_deepep_num_sms moe_hybridep_num_sms cp_comm_type enable_cuda_graph
cuda_graph_use_single_mempool cuda_graph_retain_backward_graph cuda_graph_warmup_steps external_cuda_graph
cuda_graph_impl cuda_graph_scope clone_scatter_output_in_embedding disable_parameter_transpose_cache config_logger_dir
flash_decode batch_invariant_mode use_te_activation_func inference_rng_tracker inference_sampling_seed
symmetric_ar_type use_inference_optimized_layers inference_fuse_tp_communication mrope_section is_hybrid_model
mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path mlp_chunks_for_prefill
heterogeneous_block_specs hetereogenous_dist_checkpoint quant_recipe transformer_impl
fine_grained_activation_offloading offload_modules min_offloaded_tensor_size
"""
FIELDS = NAMES.split()
# Field -> arguments of a run that set it to something else than the model of the test has.
UNDERSTOOD: dict[str, dict[str, Any]] = {
    "num_layers": {"num_layers": 6},
    "hidden_size": {"hidden_size": 64},
    "ffn_hidden_size": {"ffn_hidden_size": 48},
    "num_attention_heads": {"num_attention_heads": 2},
    "num_query_groups": {"group_query_attention": True, "num_query_groups": 2},
    "kv_channels": {"kv_channels": 16},
    "window_size": {"window_size": (3, 0)},
    "window_attn_skip_freq": {"window_size": (3, 0), "window_attn_skip_freq": 2},
    "no_rope_freq": {"position_embedding_type": "rope", "no_rope_freq": 2},
    "normalization": {"normalization": "RMSNorm"},
    "layernorm_epsilon": {"norm_epsilon": 1e-3},
    "layernorm_zero_centered_gamma": {"apply_layernorm_1p": True},
    "qk_layernorm": {"qk_layernorm": True},
    "add_bias_linear": {"add_bias_linear": False},
    "add_qkv_bias": {"add_bias_linear": False, "add_qkv_bias": True},
    "gated_linear_unit": {"swiglu": True},
    "activation_func": {"squared_relu": True},
    "bias_activation_fusion": {"bias_gelu_fusion": False},
    "use_te_activation_func": {"bias_gelu_fusion": False, "use_te_activation_func": True},
    "hidden_dropout": {"hidden_dropout": 0.2},
    "attention_dropout": {"attention_dropout": 0.2},
    "init_method_std": {"init_method_std": 0.5},
}
# Field -> arguments with which Megatron computes what gptpar does not, or which no model can have.
REFUSED: dict[str, dict[str, Any]] = {
    **{name: {name: 2} for name in ABSENT_HERE if name in FIELDS},
    "softmax_scale": {"softmax_scale": 0.25},
    "mrope_section": {"position_embedding_type": "mrope"},
}
WRONG = {
    "window_size": (4, 3),
    "rotary_base": 10000.5,
    "swiglu": 2,
    "position_embedding_type": object(),
    "num_layers": 10**7,
    "activation_func_clamp_value": 0.0,
    "rotary_seq_len_interpolation_factor": 4,
    "no_rope_freq": [1],
    "window_attn_skip_freq": [1],
    "normalization": "SomeNorm",
}
# Names of fields that change no function, by what they are about.
WITHOUT_EFFECT = {
    "of experts, which are refused": "moe_.*|expert_.*|overlap_moe_.*|ep_overlap_.*|use_fused_weighted_squared_relu",
    "of multi-token prediction, which is refused": "mtp_(loss_scaling_factor|standalone)",
    "of clipped logits, which are refused": "qk_clip_.*",
    "of attention variants, which are refused": "dsa_indexer_.*|linear_(.+_dim|num_.+_heads)",
    "of Mamba's layers, which are refused": "mamba_.*|use_mamba_mem_eff_path",
    "where the layers and tensors are": (
        "(tensor|(virtual_)?pipeline)_model_parallel_(size|layout)|pipeline_model_parallel_comm_backend|"
        "num_layers_in_(first|last)_pipeline_stage|account_for_(embedding|loss)_in_pipeline_split|sequence_parallel|"
        "(hierarchical_|hybrid_)?context_parallel(_sizes?)?|max_seqlen_per_dp_cp_rank|microbatch_group_size_per_vp_stage|"
        "hetereogenous_dist_checkpoint"
    ),
    "how processes communicate": (
        "tp_comm_.*|cp_comm_type|(overlap|batch)_p2p_.*|use_ring_exchange_p2p|variable_seq_lengths|symmetric_ar_type|"
        "async_tensor_model_parallel_allreduce|tp_only_amax_red|(no|grad|param)_sync_func|finalize_model_grads_func"
    ),
    "number formats": (
        "fp(8|16|32)(_.*)?|fp4(_.*)?|bf16|params_dtype|pipeline_dtype|(enable_)?autocast(_dtype)?|quant_recipe|"
        "use_kitchen(_attention)?|kitchen_attention_backend|(first_last_layers|num_layers_at_(start|end)_in)_bf16|"
        "disable_bf16_reduced_precision_matmul|attention_softmax_in_fp32|activation_func_fp8_input_store|grad_scale_func|"
        "apply_query_key_layer_scaling"  # divided by the number of the layer, and multiplied again in the softmax
    ),
    "kernels of the same function": (
        "attention_backend|transformer_impl|(masked_softmax|bias_dropout|apply_rope|gradient_accumulation)_fusion|"
        "cross_entropy_(loss_fusion|fusion_impl)|(persist|memory_efficient)_layer_norm|fused_single_qkv_rope|"
        "batch_invariant_mode|deterministic_mode|flash_decode|.*cuda_graph.*|clone_scatter_output_in_embedding|"
        "disable_parameter_transpose_cache"
    ),
    "memory and time": (
        "recompute_.*|distribute_saved_activations|_?cpu_offloading.*|fine_grained_activation_offloading|offload_modules|"
        "min_offloaded_tensor_size|num_microbatches_with_partial_activation_checkpoints|deallocate_pipeline_outputs|"
        "defer_embedding_wgrad_compute|wgrad_deferral_limit|delay_wgrad_compute"
    ),
    "weights before the training": (
        "(output_layer_|embedding_)?init_method|embedding_init_method_std|init_model_with_meta_device|"
        "perform_initialization|use_cpu_initialization|use_te_rng_tracker"
    ),
    "inference, logs and the training's loss alone": (
        "inference_.*|use_inference_optimized_layers|mlp_chunks_for_prefill|timers|barrier_with_L1_time|test_mode|"
        "config_logger_dir|log_max_attention_logit|calculate_per_token_loss"
    ),
}


def model(flags: str = GPT2, **given: Any) -> Any:
    found = arguments(flags)
    vars(found).update(given)
    return model_of(found, 64, Path("theirs"))


def test_every_field_of_megatron_core_is_in_one_class() -> None:
    for name in FIELDS:
        classes = [name in UNDERSTOOD, name in REFUSED]
        classes += [re.fullmatch(names, name) is not None for names in WITHOUT_EFFECT.values()]
        assert sum(classes) == 1, name


def test_an_understood_field_changes_the_model() -> None:
    for name, given in UNDERSTOOD.items():
        but_the_last = dict(list(given.items())[:-1])
        assert name in FIELDS and model(**given) != model(**but_the_last), name


def test_what_gptpar_lacks_is_refused_by_name() -> None:
    for name in ABSENT_HERE:
        for value in (0.7, [2], object()):
            with pytest.raises(CheckpointError, match=f"it has .*--{name.replace('_', '-')}"):
                model(**{name: value})
        model(**{name: None})
    for off in ({"num_experts": [1]}, {"softmax_type": "vanilla"}, {"mtp_num_layers": 0}, {"softmax_scale": 8**-0.5}):
        assert model(**off) == model()


@pytest.mark.parametrize("given", [*REFUSED.values(), *({name: value} for name, value in WRONG.items())], ids=str)
def test_what_cannot_be_computed_is_refused(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(CheckpointError, match=f"gptpar cannot compute .*\n.*{name.replace('_', '[-_]')}"):
        model(**given)


def test_whole_numbers_may_be_written_as_others() -> None:
    found = model(LLAMA, rotary_base=500000.0)
    assert found.rotary_base == 500000 and type(found.rotary_base) is int


def test_megatron_turns_its_fused_gelu_off_without_biases() -> None:
    """So that says nothing of a gated MLP, and exact GELU of another."""
    assert model(LLAMA, bias_gelu_fusion=False) == model(LLAMA, bias_gelu_fusion=True)
    assert model(bias_gelu_fusion=False).mlp_activation == "gelu"
    assert model(bias_gelu_fusion=False, use_te_activation_func=True).mlp_activation == "gelu_tanh"
    assert model(squared_relu=True).mlp_activation == "squared_relu"
    assert model(glu_activation="geglu").mlp_activation == "geglu"


def test_norms_and_positions_by_their_other_names() -> None:
    assert model(layernorm_zero_centered_gamma=True).apply_layernorm_1p
    assert model(add_position_embedding=False).position_embedding_type == "none"
    assert model(use_rotary_position_embeddings=True).position_embedding_type == "rope"
    assert model(normalization="rmsnorm").normalization == "RMSNorm"


@pytest.mark.parametrize(
    ("implementation", "form"),
    [
        ({}, "gelu_tanh"),
        ({"use_mcore_models": False}, "gelu_tanh"),
        ({"use_legacy_models": True}, "gelu_tanh"),
        ({"use_mcore_models": True}, "gelu"),
        ({"use_legacy_models": False}, "gelu"),
        ({"deprecated_use_mcore_models": False}, "gelu"),
    ],
)
def test_models_of_megatron_core_pass_over_openai_gelu(implementation: dict[str, bool], form: str) -> None:
    assert model(openai_gelu=True, bias_gelu_fusion=False, **implementation).mlp_activation == form
    assert model(openai_gelu=True, **implementation).mlp_activation == "gelu_tanh"
