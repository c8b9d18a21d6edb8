"""What layers say they cost, against torch's count of FLOPs, against what autograd keeps, and as published."""

import math
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from gptpar.config.flags import parse_flags
from gptpar.config.validate import complete, resolve
from gptpar.model.block import Block
from gptpar.model.experts.dispatch import ALL_EXPERTS, LIMIT, ExpertAxis
from gptpar.model.gpt import gpt_model
from gptpar.pipeline.stage import Stage
from gptpar.plan.hardware import peak_flops
from gptpar.tensor_parallel import ALONE, TensorAxis
from gptpar.tensor_parallel.cost import BatchShape
from gptpar.tensor_parallel.cross_entropy import CHUNK_BYTES
from tests.helpers import tiny_config
from tests.unit.plan.plans import pretended_world

NONE, ROPE, ALIBI = (f"--position-embedding-type {kind} " for kind in ("none", "rope", "alibi"))
WIDTH_NORM = "--qk-layernorm --qk-layernorm-scope width --normalization RMSNorm --disable-bias-linear "
LLAMA = ROPE + "--swiglu --disable-bias-linear --normalization RMSNorm "
GATE = "--attention-output-gate "
EXPERTS = NONE + "--disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 24 "
SHARED = "--moe-shared-expert-intermediate-size 8 "
TOKENS, LENGTH, H, HEADS = 32, 16, 32, 4


# --- FLOPs ----------------------------------------------------------------------------------------------------------

OPS = torch.ops.gptpar


def two_products(grad: Any, x: Any, weight: Any, *_: Any, **__: Any) -> int:
    """Of the backward pass: the gradients of input and weight."""
    tokens = max(grad[0], x[0])  # under sequence parallelism one of both has this rank's alone
    return 4 * tokens * math.prod(weight)


def tiled_backward(grad: Any, x: Any, up: Any, bias: Any, down: Any, *_: Any, **__: Any) -> int:
    """The first product again, and four for gradients."""
    return 2 * x[0] * (3 * math.prod(up) + 2 * math.prod(down))


COUNTED = {
    OPS.column_forward: lambda x, weight, *_, out_shape, **__: 2 * out_shape[0] * math.prod(weight),
    **dict.fromkeys((OPS.row_forward, OPS.activated_row), lambda x, weight, *_, **__: 2 * x[0] * math.prod(weight)),
    **dict.fromkeys((OPS.column_backward, OPS.row_backward, OPS.activated_row_backward), two_products),
    OPS.tiled_mlp: lambda x, up, bias, down, *_, **__: 2 * x[0] * (math.prod(up) + math.prod(down)),
    OPS.tiled_mlp_backward: tiled_backward,
}


@pytest.fixture(autouse=True)
def _some_chunks_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is allocated: the model is on the meta device."""
    monkeypatch.setitem(CHUNK_BYTES, "meta", CHUNK_BYTES["cpu"])


def counted(
    flags: str, axis: TensorAxis = ALONE, modules: tuple[str, ...] = (), mlp_tiles: int = 1
) -> tuple[float, float, float]:
    """Of a micro-batch on a rank, by torch: FLOPs of products with weights, FLOPs of attention; and what layers say."""
    model = gpt_model(tiny_config(flags).model, axis, recompute_modules=frozenset(modules), mlp_tiles=mlp_tiles)
    stage, tokens = Stage(model.specs), torch.zeros(2, LENGTH, dtype=torch.long, device="meta")
    counter = FlopCounterMode(display=False, custom_mapping=COUNTED)
    with counter, sdpa_kernel(SDPBackend.MATH):
        stage(tokens, {"labels": tokens, "seq_length": LENGTH}).backward()
    counts = counter.get_flop_counts()["Global"]
    attention = float(sum(count for op, count in counts.items() if "bmm" in str(op)))
    again = sum(part.flops - part.attention for cost in model.costs(SHAPE) for part in cost.again)
    products = [cost.flops - cost.attention for cost in model.costs(SHAPE)]
    return counter.get_total_flops() - attention, attention, TOKENS * (3 * sum(products) + again)


SHAPE = BatchShape(TOKENS, LENGTH, torch.float32, "cpu")
DOCUMENTS = (3, 1, 12, 16)


@pytest.mark.parametrize(
    "flags",
    [
        LLAMA,
        "--mlp-activation geglu --untie-embeddings-and-output-weights --num-query-groups 2 --kv-channels 12",
        WIDTH_NORM + GATE + ROPE,
    ],
)
def test_flops_are_those_that_torch_counts(flags: str) -> None:
    model = gpt_model(tiny_config(flags).model)
    products, attention, declared = counted(flags)
    assert products == declared
    assert attention == TOKENS * 6 * sum(cost.attention for cost in model.costs(SHAPE))  # twice the causal half
    assert products + attention == TOKENS * model.flops_per_token(causal=False)
    assert products + attention / 2 == TOKENS * model.flops_per_token(causal=True) == TOKENS * 3 * sum(model.flops)


def test_flops_of_windows() -> None:
    """Where no kernel computes a window, a mask saves nothing: torch counts the square, and so does ``masked``."""
    costs = gpt_model(tiny_config("--window-size 4 --window-pattern SF").model).costs(SHAPE)
    _, attention, _ = counted("--window-size 4 --window-pattern SF")
    windowed, full = (cost for cost in costs if cost.attention)
    assert windowed.attention == 4 * H * (4 - 4 * 4 / (2 * LENGTH)) and full.attention == 4 * H * LENGTH / 2
    assert windowed.attention + windowed.masked == 2 * full.attention and full.masked == 0
    assert attention == TOKENS * 3 * (windowed.attention + windowed.masked + 2 * full.attention)


@pytest.mark.parametrize(
    ("flags", "size", "sequence_parallel"),
    [
        (LLAMA + GATE + "--num-query-groups 2", 2, True),
        pytest.param("", 4, False, marks=pytest.mark.slow),
    ],
)
def test_flops_of_a_tensor_rank(flags: str, size: int, sequence_parallel: bool) -> None:
    with pretended_world(0, size):
        axis = TensorAxis(size, 0, dist.group.WORLD, sequence_parallel)
        products, attention, declared = counted(flags, axis)
    assert products == declared
    whole, whole_attention, _ = counted(flags)
    assert products == whole / size and attention == whole_attention / size


@pytest.mark.parametrize(
    ("flags", "modules", "tiles"),
    [
        pytest.param("", ("mlp_act",), 1, marks=pytest.mark.slow),
        ("", ("core_attn", "mlp", "layernorm"), 1),
        ("--swiglu", (), 3),
    ],
)
def test_flops_of_what_is_computed_again(flags: str, modules: tuple[str, ...], tiles: int) -> None:
    products, attention, declared = counted(flags, modules=modules, mlp_tiles=tiles)
    once, once_attention, _ = counted(flags)
    assert products == declared and (products > once) == (tiles > 1 or "mlp" in modules)
    # Torch counts a kernel that is made of two products; of these, only the first is needed again.
    assert attention == once_attention * (7 / 6 if "core_attn" in modules else 1)


@pytest.mark.parametrize(
    "flags", ["", "--swiglu --moe-router-topk 3", SHARED + "--moe-shared-expert-gate --moe-router-topk 1"]
)
def test_flops_of_experts(flags: str) -> None:
    """Those of the experts to which a token goes, and of the router; each expert's own product, on the CPU."""
    flags = EXPERTS + "--moe-router-pre-softmax --num-layers 1 " + flags
    block = Block(tiny_config(flags).model, experts=ALL_EXPERTS, recompute_modules=frozenset({"mlp"}))
    for parameter in block.parameters():
        parameter.data.normal_()
    counter, x = FlopCounterMode(display=False), torch.randn(TOKENS, H, requires_grad=True)
    with counter, sdpa_kernel(SDPBackend.MATH):
        block(x, None, None, LENGTH).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    products = counter.get_total_flops() - sum(count for op, count in counts.items() if "bmm" in str(op))
    cost = block.cost(SHAPE)
    again = sum(part.flops - part.attention for part in cost.again)
    assert products == TOKENS * (3 * (cost.flops - cost.attention) + again)


@pytest.mark.parametrize(("size", "sent", "places"), [(2, 1, 0), (4, 3 * 7 / 16, 8 * 3 * 7 / 16 + 9 * 4)])
def test_what_the_exchange_of_tokens_costs(size: int, sent: float, places: float) -> None:
    """A token goes to other ranks where one of its two experts is, or to all; one vector comes back from each."""
    config, batch = tiny_config(EXPERTS).model, BatchShape(TOKENS, LENGTH, torch.float32)
    one, more = (Block(config, experts=ExpertAxis(number)).mlp.cost(batch) for number in (1, size))
    assert (one.exchanged, more.exchanged) == (0, 2 * sent * config.hidden_size)
    places += 2 * (9 * (1 + sent) - 8)
    assert (more.kept - one.kept, more.products) == (places + 2 * 4 * sent, one.products)
    assert more.workspace / one.workspace == (2 + 1 + (1 if size == 2 else 2) * sent) / 2


def test_recorded_steps_have_room_for_more_rows_than_the_mean() -> None:
    """Where other ranks send tokens: copies of them and both products' outputs; numbers of the products stay."""
    config, batch = tiny_config(EXPERTS).model, BatchShape(TOKENS, LENGTH, torch.float32)
    alone, split = (Block(config, experts=ExpertAxis(number)).mlp for number in (1, 2))
    recorded = batch._replace(recorded=True)
    assert alone.cost(recorded) == alone.cost(batch)
    one, more, of_row = split.cost(batch), split.cost(recorded), 2 * config.hidden_size + 2 * 24
    assert more.kept - one.kept == (LIMIT - 1) * 2 * of_row * 4
    assert (more.products, more.exchanged) == (one.products, one.exchanged)


# --- bytes ----------------------------------------------------------------------------------------------------------


def declared(flags: str, **options: Any) -> float:
    """Bytes that a block says it keeps of a token."""
    lengths = DOCUMENTS if options.pop("documents", False) else None
    with torch.device("meta"):
        block = Block(tiny_config(flags).model, options.pop("axis", ALONE), **options)
    return block.cost(SHAPE._replace(document_lengths=lengths)).kept


def measured(flags: str, *, compiled: bool = False, documents: bool = False, **options: Any) -> float:
    """Bytes that a block really keeps of a token, its parameters aside."""
    block: nn.Module = Block(tiny_config(flags).model, **options)
    cu_seqlens = torch.tensor([0, *accumulate(DOCUMENTS)], dtype=torch.int32) if documents else None
    others = [*block.parameters(), *([] if cu_seqlens is None else [cu_seqlens])]  # all layers have the same documents
    weights = {tensor.untyped_storage().data_ptr() for tensor in others}
    for parameter in block.parameters():
        parameter.data.normal_()
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # holding it keeps its address its own
        return tensor

    if compiled:  # the choice of what is kept, without code
        torch._dynamo.reset()
        block = torch.compile(block, backend="aot_eager_decomp_partition", dynamic=False)  # type: ignore[assignment]
    x = torch.randn(TOKENS, H, requires_grad=True)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x, None, cu_seqlens, LENGTH)
    return sum(size for size, _ in kept.values()) / TOKENS


def modules(*names: str) -> dict[str, Any]:
    return {"recompute_modules": frozenset(names)}


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        (NONE, {}),
        (NONE, modules("mlp")),
        (NONE, modules("core_attn", "mlp")),
        (NONE, modules("mlp_act")),
        (NONE + "--swiglu --disable-bias-linear", modules("mlp_act")),
        (NONE + "--swiglu", {"mlp_tiles": 4, **modules("mlp", "mlp_act")}),
        (NONE + GATE, modules("core_attn")),
        (NONE + "--norm-placement peri", {}),
        (NONE + "--use-parallel-residual", {}),
        (ROPE, modules("core_attn")),
        (ALIBI + GATE, {}),
        (NONE, {"documents": True, "window": 4, **modules("mlp")}),
        (EXPERTS, {"experts": ALL_EXPERTS}),
        (EXPERTS + "--moe-router-topk 3", {"experts": ALL_EXPERTS, **modules("mlp")}),
        (EXPERTS + SHARED + "--moe-shared-expert-gate", {"experts": ALL_EXPERTS}),
        (ROPE, {"documents": True, **modules("core_attn")}),
        (ALIBI, {"documents": True}),
    ],
)
def test_a_block_keeps_what_it_says(flags: str, options: dict[str, Any]) -> None:
    assert measured(flags, **options) == declared(flags, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "options"),
    [
        (LLAMA + "--num-query-groups 2", {}),
        (LLAMA, modules("mlp")),
        (ROPE + WIDTH_NORM, {}),
        (LLAMA, modules("layernorm", "mlp_act")),
    ],
)
def test_a_compiled_block_keeps_what_it_says(flags: str, options: dict[str, Any]) -> None:
    """A compiler may compute one of the four statistics of norms again."""
    assert measured(flags, compiled=True, **options) == pytest.approx(declared(flags, **options), rel=3e-3)


@pytest.mark.parametrize(
    ("size", "sequence_parallel", "per_hidden"),
    [(1, False, 34), (2, False, 10 + 24 / 2), (4, False, 10 + 24 / 4), (2, True, 34 / 2), (4, True, 34 / 4)],
)
def test_a_block_keeps_what_the_paper_says(size: int, sequence_parallel: bool, per_hidden: float) -> None:
    """Korthikanti et al. 2022, arXiv 2205.05198; without the norms' statistics and attention's log-sums."""
    axis = TensorAxis(size, sequence_parallel=sequence_parallel)
    with torch.device("meta"):
        block = Block(tiny_config("--hidden-dropout 0.1").model, axis)
    kept = block.cost(SHAPE._replace(dtype=torch.bfloat16)).kept
    statistics = 2 * 2 * 4 / axis.token_splits + 4 * HEADS / size
    assert kept - statistics == per_hidden * H


# --- Counts of parameters and FLOPs that others have published, and the peaks of devices ----------------------------


def test_llama3_8b_matches_both_published_conventions() -> None:
    words = "--preset 8B --vocab-size 128256 --pad-vocab-size-to 128256 --micro-batch-size 1 --mock-data"
    flags = parse_flags(f"{words} --train-iters 1 --lr 1 --eval-iters 0".split())
    llama = gpt_model(complete(resolve(flags, 1)[0]).model)
    assert 13_812 * llama.flops_per_token(causal=False) / 1e12 == pytest.approx(800, abs=1)
    assert 14_451 * llama.flops_per_token(causal=True) / 1e12 == pytest.approx(744, abs=1)


def test_peak_of_known_devices() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", "bf16") == 989e12
    assert peak_flops("NVIDIA H100 PCIe", "bf16") == 756e12
    assert peak_flops("NVIDIA H200", "tf32") == 494.5e12
    assert peak_flops("Tesla V100-SXM2-16GB", "fp16") == 125e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp32") == 19.5e12
