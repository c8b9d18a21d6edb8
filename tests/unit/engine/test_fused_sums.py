"""Products that add to the gradient sums: the same numbers as gradients that are added afterwards."""

import gc
import weakref
from collections.abc import Sequence
from unittest import mock

import pytest
import torch

from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from gptpar.engine import fused_sums
from gptpar.engine.collector import GradientCollector
from gptpar.errors import ConfigError
from gptpar.model.block import MLP, Block
from gptpar.run.trainer import Trainer
from gptpar.tensor_parallel.layers import SplitLinear
from tests.helpers import TINY, make_trainer, tiny_config
from tests.unit.engine.tiny_steps import forward_backward, update, weights_of

FUSED = "--gradient-accumulation-fusion"
LLAMA = "--swiglu --position-embedding-type rope --normalization RMSNorm --disable-bias-linear --num-query-groups 2"
STEPS = ((3, 16), (1, 16), (2, 12))
"""Of each step: number of micro-batches, tokens of a sample. In the second one nothing is added."""
ONE = ((1, 16), (1, 12))


def linears_of(trainer: Trainer) -> list[SplitLinear]:
    modules = (module for stage in trainer.pipeline.stages_here for module in stage.modules())
    return [module for module in modules if isinstance(module, SplitLinear)]


def trained(flags: str, steps: Sequence[tuple[int, int]] = STEPS, backend: str = "") -> list[dict[str, torch.Tensor]]:
    """After each step: the gradient sums by parameter, as far as the device has them, and the master weights."""
    trainer = make_trainer(tiny_config(f"--global-batch-size 6 --clip-grad 0.5 --adam-eps 1e-6 {flags}"))
    for layer in trainer.pipeline.stages_here[0].layers:
        if backend and isinstance(layer, Block):
            layer.compile(backend=backend)
    found, sums = [], trainer.engine.gradients.memory
    for number, (count, length) in enumerate(steps):
        loss = forward_backward(trainer, number, count, length)
        views = [sums.views_of(unit) for unit in trainer.engine.table.units if unit in sums.undivided]
        scale = trainer.loss_scale.value
        gradients = {f"gradient of {name}": view / scale for one in views for name, view in one.items()}
        update(trainer, loss, number, count)
        found.append(gradients | weights_of(trainer))
        adds = FUSED in flags and count > 1
        assert all((linear.gradient_sum is not None) == adds for linear in linears_of(trainer))
    trainer.close()
    return found


def assert_same(found: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]], rtol: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert (one[name] - value).norm() <= rtol * value.norm(), name


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--fp64", id="GPT-2"),
        pytest.param(f"--fp64 {LLAMA} --untie-embeddings-and-output-weights", id="Llama"),
        pytest.param(
            "--fp64 --norm-placement post --disable-bias-linear", id="no parameter comes after the first product"
        ),
        pytest.param("--fp64 --cpu-optimizer --cpu-optimizer-ratio 0.6", id="CPU optimizer", marks=pytest.mark.slow),
        pytest.param("--fp64 --recompute-granularity full", id="recomputed"),
        pytest.param(
            "--fp64 --recompute-granularity selective --recompute-modules mlp_act layernorm",
            id="activation recomputed",
            marks=pytest.mark.slow,
        ),
        pytest.param("--fp64 --mlp-chunks-for-training 2", id="MLP in tiles", marks=pytest.mark.slow),
    ],
)
def test_every_gradient_and_weight_is_that_of_gradients_added_afterwards(flags: str) -> None:
    """Steps of three, one and two micro-batches, clipped, each from other tokens: nothing of a step before remains."""
    assert_same(trained(f"{flags} {FUSED}"), trained(flags), 1e-12)


def test_sums_are_nearer_to_the_exact_ones() -> None:
    """The products of 16-bit factors are not rounded before they are added."""
    (exact,) = trained("--fp64", STEPS[:1])
    names = [name for name in exact if name.endswith(("qkv.weight", "up.weight"))]
    for flags, most in (("", 1.5), ("--bf16", 1.0), ("--fp16 --loss-scale 1024", 1.0)):
        (plain,), (fused,) = (trained(more, STEPS[:1]) for more in (flags, f"{flags} {FUSED}"))
        off_plain, off_fused = (
            sum(float((one[name] - exact[name]).norm() / exact[name].norm()) for name in names)
            for one in (plain, fused)
        )
        assert off_fused < most * off_plain < 0.5


AGAIN = "--recompute-granularity selective --recompute-modules mlp_act"
PLACED = [
    (AGAIN, STEPS),
    (f"--fp64 {AGAIN} layernorm", STEPS),
    (f"--bf16 --global-batch-size 2 {AGAIN} {LLAMA}", ONE),
    ("--bf16 --global-batch-size 2 --mlp-chunks-for-training 2", ONE),
    (f"--fp16 --loss-scale 1024 --global-batch-size 2 --cpu-optimizer --cpu-optimizer-ratio 0.6 {AGAIN}", ONE),
    (f"--bf16 --cpu-optimizer --offload-gradients on {AGAIN} {LLAMA}", STEPS),
    (f"--bf16 --cpu-optimizer --offload-gradients on --cpu-parameters {AGAIN}", STEPS),
]


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each gradient that is formed: whether it is in its place."""
    place_of, found = GradientCollector.place_of, list[bool]()

    def noted(self: GradientCollector, name: str) -> torch.Tensor | None:
        place = place_of(self, name)
        found.append(place is not None)
        return place

    monkeypatch.setattr(GradientCollector, "place_of", noted)
    return found


def assert_places_change_no_bit(flags: str, steps: Sequence[tuple[int, int]]) -> None:
    expected = trained(flags, steps)
    with mock.patch.object(fused_sums, "MIN_ELEMENTS", 0):
        assert_same(trained(flags, steps), expected, 0.0)


@pytest.mark.parametrize("flags, steps", PLACED)
def test_a_gradient_that_is_formed_in_its_place_has_the_same_bits(
    flags: str, steps: Sequence[tuple[int, int]], placed: list[bool]
) -> None:
    """In fp32 and fp64, a sum over several micro-batches begins with such a gradient; the others are added."""
    assert_places_change_no_bit(flags, steps)
    passes = sum(count for count, _ in steps) if "16" in flags else len(steps)
    assert placed.count(True) == passes * 2  # of each block the weight that follows the activation function


def test_of_two_gradients_in_a_pass_one_is_formed_in_its_place(
    placed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a weight that is used twice: autograd adds up both, and the collector copies the sum."""
    once = MLP.forward
    monkeypatch.setattr(MLP, "forward", lambda self, x_ND: once(self, x_ND) + once(self, x_ND * 2))
    assert_places_change_no_bit(f"--bf16 --global-batch-size 2 {AGAIN}", ONE)
    assert placed.count(False) == 2 * len(ONE)  # a weight of two blocks


def test_outside_of_a_pass_no_gradient_has_a_place() -> None:
    trainer = make_trainer(tiny_config("--bf16 --global-batch-size 2"))
    gradients = trainer.engine.gradients
    assert all(gradients.place_of(name) is None for unit in trainer.engine.table.units for name in unit.params)


@pytest.mark.slow
def test_a_compiled_block_computes_the_same_and_recompiles_for_no_micro_batch() -> None:
    torch._dynamo.reset()
    flags, steps = f"--fp64 {LLAMA} {FUSED}", ((2, 16), (2, 16))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled = trained(flags, steps, backend="aot_eager")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 1  # the two blocks share it
    assert_same(compiled, trained(flags, steps), 1e-12)


@pytest.mark.parametrize("flags", ["--bf16", "--cpu-optimizer"])
def test_a_closed_trainer_leaves_no_memory(flags: str) -> None:
    """A layer, its scalar, the scalar's hook, and from there the layer again: autograd hides a part of this cycle."""
    trainer = make_trainer(tiny_config(f"--global-batch-size 4 {flags} {FUSED}"))
    forward_backward(trainer, 0, 2)
    trainer.close()
    sums, layer = weakref.ref(trainer.engine.gradients.memory), weakref.ref(linears_of(trainer)[0])
    del trainer
    gc.collect()
    assert sums() is layer() is None


@pytest.mark.parametrize(
    "flags, world_size, message",
    [
        ("--global-batch-size 2", 1, "a step of 2 samples is one micro-batch of each process, so that there is no sum"),
        ("", 2, "a step of 4 samples is one micro-batch of each process, so that there is no sum"),
        ("--global-batch-size 8 --zero-stage 2", 2, "--zero-stage 2 sums each micro-batch's gradient over processes"),
        ("--global-batch-size 8 --zero-stage 3", 2, "--zero-stage 3 sums each micro-batch's gradient over processes"),
        (
            "--global-batch-size 8 --cpu-optimizer --offload-gradients on",
            1,
            "--offload-gradients on: --gradient-accumulation-fusion adds to sums on the GPU",
        ),
    ],
)
def test_where_there_is_no_sum_to_add_to_it_is_refused(flags: str, world_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(parse_flags(f"{TINY} {FUSED} {flags}".split()), world_size)
