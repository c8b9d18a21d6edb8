"""Mistakes in the optimizer's update, its numbers, the norm and the schedules."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

DEFINITION = "gptpar/optim/adam_update.py"
SEAM = "gptpar/optim/elementwise.py"
LOOP = "csrc/cpu_adam_loop.h"
INSTRUCTION_SETS = "tests/unit/optim/test_adam_update.py::test_every_instruction_set_computes_the_definition"
ROUNDED = "tests/unit/optim/test_adam_update.py::test_each_operation_is_rounded_by_itself"
ROUNDED_MOMENTS = "tests/unit/optim/test_rounded_states.py"
NUMBERS = "tests/unit/optim/test_adam_update.py::test_numbers_on_the_device_are_those_of_the_host"
TORCH_ADAMW = "tests/unit/engine/test_flat_optimizer.py::test_it_is_torchs_adamw"
GROUPS = "tests/unit/optim/test_parameter_groups.py::test_steps_equal_torchs_with_a_group_for_each_parameter"
PLAIN_LOOP = "tests/unit/run/test_plain_loop.py::test_fifty_steps_follow_a_plain_loop"
DYNAMIC_SCALE = "tests/unit/optim/test_loss_scale.py::test_dynamic_loss_scale_follows_megatron"
SKIP_STEP = "gptpar/optim/skip_step.py"
OUTLIERS = "tests/unit/optim/test_skip_step.py::test_the_rule_is_that_of_its_definition"

UPDATE = [
    Mutation(
        "step-number-off-by-one",
        "gptpar/optim/device_adam.py",
        "AdamStep(*how, int(steps.item()), divisor)",
        "AdamStep(*how, int(steps.item()) + 1, divisor)",
        (TORCH_ADAMW,),
    ),
    Mutation(
        "skipped-step-counted-by-the-bias-correction",
        "gptpar/optim/device_adam.py",
        "steps += 1 - skipped\n        if skipped:",
        "steps += 1\n        if skipped:",
        ("tests/unit/engine/test_optimizer_step.py::test_a_gradient_that_is_not_finite_changes_nothing",),
    ),
    Mutation(
        "step-counted-once-for-each-family",
        "gptpar/engine/flat_optimizer.py",
        "*(self._state.steps.clone() for _",
        "*(self._state.steps for _",
        (GROUPS,),
    ),
    Mutation(
        "family-updated-with-its-neighbours-numbers",
        "gptpar/engine/flat_optimizer.py",
        "kernel.begin_step(hyperparameters[family[0]],",
        "kernel.begin_step(hyperparameters[0],",
        (GROUPS,),
    ),
    Mutation(
        "model-parameters-of-two-dtypes-updated-as-one",
        "gptpar/engine/flat_optimizer.py",
        "if other.dtype != parameters.dtype or not same_storage:",
        "if not same_storage:",
        ("tests/unit/engine/test_flat_optimizer.py::test_neighbours_are_updated_together",),
    ),
    Mutation(
        "launch-reaches-over-another-family",
        "gptpar/engine/flat_optimizer.py",
        "key=lambda one: self._family_of[one.group]",
        "key=lambda one: 0",
        (GROUPS, "tests/unit/engine/test_parameter_groups.py::test_what_lies_together_is_one_launch"),
    ),
    Mutation(
        "first-moment-without-bias-correction",
        DEFINITION,
        "size = how.lr * root / (1 - how.bias_correction * power(how.beta1, step))",
        "size = how.lr * root",
        (NUMBERS,),
    ),
    Mutation(
        "epsilon-outside-the-bias-correction",
        DEFINITION,
        "1 - how.beta2, how.eps * root, size, decay)",
        "1 - how.beta2, how.eps, size, decay)",
        (NUMBERS,),
    ),
    Mutation(
        "clip-factor-without-its-epsilon",
        SEAM,
        "loss_scale * max(1.0, (norm + CLIP_EPS) / max_norm)",
        "loss_scale * max(1.0, norm / max_norm)",
        (NUMBERS,),
    ),
    Mutation(
        "clip-factor-by-the-inverse-of-the-largest-norm",
        SEAM,
        "((norm + CLIP_EPS) / largest).clamp(min=1.0)",
        "((norm + CLIP_EPS) * (1 / largest)).clamp(min=1.0)",
        (NUMBERS,),
    ),
    Mutation(
        "power-by-the-library",
        DEFINITION,
        "root = square_root(one - how.bias_correction * power_of_tensor(how.beta2, step))",
        "root = square_root(one - how.bias_correction * how.beta2.float() ** step.float())",
        (NUMBERS,),
    ),
    Mutation(
        "products-fused-with-sums-by-the-compiler",
        "gptpar/system/native.py",
        '"-pthread", "-ffp-contract=off")',
        '"-pthread", "-ffp-contract=fast")',
        (INSTRUCTION_SETS,),
    ),
    Mutation(
        "second-moment-in-another-association",
        LOOP,
        "V::mul(V::mul(k.rest2, g), g)",
        "V::mul(k.rest2, V::mul(g, g))",
        (INSTRUCTION_SETS,),
    ),
    Mutation(
        "moment-as-a-weighted-sum",
        DEFINITION,
        "m = m + rest1 * (g - m)\n    v =",
        "m = (1 - rest1) * m + rest1 * g\n    v =",
        (INSTRUCTION_SETS,),
    ),
    Mutation(
        "both-moments-rounded-by-one-draw",
        LOOP,
        "V::upper(fresh[j].draws)",
        "V::lower(fresh[j].draws)",
        (f"{ROUNDED_MOMENTS}::test_every_instruction_set_computes_the_definition",),
    ),
    Mutation(
        "moments-rounded-by-the-same-draws-in-each-step",
        "gptpar/optim/rounded_states.py",
        "return mixed_number(step)",
        "return mixed_number(1)",
        (f"{ROUNDED_MOMENTS}::test_the_key_on_the_device_is_that_of_the_host",),
    ),
    Mutation(
        "moments-cut-off",
        "gptpar/optim/rounded_states.py",
        "(wide.view(torch.int32) + draw >> 16)",
        "(wide.view(torch.int32) >> 16)",
        (f"{ROUNDED_MOMENTS}::test_a_number_is_rounded_up_by_as_many_draws_as_its_fraction",),
    ),
    Mutation(
        "denormals-flushed",
        "csrc/ieee_mode.h",
        "kMaskedExceptions = 0x1f80",
        "kMaskedExceptions = 0x9fc0",
        (
            "tests/unit/optim/test_cpu_adam.py::test_flushing_of_denormals_in_the_caller_changes_nothing",
            INSTRUCTION_SETS,
        ),
    ),
    Mutation(
        "ties-of-bf16-rounded-up",
        "csrc/cpu_adam_scalar.h",
        "(bits + 0x7fff + (bits >> 16 & 1)) >> 16",
        "(bits + 0x8000) >> 16",
        ("tests/unit/optim/test_cpu_adam.py::test_low_precision_parameters_are_rounded_as_torch_does",),
    ),
    Mutation(
        "stretch-updated-with-its-neighbours-numbers",
        "csrc/cpu_adam.cpp",
        "const Step& s = steps[piece.of];",
        "const Step& s = steps[0];",
        ("tests/unit/optim/test_cpu_adam.py::test_stretches_are_what_they_would_be_alone",),
    ),
    Mutation(
        "norm-without-the-last-elements",
        "gptpar/optim/grad_norm.py",
        "return torch.cat([rows, torch.linalg.vector_norm(piece[whole:], dtype=wide)[None]])",
        "return rows",
        ("tests/unit/optim/test_gradient_norm.py::test_a_norm_of_any_length_is_exact",),
    ),
    Mutation(
        "norm-keeps-the-loss-scale",
        "gptpar/engine/training_step.py",
        "norm = square.sqrt() / torch.full_like(square, divisor)",
        "norm = square.sqrt()",
        ("tests/unit/engine/test_optimizer_step.py::test_a_loss_scale_beyond_fp16_is_no_overflow",),
    ),
    Mutation(
        "hysteresis-not-restored",
        "gptpar/optim/loss_scale.py",
        "self.good_steps, self.tolerance, self.value = 0, self.hysteresis, self.value * 2",
        "self.good_steps, self.value = 0, self.value * 2",
        (DYNAMIC_SCALE,),
    ),
    Mutation(
        "good-steps-counted-through-an-overflow",
        "gptpar/optim/loss_scale.py",
        "            return\n        self.good_steps = 0\n",
        "            return\n",
        ("tests/unit/optim/test_loss_scale.py::test_good_steps_are_counted_in_a_row",),
    ),
    Mutation(
        "warm-up-forgets-the-initial-rate",
        "gptpar/optim/schedule.py",
        "return self.init_lr + (self.max_lr - self.init_lr) * progress / self.warmup",
        "return self.max_lr * progress / self.warmup",
        ("tests/unit/optim/test_schedule.py::test_cosine_decay_and_initial_rate",),
    ),
    Mutation(
        "outlier-compared-with-a-window-that-holds-it",
        SKIP_STEP,
        "        mean = last.nansum(1) / count\n",
        "        mean = (last.nansum(1) + latest) / (count + 1)\n",
        (OUTLIERS,),
    ),
    Mutation(
        "overflow-enters-the-window-of-outliers",
        SKIP_STEP,
        "torch.where(is_finite, moved, self._values)",
        "torch.where(latest[0].isfinite(), moved, self._values)",
        ("tests/unit/optim/test_skip_step.py::test_what_is_not_finite_does_not_enter_the_window",),
    ),
    Mutation(
        "coupled-decay-forgotten",
        "gptpar/optim/elementwise.py",
        "change(g + decay * p if couples_decay else g, states, numbers)",
        "change(g, states, numbers)",
        ("tests/unit/adapter/test_torch_optimizers.py",),
    ),
    Mutation(
        "steps-of-a-frozen-group-count-on-the-host",
        "gptpar/offload/step_request.py",
        "[step - missed for missed in hyperparameters.missed or [0] * len(groups)]",
        "[step for _ in groups]",
        ("tests/unit/deepspeed/engines/test_frozen_parameters.py",),
    ),
    Mutation(
        "frozen-parameters-count-the-steps-that-they-miss",
        "gptpar/deepspeed/engines/frozen_parameters.py",
        "one._replace(missed=one.missed + one.is_frozen)",
        "one._replace(missed=one.missed)",
        ("tests/unit/deepspeed/engines/test_frozen_parameters.py",),
    ),
    Mutation(
        "a-divided-group-keeps-its-ranges-on-the-host",
        "gptpar/offload/host_optimizer.py",
        "        self.shared.regroup(partitions)\n",
        "",
        ("tests/unit/deepspeed/engines/test_frozen_parameters.py",),
    ),
    Mutation(
        "another-engines-pass-adds-to-shown-gradients",
        "gptpar/deepspeed/engines/engine.py",
        "if self._grads is not None and self._grads.are_shown:\n            self._grads.hide()\n            BACK",
        "if False:\n            assert self._grads is not None\n            BACK",
        ("tests/any_module/test_two_engines.py::test_joint_loss",),
    ),
    Mutation(
        "outlier-lowers-the-loss-scale",
        "gptpar/deepspeed/engines/training_engine.py",
        "self.loss_scaler.update(self._skipped == NOT_FINITE)",
        "self.loss_scaler.update(bool(self._skipped))",
        ("tests/unit/deepspeed/engines/test_getters.py::test_an_outlier_is_not_applied_and_no_overflow",),
    ),
    Mutation(
        "replicas-compared-by-a-sum-without-positions",
        "gptpar/run/health/replicas.py",
        "low = 2 * (first + start) + 1",
        "low = 2 * first + 1",
        ("tests/unit/run/test_replicas.py::test_halves_add_up_to_the_whole",),
    ),
]
