"""Mistakes in the model's options, in its loss and in its parameter groups."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

OPTIONS_TESTS = ("tests/unit/model/test_options.py",)
FAMILY_TESTS = ("tests/unit/model/test_families.py",)
TENSOR_TESTS = ("tests/ranks/test_tensor_parallel.py",)
FUSED_GRADIENT_TESTS = ("tests/unit/kernels/test_fused_gradients.py",)
SINK_TESTS = ("tests/unit/model/test_attention_sinks.py",)
DOCUMENT_TESTS = ("tests/unit/model/test_document_attention.py",)
LOADER_TESTS = ("tests/unit/data/test_loader.py", "tests/unit/data/test_documents.py")
GROUP_TESTS = ("tests/unit/optim/test_parameter_groups.py",)

MODEL_OPTIONS = [
    Mutation(
        "ramp-of-yarn-from-the-slow-end",
        "gptpar/model/rotary.py",
        "for turns in reversed(self.turns)",
        "for turns in self.turns",
        FAMILY_TESTS,
    ),
    Mutation(
        "queries-and-keys-of-yarn-as-small-as-before",
        "gptpar/model/rotary.py",
        "    if rotary.amplitude != 1:",
        "    if rotary.amplitude != rotary.amplitude:",
        FAMILY_TESTS,
    ),
    Mutation(
        "dynamic-positions-stretch-from-no-length",
        "gptpar/model/rotary.py",
        "self.factor * self.length / self.context - (self.factor - 1)",
        "self.factor * self.length / self.context",
        FAMILY_TESTS,
    ),
    Mutation(
        "layers-without-positions-counted-from-one",
        "gptpar/model/attention.py",
        'return pattern[layer % len(pattern)] == "R"',
        'return pattern[(layer + 1) % len(pattern)] == "R"',
        FAMILY_TESTS,
    ),
    Mutation(
        "rest-of-equal-pieces-fills-no-pack",
        "gptpar/data/packing.py",
        "keep(room - (end - first) * size, numbers[whole : whole + 1])",
        "keep(room, numbers[whole : whole + 1])",
        ("tests/unit/data/test_packing.py",),
    ),
    Mutation(
        "norm-of-all-heads-of-this-rank-alone",
        "gptpar/model/norm.py",
        "    if axis.size > 1:\n        squares_2BS",
        "    if axis.size > 9:\n        squares_2BS",
        TENSOR_TESTS,
    ),
    Mutation(
        "squares-of-all-heads-are-not-summed-backward",
        "gptpar/tensor_parallel/linear_ops.py",
        "    return sum_over_ranks(grad, ctx.group), None",
        "    return grad, None",
        TENSOR_TESTS,
    ),
    Mutation(
        "parallel-mlp-reads-the-sum",
        "gptpar/model/block.py",
        'normed_ND = self._run("layernorm", self.mlp_norm, x_ND)\n            x_ND = x_ND + attended_ND',
        'x_ND = x_ND + attended_ND\n            normed_ND = self._run("layernorm", self.mlp_norm, x_ND)',
        (*OPTIONS_TESTS, *FAMILY_TESTS),
    ),
    Mutation(
        "bias-before-a-post-norm-gets-the-streams-gradient",
        "gptpar/model/block.py",
        "adds = added_ND is not None and self.attention_post_norm is None",
        "adds = added_ND is not None",
        OPTIONS_TESTS,
    ),
    Mutation(
        "mlps-bias-without-a-gradient",
        "gptpar/model/linear.py",
        "            case Reader.END:\n                return self.output_norm",
        "            case Reader.END:\n                return self.output_norm or self.residual_norm",
        ("tests/unit/model/test_linear.py",),
    ),
    Mutation(
        "gradient-of-heads-norms-keeps-its-mean",
        "gptpar/kernels/head_norm.py",
        "change - scaled.mean(-1, keepdim=True)",
        "change",
        FUSED_GRADIENT_TESTS,
    ),
    Mutation(
        "gates-gradient-in-place-of-the-values",
        "gptpar/kernels/head_norm.py",
        "parts.append(gate.unflatten(1, (groups, -1)))",
        "parts.insert(2, gate.unflatten(1, (groups, -1)))",
        FUSED_GRADIENT_TESTS,
    ),
    Mutation(
        "window-one-token-too-wide",
        "gptpar/model/core_attention.py",
        "causal_SS.triu(1 - window)",
        "causal_SS.triu(-window)",
        (*OPTIONS_TESTS, *FAMILY_TESTS),
    ),
    Mutation(
        "documents-end-before-their-last-token",
        "gptpar/data/documents.py",
        "    follows_end[:, 1:] = ends_BS[:, :-1]\n",
        "    follows_end[:, :] = ends_BS\n",
        LOADER_TESTS,
    ),
    Mutation(
        "padding-joins-the-document-before",
        "gptpar/data/documents.py",
        "~(empty_BS & follow_ends(empty_BS))",
        "~empty_BS",
        LOADER_TESTS,
    ),
    Mutation(
        "a-sample-goes-on-with-the-document-before",
        "gptpar/data/documents.py",
        "    starts_BS = starts_BS.copy()\n    starts_BS[:, 0] = True\n",
        "    starts_BS = starts_BS.copy()\n    starts_BS[0, 0] = True\n",
        LOADER_TESTS,
    ),
    Mutation(
        "window-lost-inside-documents",
        "gptpar/model/core_attention.py",
        "core_attention(q, k, v, None, None, window, scale, sinks_H) for",
        "core_attention(q, k, v, None, None, None, scale, sinks_H) for",
        DOCUMENT_TESTS,
    ),
    Mutation(
        "kernel-for-documents-sees-one-token-too-many",
        "gptpar/model/varlen_attention.py",
        "-1 if window is None else window - 1",
        "-1 if window is None else window",
        DOCUMENT_TESTS,
    ),
    Mutation(
        "gradient-of-a-sink-with-the-wrong-sign",
        "gptpar/model/attention_sinks.py",
        "d_sinks_H = -(shares_HN",
        "d_sinks_H = (shares_HN",
        SINK_TESTS,
    ),
    Mutation(
        "backward-of-attention-without-its-sink",
        "gptpar/model/attention_sinks.py",
        "return y_NHK, total_HN\n\n\n@torch",
        "return y_NHK, lse_HN\n\n\n@torch",
        SINK_TESTS,
    ),
    Mutation(
        "sinks-of-the-first-heads-on-every-context-rank",
        "gptpar/model/head_exchange.py",
        "sinks_H.unflatten(0, (parts, -1))[place]",
        "sinks_H.unflatten(0, (parts, -1))[0]",
        ("tests/ranks/test_experts.py",),
    ),
    Mutation(
        "value-clamped-from-above-alone",
        "gptpar/model/activations.py",
        "value_NF.clamp(-limit, limit)",
        "value_NF.clamp(max=limit)",
        ("tests/unit/model/test_experts.py",),
    ),
    Mutation(
        "gate-without-its-sigmoid",
        "gptpar/model/attention.py",
        "y_BHSK * gate_BHSK.sigmoid()",
        "y_BHSK * gate_BHSK",
        OPTIONS_TESTS,
    ),
    Mutation(
        "z-loss-without-its-gradient",
        "gptpar/kernels/plain_loss.py",
        "(1 + 2 * terms.z_weight * lse_N)",
        "(1 + terms.z_weight * lse_N)",
        FUSED_GRADIENT_TESTS,
    ),
    Mutation(
        "capped-logits-gradient-of-the-uncapped",
        "gptpar/kernels/plain_loss.py",
        "grad_NV * (1 - (wide_NV / terms.softcap).square())",
        "grad_NV * 1",
        FUSED_GRADIENT_TESTS,
    ),
    Mutation(
        "padding-in-the-softmax",
        "gptpar/kernels/plain_loss.py",
        "logits_NV[:, :num_valid].to(dtype)",
        "logits_NV.to(dtype)",
        FUSED_GRADIENT_TESTS,
    ),
    Mutation(
        "z-loss-in-evaluations",
        "gptpar/model/embedding_and_head.py",
        "logits.terms if trains else logits.terms._replace(z_weight=0.0)",
        "logits.terms",
        ("tests/unit/model/test_parts.py",),
    ),
    Mutation(
        "first-override-counts",
        "gptpar/optim/parameter_groups.py",
        "in reversed(overrides) if",
        "in overrides if",
        GROUP_TESTS,
    ),
    Mutation(
        "override-of-the-rate-scales-the-decay",
        "gptpar/optim/parameter_groups.py",
        "weight_decay * one.weight_decay)",
        "weight_decay * one.weight_decay * one.lr)",
        GROUP_TESTS,
    ),
    Mutation(
        "mup-without-learning-rates",
        "gptpar/model/mup.py",
        "return 1 / width_ratio(config) ** growth if in_block and is_matrix else 1.0",
        "return 1.0",
        OPTIONS_TESTS,
    ),
    Mutation(
        "mup-divides-the-deviation-by-the-ratio",
        "gptpar/model/mup.py",
        "config.init_method_std / width_ratio(config) ** 0.5",
        "config.init_method_std / width_ratio(config)",
        OPTIONS_TESTS,
    ),
    Mutation(
        "qwen3-with-heads-of-hidden-over-heads",
        "gptpar/model/families/qwen3.py",
        'config.size("head_dim", 128)',
        'config["hidden_size"] // config["num_attention_heads"]',
        FAMILY_TESTS,
    ),
]
