"""Each field of Megatron Core's configuration is understood, refused, or known to change no function."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gptpar.errors import CheckpointError
from gptpar.exchange.megatron.arguments import ABSENT_HERE, model_of
from tests.unit.exchange.megatron_core_fields import FIELDS
from tests.unit.exchange.megatron_models import GPT2, arguments

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
# Field -> arguments that are refused.
REFUSED: dict[str, dict[str, Any]] = {
    **{name: {name: 2} for name in ABSENT_HERE if name in FIELDS},
    "softmax_scale": {"softmax_scale": 0.25},
    "mrope_section": {"position_embedding_type": "mrope"},
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


def model(**given: Any) -> Any:
    found = arguments(GPT2)
    vars(found).update(given)
    return model_of(found, 64, Path("theirs"))


def test_every_field_of_megatron_core_is_in_one_class() -> None:
    for name in FIELDS:
        classes = [name in UNDERSTOOD, name in REFUSED]
        classes += [re.fullmatch(names, name) is not None for names in WITHOUT_EFFECT.values()]
        assert sum(classes) == 1, name


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_an_understood_field_changes_the_model(name: str) -> None:
    given = UNDERSTOOD[name]
    but_the_last = dict(list(given.items())[:-1])
    assert name in FIELDS and model(**given) != model(**but_the_last)


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_gptpar_lacks_is_refused(name: str) -> None:
    (argument,) = REFUSED[name]
    with pytest.raises(CheckpointError, match=argument.replace("_", "[-_]")):
        model(**REFUSED[name])


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
