"""DeepSpeed's names: where each is in gptpar, in which of DeepSpeed's modules it is found, and which are refused."""

from __future__ import annotations

from collections.abc import Mapping

VERSION = "0.19.8"
"""The version of DeepSpeed whose names and meanings these are."""

_HERE = "gptpar.deepspeed"
_SCHEDULES = "gptpar.any_module.schedulers"
_ESTIMATES = "gptpar.deepspeed.memory_estimates"

HOMES: Mapping[str, str] = {
    "CudaRNGStatesTracker": f"{_HERE}.recomputation:CudaRNGStatesTracker",
    "DEEPSPEED_ENVIRONMENT_NAME": f"{_HERE}.start:DEEPSPEED_ENVIRONMENT_NAME",
    "DeepSpeedCPUAdam": f"{_HERE}.optimizers:DeepSpeedCPUAdam",
    "DeepSpeedConfig": f"{_HERE}.settings:DeepSpeedConfig",
    "DeepSpeedConfigError": "gptpar.errors:ConfigError",
    "DeepSpeedDataLoader": "torch.utils.data:DataLoader",
    "DeepSpeedEngine": "gptpar.any_module.training_engine:TrainingEngine",
    "DeepSpeedOptimizer": "gptpar.any_module.optimizer:EngineOptimizer",
    "DeepSpeedZeroConfig": f"{_HERE}.zero_config:DeepSpeedZeroConfig",
    "DeepSpeedZeroLeafModuleConfig": f"{_HERE}.zero_config:DeepSpeedZeroLeafModuleConfig",
    "DeepSpeedZeroOffloadOptimizerConfig": f"{_HERE}.zero_config:DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig": f"{_HERE}.zero_config:DeepSpeedZeroOffloadParamConfig",
    "DeepSpeedZeroOptimizer": "gptpar.any_module.optimizer:EngineOptimizer",
    "DeepSpeedZeroOptimizer_Stage3": "gptpar.any_module.optimizer:EngineOptimizer",
    "FP16_DeepSpeedZeroOptimizer": "gptpar.any_module.optimizer:EngineOptimizer",
    "FusedAdam": f"{_HERE}.optimizers:FusedAdam",
    "GatheredParameters": f"{_HERE}.zero_parameters:GatheredParameters",
    "HAS_TRITON": f"{_HERE}.start:HAS_TRITON",
    "Init": f"{_HERE}.zero_parameters:Init",
    "LRRangeTest": f"{_SCHEDULES}:LRRangeTest",
    "LayerSpec": f"{_HERE}.pipeline:PipeLayerSpec",
    "OffloadDeviceEnum": f"{_HERE}.zero_config:OffloadDeviceEnum",
    "OnDevice": f"{_HERE}.zero_parameters:OnDevice",
    "OneCycle": f"{_SCHEDULES}:OneCycle",
    "PipeDataParallelTopology": f"{_HERE}.grid:PipeDataParallelTopology",
    "PipeModelDataParallelTopology": f"{_HERE}.grid:PipeModelDataParallelTopology",
    "PipelineEngine": "gptpar.any_module.pipeline_engine:PipelineEngine",
    "PipelineModule": f"{_HERE}.pipeline:PipeModule",
    "PipelineParallelGrid": f"{_HERE}.grid:PipelineParallelGrid",
    "ProcessTopology": f"{_HERE}.grid:ProcessTopology",
    "RepeatingLoader": "gptpar.any_module.dataset:RepeatingLoader",
    "TiedLayerSpec": f"{_HERE}.pipeline:PipeTiedLayerSpec",
    "VALID_LR_SCHEDULES": f"{_HERE}.start:VALID_LR_SCHEDULES",
    "WarmupCosineLR": f"{_SCHEDULES}:WarmupCosineLR",
    "WarmupDecayLR": f"{_SCHEDULES}:WarmupDecayLR",
    "WarmupLR": f"{_SCHEDULES}:WarmupLR",
    "ZeroParamStatus": f"{_HERE}.zero_parameters:ZeroParamStatus",
    "ZeroStageEnum": f"{_HERE}.zero_config:ZeroStageEnum",
    "__compatible_ops__": f"{_HERE}.builders:__compatible_ops__",
    "__git_branch__": f"{_HERE}.constants:__git_branch__",
    "__git_hash__": f"{_HERE}.constants:__git_hash__",
    "__version__": f"{_HERE}.names:VERSION",
    "__version_major__": f"{_HERE}.constants:__version_major__",
    "__version_minor__": f"{_HERE}.constants:__version_minor__",
    "__version_patch__": f"{_HERE}.constants:__version_patch__",
    "add_config_arguments": "gptpar.any_module.arguments:add_config_arguments",
    "checkpoint": f"{_HERE}.recomputation:checkpoint",
    "checkpointing": f"{_HERE}.recomputation",
    "clip_grad_norm_": "torch.nn.utils:clip_grad_norm_",
    "clone_tensors_for_torch_save": f"{_HERE}.whole_tensors:clone_tensors_for_torch_save",
    "configure": f"{_HERE}.recomputation:configure",
    "convert_zero_checkpoint_to_fp32_state_dict": f"{_HERE}.fp32_weights:convert_zero_checkpoint_to_fp32_state_dict",
    "dict_raise_error_on_duplicate_keys": f"{_HERE}.settings:dict_raise_error_on_duplicate_keys",
    "estimate_zero2_model_states_mem_needs_all_cold": f"{_ESTIMATES}:estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live": f"{_ESTIMATES}:estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs_all_cold": f"{_ESTIMATES}:estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live": f"{_ESTIMATES}:estimate_zero3_model_states_mem_needs_all_live",
    "get_accelerator": f"{_HERE}.accelerators:get_accelerator",
    "get_cuda_rng_tracker": f"{_HERE}.recomputation:get_cuda_rng_tracker",
    "get_dict_param": f"{_HERE}.settings:get_dict_param",
    "get_fp32_state_dict_from_zero_checkpoint": f"{_HERE}.fp32_weights:get_fp32_state_dict_from_zero_checkpoint",
    "get_list_param": f"{_HERE}.settings:get_list_param",
    "get_scalar_param": f"{_HERE}.settings:get_scalar_param",
    "get_z3_leaf_modules": f"{_HERE}.leaf_modules:get_z3_leaf_modules",
    "get_zero_config": f"{_HERE}.zero_config:get_zero_config",
    "inference_all_reduce": "torch.distributed:all_reduce",
    "init_distributed": f"{_HERE}.processes:init_distributed",
    "initialize": f"{_HERE}.start:initialize",
    "instrument_w_nvtx": f"{_HERE}.start:instrument_w_nvtx",
    "is_configured": f"{_HERE}.recomputation:is_configured",
    "is_current_accelerator_supported": f"{_HERE}.accelerators:is_current_accelerator_supported",
    "load_state_dict_from_zero_checkpoint": f"{_HERE}.fp32_weights:load_state_dict_from_zero_checkpoint",
    "log_dist": f"{_HERE}.start:log_dist",
    "logger": f"{_HERE}.start:logger",
    "model_parallel_cuda_manual_seed": f"{_HERE}.recomputation:model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed": f"{_HERE}.recomputation:model_parallel_reconfigure_tp_seed",
    "move_to_device": f"{_HERE}.start:move_to_device",
    "non_reentrant_checkpoint": f"{_HERE}.recomputation:non_reentrant_checkpoint",
    "partition_activations_in_checkpoint": f"{_HERE}.recomputation:partition_activations_in_checkpoint",
    "partition_balanced": f"{_HERE}.pipeline:partition_balanced",
    "partition_uniform": f"{_HERE}.pipeline:partition_uniform",
    "prefix_sum_inc": f"{_HERE}.pipeline:prefix_sum_inc",
    "register_external_parameter": f"{_HERE}.zero_parameters:register_external_parameter",
    "required_torch_version": f"{_HERE}.start:required_torch_version",
    "reset": f"{_HERE}.recomputation:reset",
    "safe_get_full_fp32_param": f"{_HERE}.whole_tensors:safe_get_full_fp32_param",
    "safe_get_full_grad": f"{_HERE}.whole_tensors:safe_get_full_grad",
    "safe_get_full_optimizer_state": f"{_HERE}.whole_tensors:safe_get_full_optimizer_state",
    "safe_get_local_fp32_param": f"{_HERE}.whole_tensors:safe_get_local_fp32_param",
    "safe_get_local_grad": f"{_HERE}.whole_tensors:safe_get_local_grad",
    "safe_get_local_optimizer_state": f"{_HERE}.whole_tensors:safe_get_local_optimizer_state",
    "safe_set_full_fp32_param": f"{_HERE}.whole_tensors:safe_set_full_fp32_param",
    "safe_set_full_grad": f"{_HERE}.whole_tensors:safe_set_full_grad",
    "safe_set_full_optimizer_state": f"{_HERE}.whole_tensors:safe_set_full_optimizer_state",
    "safe_set_local_fp32_param": f"{_HERE}.whole_tensors:safe_set_local_fp32_param",
    "safe_set_local_grad": f"{_HERE}.whole_tensors:safe_set_local_grad",
    "safe_set_local_optimizer_state": f"{_HERE}.whole_tensors:safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized": f"{_HERE}.whole_tensors:safe_update_full_grad_vectorized",
    "see_memory_usage": f"{_HERE}.start:see_memory_usage",
    "set_num_layers": f"{_HERE}.recomputation:set_num_layers",
    "set_random_seed": f"{_HERE}.start:set_random_seed",
    "set_z3_leaf_modules": f"{_HERE}.leaf_modules:set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name": f"{_HERE}.leaf_modules:set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix": f"{_HERE}.leaf_modules:set_z3_leaf_modules_by_suffix",
    "split_params_into_different_moe_groups_for_optimizer": (
        f"{_HERE}.start:split_params_into_different_moe_groups_for_optimizer"
    ),
    "torch_info": f"{_HERE}.start:torch_info",
    "unset_z3_leaf_modules": f"{_HERE}.leaf_modules:unset_z3_leaf_modules",
    "unwrap_model_for_generation": f"{_HERE}.zero_parameters:unwrap_model_for_generation",
    "version": f"{_HERE}.names:VERSION",
    "z3_leaf_module": f"{_HERE}.leaf_modules:z3_leaf_module",
    "zero_wrapper_for_fp_tensor_constructor": f"{_HERE}.zero_parameters:zero_wrapper_for_fp_tensor_constructor",
}
"""Name -> the module of gptpar or torch, and the attribute there, which is that name."""

_SAFE = (
    "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_set_full_fp32_param "
    "safe_set_full_optimizer_state safe_set_full_grad safe_get_local_fp32_param safe_get_local_grad "
    "safe_get_local_optimizer_state safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state "
    "safe_update_full_grad_vectorized"
)
_LEAVES = (
    "set_z3_leaf_modules set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix unset_z3_leaf_modules "
    "get_z3_leaf_modules z3_leaf_module"
)
_ZERO = (
    "Init GatheredParameters ZeroParamStatus register_external_parameter unwrap_model_for_generation "
    "TiledLinear TiledLinearReturnBias MiCS_Init"
)
_PIPE = "PipelineModule LayerSpec TiedLayerSpec"
_SCHEDULERS = "VALID_LR_SCHEDULES WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest"
_CHECKPOINTING = (
    "checkpoint non_reentrant_checkpoint configure is_configured reset CudaRNGStatesTracker get_cuda_rng_tracker "
    "model_parallel_cuda_manual_seed model_parallel_reconfigure_tp_seed partition_activations_in_checkpoint "
    "set_num_layers"
)
_GRID = "ProcessTopology PipeDataParallelTopology PipeModelDataParallelTopology PipelineParallelGrid"
_OFFLOAD = "OffloadDeviceEnum DeepSpeedZeroOffloadParamConfig DeepSpeedZeroOffloadOptimizerConfig"
_ZERO2 = "estimate_zero2_model_states_mem_needs_all_live estimate_zero2_model_states_mem_needs_all_cold"
_ZERO3 = "estimate_zero3_model_states_mem_needs_all_live estimate_zero3_model_states_mem_needs_all_cold"

PLACES: Mapping[str, str] = {
    "": "initialize init_distributed add_config_arguments DeepSpeedEngine PipelineEngine PipelineModule "
    "DeepSpeedOptimizer DeepSpeedConfig DeepSpeedConfigError DeepSpeedDataLoader get_accelerator log_dist logger "
    "OnDevice checkpointing HAS_TRITON __version__ __version_major__ __version_minor__ __version_patch__ "
    "__git_hash__ __git_branch__ version init_inference InferenceEngine DeepSpeedInferenceConfig "
    "default_inference_config tp_model_init set_autotp_mode DeepSpeedHybridEngine DeepSpeedTransformerLayer "
    "DeepSpeedTransformerConfig",
    "accelerator": "get_accelerator is_current_accelerator_supported",
    "checkpoint.utils": "clone_tensors_for_torch_save",
    "comm": "init_distributed inference_all_reduce",
    "comm.comm": "init_distributed inference_all_reduce",
    "git_version_info": "version torch_info",
    "launcher.runner": "DEEPSPEED_ENVIRONMENT_NAME",
    "moe.layer": "MoE",
    "moe.utils": "split_params_into_different_moe_groups_for_optimizer",
    "ops": "__compatible_ops__",
    "ops.adagrad": "DeepSpeedCPUAdagrad",
    "ops.aio": "",
    "ops.adam": "DeepSpeedCPUAdam FusedAdam",
    "ops.adam.cpu_adam": "DeepSpeedCPUAdam",
    "ops.adam.fused_adam": "FusedAdam",
    "ops.lamb": "FusedLamb",
    "ops.lion": "DeepSpeedCPULion FusedLion",
    "ops.op_builder": "",
    "ops.transformer": "DeepSpeedTransformerLayer DeepSpeedTransformerConfig",
    "pipe": _PIPE,
    "runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "runtime.base_optimizer": "DeepSpeedOptimizer",
    "runtime.config": "DeepSpeedConfig DeepSpeedConfigError",
    "runtime.config_utils": "dict_raise_error_on_duplicate_keys get_scalar_param get_list_param get_dict_param",
    "runtime.dataloader": "DeepSpeedDataLoader RepeatingLoader",
    "runtime.engine": "DeepSpeedEngine",
    "runtime.fp16.onebit": "OnebitAdam OnebitLamb ZeroOneAdam",
    "runtime.lr_schedules": _SCHEDULERS,
    "runtime.pipe": _PIPE,
    "runtime.pipe.engine": "PipelineEngine",
    "runtime.pipe.module": _PIPE,
    "runtime.pipe.schedule": "",
    "runtime.pipe.topology": _GRID,
    "runtime.sequence_parallel.ulysses_sp": "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter",
    "runtime.utils": "clip_grad_norm_ see_memory_usage partition_uniform partition_balanced move_to_device "
    "set_random_seed prefix_sum_inc PartitionedTensor",
    "runtime.zero": _ZERO,
    "runtime.zero.config": f"DeepSpeedZeroConfig ZeroStageEnum get_zero_config {_OFFLOAD}",
    "runtime.zero.leaf_module_config": "DeepSpeedZeroLeafModuleConfig",
    "runtime.zero.mics": "MiCS_Init",
    "runtime.zero.offload_config": _OFFLOAD,
    "runtime.zero.partition_parameters": f"{_ZERO} zero_wrapper_for_fp_tensor_constructor get_accelerator",
    "runtime.zero.stage3": f"DeepSpeedZeroOptimizer_Stage3 unwrap_model_for_generation {_ZERO3}",
    "runtime.zero.stage_1_and_2": f"DeepSpeedZeroOptimizer FP16_DeepSpeedZeroOptimizer {_ZERO2}",
    "runtime.zero.tiling": "TiledLinear TiledLinearReturnBias",
    "sequence.layer": "_SeqAllToAll DistributedAttention",
    "utils": f"logger log_dist OnDevice RepeatingLoader instrument_w_nvtx {_LEAVES} {_SAFE}",
    "utils.groups": "",
    "utils.logging": "logger log_dist",
    "utils.nvtx": "instrument_w_nvtx",
    "utils.tensor_fragment": _SAFE,
    "utils.torch": "required_torch_version",
    "utils.z3_leaf_module": _LEAVES,
    "utils.zero_to_fp32": "get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint "
    "convert_zero_checkpoint_to_fp32_state_dict",
    "zero": _ZERO,
}
"""Module of DeepSpeed -> its names here."""

EVERYTHING_OF: Mapping[str, str] = {
    "comm": "torch.distributed",
    "comm.comm": "torch.distributed",
    "ops.aio": f"{_HERE}.builders",
    "ops.op_builder": f"{_HERE}.builders",
    "runtime.config": f"{_HERE}.constants",
    "runtime.lr_schedules": f"{_HERE}.constants",
    "runtime.pipe.schedule": f"{_HERE}.pipe_schedules",
    "utils.groups": f"{_HERE}.groups",
}
"""Module of DeepSpeed -> a module that has its other names."""

REFUSED: Mapping[str, str] = {
    "the engine has AdamW, Lion and elementwise optimizers of torch: configure one of these.": (
        "FusedLamb OnebitAdam OnebitLamb ZeroOneAdam"
    ),
    'leave it out and configure {"optimizer": {"type": "Lion"}}, which the engine updates on GPU and CPU.': (
        "DeepSpeedCPULion FusedLion"
    ),
    "leave it out and configure an optimizer of the engine, or pass optimizer=torch.optim.Adagrad(...).": (
        "DeepSpeedCPUAdagrad"
    ),
    "ZeRO-3 divides each layer over all processes, so that a large one need not be cut: use torch.nn.Linear.": (
        "TiledLinear TiledLinearReturnBias"
    ),
    "parameters are divided over all processes: use zero.Init.": "MiCS_Init",
    "use torch.distributed.tensor.distribute_tensor with Shard(0).": "PartitionedTensor",
    "gptpar trains; for inference use the module itself, or export it (engine.save_16bit_model) to a server.": (
        "init_inference InferenceEngine DeepSpeedInferenceConfig default_inference_config DeepSpeedHybridEngine"
    ),
    "a module is whole on each process: use ZeRO-3, or `gptpar pretrain` for a GPT with tensor parallelism.": (
        "tp_model_init set_autotp_mode"
    ),
    "use the module's own layers, with torch.compile or the key gptpar.compile.": (
        "DeepSpeedTransformerLayer DeepSpeedTransformerConfig"
    ),
    "there are no experts with processes of their own: a module's own experts train like its other layers.": ("MoE"),
    "sequences are not divided over processes: lower the micro-batch size, and recompute activations.": (
        "_SeqAllToAll DistributedAttention UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter"
    ),
}
"""What a program can do instead -> the names that are refused with it."""
