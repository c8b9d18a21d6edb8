"""When a checkpoint is required, when a fresh start will do, and whose checkpoint a run may go on from."""

import dataclasses
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gptpar.config import Config
from gptpar.errors import CheckpointError
from gptpar.optim.optimizers import OPTIMIZERS
from gptpar.run import resume, same_run
from gptpar.run.generation import load_model
from gptpar.run.progress import Progress
from gptpar.run.resume import progress_to_resume
from gptpar.run.same_run import RULES, Rule
from gptpar.run.trainer import Trainer
from tests.helpers import make_trainer, tiny_config
from tests.unit.run.saved_runs import DONE, TOKENIZER, initial, inputs_of, save, saved, with_fields

ROPE = "--position-embedding-type rope --disable-bias-linear"


def assert_same_state(before: Trainer, after: Trainer) -> None:
    found = after.engine.optimizer.state_tensors()
    for kind, views in before.engine.optimizer.state_tensors().items():
        for name, view in views.items():
            assert torch.equal(found[kind][name].parts[0][1], view.parts[0][1]), (kind, name)


def refusal_of(config: Config, tokenizer: dict[str, Any] = TOKENIZER) -> str:
    with pytest.raises(CheckpointError) as refused:
        progress_to_resume(config, inputs_of(config, tokenizer))
    return str(refused.value)


def test_all_that_a_run_needs_to_go_on_comes_back(tmp_path: Path) -> None:
    """Weights, moments, the optimizer's step count, the loss scale with its counters; the model computes with them."""
    config = tiny_config(f"--save {tmp_path} --load {tmp_path} --fp16 --initial-loss-scale 4096")
    before, after = make_trainer(config), make_trainer(config)
    for tensor in before.engine.optimizer.vectors.values():
        tensor.uniform_()
    before.engine.optimizer.steps_taken = 5
    for overflow in (False, True, True, False):
        before.loss_scale.update(overflow)
    save(before, DONE, inputs_of(config), keep=None)
    assert resume.load(after, inputs_of(config), lambda _: None) == DONE
    assert after.engine.optimizer.steps_taken == 5
    scale = after.loss_scale.state()
    assert scale == before.loss_scale.state()
    assert (scale["value"], scale["good_steps"], scale["tolerance"]) == (2048, 1, 0)
    assert_same_state(before, after)
    for name, view in after.engine.optimizer.state_tensors()["weights"].items():
        assert torch.equal(after.engine.parameters.views()[name], view.parts[0][1].half())


def test_a_run_of_fp16_goes_on_after_any_number_of_overflows(tmp_path: Path) -> None:
    """The first steps overflow about twenty times, because the scale begins at 2**32."""
    config = tiny_config(f"--save {tmp_path} --load {tmp_path} --fp16")
    before, after = make_trainer(config), make_trainer(config)
    for _ in range(20):
        before.loss_scale.update(True)
    assert before.loss_scale.tolerance == -18
    save(before, DONE, inputs_of(config), keep=None)
    assert resume.load(after, inputs_of(config), lambda _: None) == DONE
    assert after.loss_scale.state() == before.loss_scale.state()
    for overflow in (False, True, True):
        before.loss_scale.update(overflow)
        after.loss_scale.update(overflow)
        assert after.loss_scale.value == before.loss_scale.value


def test_the_place_in_the_data_or_in_the_schedule_may_be_left_behind(tmp_path: Path) -> None:
    """Weights and moments are taken all the same, and what is left behind may be another one."""
    before = make_trainer(tiny_config(f"--save {tmp_path}"))
    for tensor in before.engine.optimizer.vectors.values():
        tensor.uniform_()
    before.engine.optimizer.steps_taken = 5
    save(before, DONE, inputs_of(before.config), keep=None)
    for flags, progress in (
        ("", DONE),
        ("--reset-iteration --train-iters 20 --seed 5", Progress(scheduled_samples=14)),
        ("--no-load-lr-state --min-lr 1e-3", Progress(iteration=7, consumed_samples=14)),
        ("--reset-iteration --no-load-lr-state --seed 5 --min-lr 1e-3", Progress()),
    ):
        config = tiny_config(f"--load {tmp_path} {flags}")
        assert progress_to_resume(config, inputs_of(config)) == progress
    after = make_trainer(config)
    assert resume.load(after, inputs_of(config), lambda _: None) == progress
    assert after.engine.optimizer.steps_taken == 5
    assert_same_state(before, after)


def other(value: object) -> object:
    """Another value of a field; a text is that of a split, which alone is read."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return (*value, "x") if isinstance(value, tuple) else "90,10,0"


NEEDS = {  # where a field has an effect
    "model.rope_scaling_factor": {"model.rope_scaling_type": "linear"},
    "model.original_max_position_embeddings": {"model.rope_scaling_type": "dynamic"},
    **{f"model.{name}_freq_factor": {"model.rope_scaling_type": "llama3"} for name in ("low", "high")},
    **{
        f"model.yarn_{name}": {"model.rope_scaling_type": "yarn"}
        for name in ("beta_fast", "beta_slow", "attention_factor", "correction_range_round_to_int")
    },
    "model.max_position_embeddings": {"model.position_embedding_type": "learned_absolute"},
    "model.add_bias_linear": {"model.add_bias_linear": True},
    "model.moe_token_drop_policy": {"model.moe_expert_capacity_factor": 1.5},
    "batch.micro_batch_size": {"model.moe_router_load_balancing_type": "aux_loss", "model.moe_aux_loss_coeff": 0.5},
    "data.split": {"data.mock_data": False, "data.data_path": ("x",)},
    "data.split_rule": {"data.mock_data": False},
}


FREE_SECTIONS = ("parallel", "recompute", "offload", "checkpoint", "recovery", "logging", "health")
"""Sections that are free as a whole."""


def test_every_field_has_a_rule() -> None:
    """A new flag must be classified before it can be forgotten when a run goes on."""
    sections = typing.get_type_hints(Config)
    compared = sections.keys() - FREE_SECTIONS
    fields = {f"{name}.{spec.name}" for name in compared for spec in dataclasses.fields(sections[name])}
    assert set(FREE_SECTIONS) < sections.keys() and fields == RULES.keys()
    optimizers_own = sum(len(optimizer.flags) for optimizer in OPTIMIZERS.values())
    assert sum(len(names.split()) for names in same_run._BY_RULE.values()) + optimizers_own == len(RULES)


def test_each_difference_is_found_by_its_rule() -> None:
    """What a checkpoint does not say is not compared."""
    plain = tiny_config(ROPE)
    for name in (name for name, rule in RULES.items() if rule in (Rule.MODEL, Rule.DATA, Rule.REPORTED)):
        there = with_fields(plain, NEEDS.get(name, {}))
        section, field = name.split(".")
        here = with_fields(there, {name: other(getattr(getattr(there, section), field))})
        found = {rule: same_run.differing(rule, there, here, same_run.COMPARED) for rule in Rule}
        assert [rule for rule, differ in found.items() if differ] == [RULES[name]] and len(found[RULES[name]]) == 1
        assert " there, " in found[RULES[name]][0] and found[RULES[name]][0].endswith(" here")
        assert not same_run.differing(RULES[name], there, here, frozenset()), name


def test_everything_that_differs_is_told_at_once(tmp_path: Path) -> None:
    saved(tmp_path)
    flags = f"--load {tmp_path} --num-attention-heads 8 --seed 99 --lr 1 --norm-epsilon 1 --clip-grad 9"
    message = refusal_of(tiny_config(flags), {"type": "none", "vocab_size": 61})
    for told in (
        "iter_0000007 cannot be resumed",
        "  1. it is another model (--num-attention-heads 4 there, 8 here; --num-query-groups 4 there, 8 here; "
        "--kv-channels 8 there, 4 here; --norm-epsilon 1e-05 there, 1.0 here)",
        "  2. it was trained with another tokenizer (vocab_size 60 there, 61 here)",
        "  3. it was trained on other data (--seed 1234 there, 99 here): take the checkpoint's; or add --override-data "
        "to go on at sample 14 of this command line's; or begin anew with --finetune.",
        "  4. its schedule is another one (max_lr 0.01 there, 1.0 here",
    ):
        assert told in message
    assert "clip-grad" not in message
    finetuned = tiny_config(f"{flags} --finetune")
    assert progress_to_resume(finetuned, inputs_of(finetuned)) == Progress()


def test_other_data_go_on_if_asked_for(tmp_path: Path) -> None:
    saved(tmp_path)
    flags = f"--load {tmp_path} --seed 99 --attention-dropout 0.2 --dataloader-type cyclic"
    config, said = tiny_config(f"{flags} --override-data"), list[str]()
    assert resume.load(make_trainer(config), inputs_of(config), said.append) == DONE
    assert said[-1] == (
        " > unlike the checkpoint: --attention-dropout 0.0 there, 0.2 here; --dataloader-type single there, cyclic "
        "here; --seed 1234 there, 99 here"
    )
    evaluating = tiny_config(f"{flags} --skip-train")
    assert progress_to_resume(evaluating, inputs_of(evaluating)) == DONE


GROWING = "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1"


@pytest.mark.parametrize(
    ("style", "told"),
    [
        ("constant", ""),
        ("cosine --lr-decay-iters 20", ""),
        ("cosine", "its schedule is another one (decay 40 there, 60 here; lengths"),
        (f"constant {GROWING}", "its schedule is another one (total 40 there, 60 here; lengths"),
    ],
)
def test_a_longer_run_is_another_schedule_only_where_something_follows_from_the_length(
    tmp_path: Path, style: str, told: str
) -> None:
    saved(tmp_path, f"--lr-decay-style {style}")
    longer = tiny_config(f"--load {tmp_path} --lr-decay-style {style} --train-iters 30")
    if told:
        assert told in refusal_of(longer)
    else:
        assert progress_to_resume(longer, inputs_of(longer)) == DONE


# What is done to the meta -> what is told.
EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "progress is missing or null": lambda m: m.pop("progress"),
    "config.model.num_layers is 10000000; it must be at most": lambda m: m["config"]["model"].update(num_layers=10**7),
    "config.model.normalization is 'New', where one of": lambda m: m["config"]["model"].update(normalization="New"),
    "config.model holds 'qk_norm' = True": lambda m: m["config"]["model"].update(qk_norm=True),
    "optimizer_steps is 'x', where a whole number": lambda m: m.update(optimizer_steps="x"),
    "loss_scale is missing": lambda m: m.pop("loss_scale"),
    "schedule.max_lr is nan, where a number": lambda m: m["schedule"].update(max_lr=float("nan")),
    "corpora is {'data_path': [{}]}": lambda m: m.update(corpora={"data_path": [{}]}),
}


def test_a_meta_that_is_no_run_s_is_told_in_sentences(tmp_path: Path) -> None:
    def edit(meta: dict[str, Any]) -> None:
        for change in EDITS.values():
            change(meta)

    path = saved(tmp_path, change=edit)
    message = refusal_of(tiny_config(f"--load {tmp_path}"))
    assert f"the meta of {path}" in message and "--finetune" in message
    assert [told for told in EDITS if told not in message] == []
    saved(tmp_path / "3", change=lambda meta: (meta.clear(), meta.update(config=3)))
    message = refusal_of(tiny_config(f"--load {tmp_path / '3'}"))
    assert "config is 3" in message and "corpora" not in message  # which the first checkpoints did not have
    saved(tmp_path / "none", change=lambda meta: meta.clear())
    finetuned = tiny_config(f"--load {tmp_path / 'none'} --finetune")
    assert resume.load(make_trainer(finetuned), inputs_of(finetuned), lambda _: None) == Progress()


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"hidden_size": 2**16}, "says hidden_size 65,536, but it holds"),
        ({"kv_channels": 4}, "in the model that its meta describes"),
        ({"padded_vocab_size": None}, "padded_vocab_size is missing"),
    ],
)
def test_generate_builds_no_model_but_the_checkpoint_s(tmp_path: Path, values: dict[str, Any], told: str) -> None:
    path = saved(tmp_path, change=lambda meta: meta["config"]["model"].update(values))
    with pytest.raises(CheckpointError) as refused:
        load_model(tmp_path, torch.device("cpu"), torch.float32)
    assert told in str(refused.value) and str(path) in str(refused.value)


def test_a_short_training_goes_on_with_longer_samples(tmp_path: Path) -> None:
    """Rotary positions by a flag, which is told; the weights are those of the short training."""
    saved(tmp_path, ROPE)
    longer = "--seq-length 32 --rope-scaling-type yarn --rope-scaling-factor 2 --original-max-position-embeddings 16"
    config, said = tiny_config(f"--load {tmp_path} {ROPE} --finetune --seed 5 {longer}"), list[str]()
    trainer = make_trainer(config)
    assert progress_to_resume(config, inputs_of(config)) == Progress()
    assert resume.load(trainer, inputs_of(config), said.append) == Progress()
    assert said[-1] == (
        " > fine-tuning another model than the checkpoint's: --rope-scaling-type not given there, yarn here"
    )
    before = initial(ROPE).engine.parameters.views()
    assert all(torch.equal(view, before[name]) for name, view in trainer.engine.parameters.views().items())
