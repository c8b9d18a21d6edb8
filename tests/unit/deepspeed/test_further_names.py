"""Further names of DeepSpeed: texts, the logger's level, sections, where a step ends."""

import contextlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from gptpar.deepspeed.runtime import config
from gptpar.deepspeed.runtime.precision_config import DeepSpeedFP16Config
from gptpar.deepspeed.runtime.utils import call_to_str
from gptpar.deepspeed.utils import set_log_level_from_string
from gptpar.deepspeed.utils.numa import parse_range_list
from gptpar.deepspeed.utils.zero_to_fp32 import get_optim_files

import gptpar.deepspeed as deepspeed
from gptpar.errors import ConfigError, GptparError, UsageError


def test_texts() -> None:
    assert call_to_str("f") == "f()" and call_to_str("f", 1, "two", three=3) == "f(1, 'two', three=3)"
    assert parse_range_list("0,2-4,6,8-9") == [0, 2, 3, 4, 6, 8, 9]
    for text in ("0,2-6,5-9", "8,2-6", "1,6-2", "1,", "a", "-1"):
        with pytest.raises(ValueError, match="has to ascend|have to ascend|neither a number"):
            parse_range_list(text)


def test_files_of_the_optimizer_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        get_optim_files(tmp_path)
    names = [str(tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt") for rank in (0, 1, 2, 10)]
    for name in reversed(names):
        Path(name).touch()
    assert get_optim_files(tmp_path) == names


def test_the_configuration_sets_the_loggers_level() -> None:
    logger = deepspeed.utils.logging.logger
    before = logger.level
    try:
        given = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "log_level": "ERROR"}
        engine: Any = deepspeed.initialize(model=torch.nn.Linear(1, 1), config=given)[0]
        assert engine.log_level() == "ERROR" and logger.level == logging.ERROR
        assert config.get_log_level({}) is deepspeed.runtime.constants.LOG_LEVEL_DEFAULT is None
        engine.destroy()
        model = torch.nn.Linear(1, 1)
        with pytest.raises(ValueError, match="log_level 'loud' is none of"):
            deepspeed.initialize(model=model, config=given | {"log_level": "loud"})
        deepspeed.initialize(model=model, config=given)[0].destroy()  # no engine has the model
        with pytest.raises(ValueError, match="log_level 'loud' is none of"):
            set_log_level_from_string("loud")
    finally:
        logger.setLevel(before)


def test_a_section_refuses_numbers_that_cannot_be() -> None:
    assert DeepSpeedFP16Config(loss_scale="3").loss_scale == 3
    assert DeepSpeedFP16Config(enabled=True, loss_scale=128, min_loss_scale=0).min_loss_scale == 0
    for given in ({"loss_scale": -1}, {"loss_scale": float("nan")}, {"loss_scale": True}, {"loss_scale": []}):
        with pytest.raises(ValueError, match="fp16.loss_scale must be"):
            DeepSpeedFP16Config(**given)
    with pytest.raises(ValueError, match="fp16.loss_scale_window must be a number"):
        DeepSpeedFP16Config(loss_scale_window=2.7)
    with pytest.raises(ValueError, match="fp16.loss_scale_window must be above 0"):
        DeepSpeedFP16Config(enabled=True, loss_scale_window=0)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_steps_gradients_are_summed_at_the_end_of_a_context(stage: int) -> None:
    weights = []
    for coalesce in (False, True):
        torch.manual_seed(0)
        given = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": stage}}
        engine: Any = deepspeed.initialize(model=torch.nn.Linear(3, 2), config=given)[0]
        for _ in range(2):
            losses = [engine(torch.full((1, 3), float(number))).sum() for number in (1, 2, 3)]
            if coalesce:
                with engine.coalesce_grad_reduction():
                    for loss in losses:
                        engine.backward(loss)
                    with pytest.raises(UsageError, match="inside no_sync"):
                        engine.step()
            else:
                for loss in losses:
                    engine.backward(loss)
            engine.step()
        weights.append(deepspeed.utils.safe_get_full_fp32_param(engine.module.weight).clone())
        with engine.no_sync(), pytest.raises(UsageError, match="nested"), engine.coalesce_grad_reduction():
            pass
        assert engine.global_steps == 2
        engine.destroy()
    assert torch.equal(*weights)


def test_a_deprecated_key_gives_its_value_to_the_new_one() -> None:
    pydantic = pytest.importorskip("pydantic")
    extra = {"deprecated": True, "new_param": "new", "new_param_fn": lambda value: [value]}

    class Section(deepspeed.runtime.config_utils.DeepSpeedConfigModel):  # type: ignore[name-defined,misc]
        old: str | None = pydantic.Field(None, json_schema_extra=extra)
        new: list[str] | None = None
        count: int = 1

    assert Section(old="a", count="auto").new == ["a"]
    with pytest.raises(pydantic.ValidationError):
        Section(other=1)
    with pytest.raises(ConfigError, match="old is deprecated, and new"):
        Section(old="a", new=["b"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_step_ends_one_where_accumulation_is_not_managed(stage: int) -> None:
    weights = []
    for managed in (True, False):
        torch.manual_seed(0)
        given = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 3, "optimizer": {"type": "Adam"}}
        more = {"zero_optimization": {"stage": stage}, "managed_gradient_accumulation": managed}
        engine: Any = deepspeed.initialize(model=torch.nn.Linear(3, 2), config=given | more)[0]
        assert engine.managed_gradient_accumulation() is managed
        for number in range(6):
            engine.backward(engine(torch.full((1, 3), float(number))).sum())
            if managed or number % 3 == 2:
                engine.step()
        assert (engine.global_steps, engine.global_samples) == (2, 6)
        weights.append(deepspeed.utils.safe_get_full_fp32_param(engine.module.weight).clone())
        if not managed:
            assert engine.is_gradient_accumulation_boundary()
            with pytest.raises(UsageError, match="engine.step"):
                engine.set_gradient_accumulation_boundary(True)
            engine.backward(engine(torch.ones(1, 3)).sum())
            engine.step()
            assert (engine.global_steps, engine.global_samples) == (3, 7)
            engine.module.register_forward_hook(lambda module, args, output: output.sum())
            engine.train_batch(iter([torch.ones(1, 3)] * 3))
            assert (engine.global_steps, engine.global_samples) == (4, 10)
        engine.destroy()
    assert torch.equal(*weights)


@pytest.mark.parametrize("way", ["unmanaged", "coalesced"])
def test_torchs_clipping_is_refused_where_a_program_ends_the_step(way: str) -> None:
    given = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 2}}
    config = given | {"managed_gradient_accumulation": way == "coalesced"}
    engine: Any = deepspeed.initialize(model=torch.nn.Linear(3, 2), config=config)[0]
    for _ in range(2):
        with engine.coalesce_grad_reduction() if way == "coalesced" else contextlib.nullcontext():
            for _ in range(2):
                engine.backward(engine(torch.ones(1, 3)).sum())
        with pytest.raises(GptparError, match="torch's clipping of an engine's parameters would change nothing"):
            torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1e-6)
        engine.step()
    assert engine.global_steps == 2
    engine.destroy()
