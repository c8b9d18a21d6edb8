"""A model of two kinds of blocks: MFU, the division into stages, memory and time add up what each block says."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from gptpar.config import ModelConfig
from gptpar.config.roles import Role
from gptpar.model import gpt
from gptpar.model.layer_spec import LayerSpec
from gptpar.model.spec import ModelLayer, ModelSpec
from gptpar.plan import job as plan_job
from gptpar.plan import layers as plan_layers
from gptpar.plan.planner import Plan
from gptpar.tensor_parallel import ALONE, TensorAxis
from tests.unit.plan.plans import CALM, OFFLOAD, plan

H, NARROW, MIXED, WIDE = 512, 2048, 4096, 8192
"""Model width, and widths of MLPs. In the mixed model, the first two of six blocks have the wide one, the others the
narrow one."""
FLAGS = CALM + (
    f"--num-layers 6 --hidden-size {H} --num-attention-heads 4 --seq-length 256 --vocab-size 128 --micro-batch-size 2 "
)
PIPED = "--world-size 2 --pipeline-model-parallel-size 2 --global-batch-size 8 --pipeline-partition-method "


def described(config: ModelConfig, axis: TensorAxis = ALONE, **options: Any) -> ModelSpec:
    """A GPT; the mixed one, if its configuration has that width."""

    def changed(layer: ModelLayer) -> ModelLayer:
        old = layer.spec
        if layer.role is not Role.BLOCK or config.ffn_hidden_size != MIXED:
            return layer
        own = replace(config, ffn_hidden_size=WIDE if old.name in ("layers.0", "layers.1") else NARROW)
        spec = LayerSpec(old.cls, own, *old.args[1:], name=old.name, batch_fields=old.batch_fields, **old.kwargs)
        return replace(layer, spec=spec)

    model = gpt.gpt_model(config, axis, **options)
    return replace(model, layers=tuple(map(changed, model.layers)))


@pytest.fixture(autouse=True)
def _mixed_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Descriptions are cached by configuration."""
    monkeypatch.setattr(plan_layers, "gpt_model", described)
    _forget()
    yield
    _forget()


def _forget() -> None:
    for cache in (plan_layers.model_of, plan_layers.layers_of, plan_job.split_of_model):
        cache.cache_clear()


def mixed(flags: str = "") -> Plan:
    """A plan of the mixed model."""
    return of_kind(MIXED, flags)


def of_kind(width: int, flags: str = "") -> Plan:
    """A plan of the model whose blocks have one width."""
    return plan(f"{FLAGS} --ffn-hidden-size {width} {flags}")


@pytest.mark.parametrize(
    "flags", ["--recompute-granularity selective --recompute-modules mlp ", OFFLOAD + "0.5 --cuda-graph off"]
)
def test_memory_and_time_are_sums_over_blocks(flags: str) -> None:
    found, narrow, wide = mixed(flags), of_kind(NARROW, flags), of_kind(WIDE, flags)
    for kind in ("parameters", "optimizer", "host"):
        few, many, here = (getattr(one.memory[0], kind) for one in (narrow, wide, found))
        assert here == pytest.approx(few + (many - few) * 2 / 6, rel=1e-6)
    assert found.memory[0].buffers == wide.memory[0].buffers > narrow.memory[0].buffers  # of the block that needs most
    for kind in ("forward", "backward"):
        few, many, here = (getattr(one.time.stages[0], kind) for one in (narrow, wide, found))
        assert here == pytest.approx(few + (many - few) * 2 / 6, rel=1e-9) and few < here < many
    kept = [one.job.kept(2) for one in (wide, narrow)]
    assert [found.job.kept(number) for number in found.job.blocks(found.job.stages[0])] == kept[:1] * 2 + kept[1:] * 4


def test_the_utilisation_counts_each_block() -> None:
    found, narrow = mixed(), of_kind(NARROW)
    more = 2 * 2 * (2 * H * (WIDE - NARROW))
    assert found.job.flops_per_token - narrow.job.flops_per_token == 3 * more
    ratio = found.job.flops_per_token / narrow.job.flops_per_token * narrow.time.total / found.time.total
    assert found.utilisation / narrow.utilisation == pytest.approx(ratio, rel=1e-12)
    assert found.job.num_parameters - narrow.job.num_parameters == 2 * (2 * H + 1) * (WIDE - NARROW)


@pytest.mark.parametrize("method", ["flops", "parameters"])
def test_stages_are_even_in_what_they_compute(method: str) -> None:
    """Wide blocks are three times as much as narrow ones: two of them face four."""
    assert of_kind(NARROW, PIPED + method).job.split.layers_of(0) == [0, 1, 2, 3, 4]
    found = mixed(PIPED + method)
    assert found.job.split.layers_of(0) == [0, 1, 2, 3]
    assert [len(found.job.blocks(part)) for part in found.job.stages] == [2, 4]
