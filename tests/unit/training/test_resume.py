"""When a checkpoint is required, when a fresh start will do, and whose checkpoint a run may go on from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gptpar.checkpoint import load_meta, read_manifest, save_checkpoint
from gptpar.cli.generate import load_model
from gptpar.config import Config
from gptpar.data.indexed import IndexedDatasetWriter
from gptpar.errors import CheckpointError
from gptpar.training import resume, same_run
from gptpar.training.progress import Progress
from gptpar.training.resume import Inputs, checkpoint_to_resume, progress_to_resume
from gptpar.training.same_run import FREE_SECTIONS, RULES, Rule
from tests.helpers import make_trainer, tiny_config

TOKENIZER = {"type": "none", "vocab_size": 60}
DONE = Progress(iteration=7, consumed_samples=14, scheduled_samples=14)
ROPE = "--position-embedding-type rope --disable-bias-linear"


def inputs_of(config: Config, tokenizer: dict[str, Any] = TOKENIZER) -> Inputs:
    return Inputs.of(config, tokenizer)


def saved(folder: Path, flags: str = "", change: Callable[[dict[str, Any]], object] = lambda meta: None) -> Path:
    """A run's checkpoint of iteration 7, its meta edited."""
    config = tiny_config(f"--save {folder} {flags}")
    trainer = make_trainer(config)
    meta = json.loads(json.dumps(resume.meta_of(trainer, DONE, inputs_of(config))))
    change(meta)
    return save_checkpoint(folder, 7, resume.checkpoint_tensors(trainer, with_moments=True), meta)


def test_all_that_a_run_needs_to_go_on_comes_back(tmp_path: Path) -> None:
    """Weights, moments, the optimizer's step count, the loss scale with its counters; the model computes with them."""
    config = tiny_config(f"--save {tmp_path} --load {tmp_path} --fp16 --initial-loss-scale 4096")
    before, after = make_trainer(config), make_trainer(config)
    for tensor in before.engine.optimizer.vectors.values():
        tensor.uniform_()
    before.engine.optimizer.steps_taken = 5
    before.loss_scale.update(False)
    before.loss_scale.update(True)
    before.loss_scale.update(True)
    before.loss_scale.update(False)
    resume.save(before, DONE, inputs_of(config), keep=None)
    assert resume.load(after, inputs_of(config), lambda _: None) == DONE
    assert after.engine.optimizer.steps_taken == 5
    scale = before.loss_scale.state()
    assert after.loss_scale.state() == scale and (scale["value"], scale["good_steps"], scale["tolerance"]) == (
        2048,
        1,
        0,
    )
    for kind, views in before.engine.optimizer.state_tensors().items():
        for name, view in after.engine.optimizer.state_tensors()[kind].items():
            assert torch.equal(view.parts[0][1], views[name].parts[0][1]), (kind, name)
            if kind == "weights":
                assert torch.equal(after.engine.parameters.views()[name], view.parts[0][1].half())


def test_an_empty_run_folder_is_a_fresh_start(tmp_path: Path) -> None:
    assert checkpoint_to_resume(tiny_config(f"--save {tmp_path} --load {tmp_path}")) is None


@pytest.mark.parametrize("flag", ["--finetune", "--skip-train", "--ckpt-step 3", "--exit-on-missing-checkpoint"])
def test_weights_that_were_asked_for_are_never_random(tmp_path: Path, flag: str) -> None:
    with pytest.raises(CheckpointError, match="there is no readable checkpoint.*in --load"):
        checkpoint_to_resume(tiny_config(f"--load {tmp_path} {flag}"))


# Field -> a value other than the tiny model's.
OTHER: dict[str, Any] = {
    "model.num_layers": 3,
    "model.hidden_size": 64,
    "model.ffn_hidden_size": 96,
    "model.num_attention_heads": 8,
    "model.num_query_groups": 2,
    "model.kv_channels": 4,
    "model.max_position_embeddings": 32,
    "model.position_embedding_type": "none",
    "model.rotary_base": 500,
    "model.rotary_percent": 0.5,
    "model.normalization": "RMSNorm",
    "model.norm_epsilon": 0.1,
    "model.qk_layernorm": True,
    "model.swiglu": True,
    "model.add_bias_linear": False,
    "model.add_qkv_bias": True,
    "model.untie_embeddings_and_output_weights": True,
    "model.padded_vocab_size": 128,
    "model.seq_length": 8,
    "model.attention_dropout": 0.5,
    "model.hidden_dropout": 0.5,
    "data.reset_position_ids": True,
    "data.reset_attention_mask": True,
    "data.mock_data": False,
    "data.split": "90,10,0",
    "data.split_rule": "legacy",
    "data.dataloader_type": "cyclic",
    "data.eod_mask_loss": True,
    "data.seed": 99,
    "batch.global_batch_size": 4,
    "batch.rampup_batch_size": (2, 2, 4),
    "batch.step_batch_size_schedule": "0:2 1K:4",
    "batch.train_minutes": 7.0,
    "optimizer.optimizer": "other",
    "optimizer.clip_grad": 2.0,
    "optimizer.adam_beta1": 0.8,
    "optimizer.adam_beta2": 0.8,
    "optimizer.adam_eps": 1e-6,
    "precision.fp16": True,
    "precision.bf16": True,
    "precision.fp64": True,
    "precision.loss_scale": 4.0,
}
NEEDS = {  # where a field has an effect
    "model.max_position_embeddings": {"model.position_embedding_type": "learned_absolute"},
    "model.add_bias_linear": {"model.add_bias_linear": True},
    "data.split": {"data.mock_data": False, "data.data_path": ("x",)},
    "data.split_rule": {"data.mock_data": False},
}


def test_every_field_has_a_rule() -> None:
    """A new flag must be classified before it can be forgotten when a run goes on."""
    sections = {spec.name: getattr(Config(), spec.name) for spec in dataclasses.fields(Config)}
    compared = sections.keys() - FREE_SECTIONS
    fields = {f"{name}.{spec.name}" for name in compared for spec in dataclasses.fields(sections[name])}
    assert set(FREE_SECTIONS) < sections.keys() and fields == RULES.keys()
    assert sum(len(names.split()) for names in same_run._BY_RULE.values()) == len(RULES)
    judged = {name for name, rule in RULES.items() if rule in (Rule.MODEL, Rule.DATA, Rule.TOLD)}
    assert OTHER.keys() == judged, "give the new field another value above"


def with_fields(config: Config, values: dict[str, Any]) -> Config:
    for name, value in values.items():
        section, field = name.split(".")
        config = config.update(section, **{field: value})
    return config


@pytest.mark.parametrize("name", OTHER)
def test_each_difference_is_found_by_its_rule(name: str) -> None:
    there = with_fields(tiny_config(ROPE), NEEDS.get(name, {}))
    here = with_fields(there, {name: OTHER[name]})
    found = {rule: same_run.differing(rule, there, here, same_run.COMPARED) for rule in Rule}
    assert [rule for rule, differ in found.items() if differ] == [RULES[name]] and len(found[RULES[name]]) == 1
    assert " there, " in found[RULES[name]][0] and found[RULES[name]][0].endswith(" here")
    assert not same_run.differing(RULES[name], there, here, frozenset()), (
        "what a checkpoint does not say is not compared"
    )


@pytest.mark.parametrize(
    ("before", "flags", "told"),
    [
        ("", "--num-attention-heads 8", "--num-attention-heads 4 there, 8 here; --num-query-groups 4 there, 8 here"),
        (ROPE, "--num-attention-heads 8 --kv-channels 4", "--kv-channels 8 there, 4 here"),
        ("", "--norm-epsilon 0.1", "--norm-epsilon 1e-05 there, 0.1 here"),
        (ROPE, "--rotary-base 500", "--rotary-base 10000 there, 500 here"),
        (ROPE, "--rotary-percent 0.5", "--rotary-percent 1.0 there, 0.5 here"),
        ("", "--swiglu --ffn-hidden-size 128", "--swiglu not given there, given here"),
        ("", "--disable-bias-linear", "--disable-bias-linear not given there, given here"),
        (ROPE, "--add-qkv-bias", "--add-qkv-bias not given there, given here"),
        (ROPE, "--position-embedding-type none", "--position-embedding-type rope there, none here"),
        (ROPE, "--normalization RMSNorm", "--normalization LayerNorm there, RMSNorm here"),
    ],
)
def test_another_model_is_refused_unless_it_is_fine_tuned(tmp_path: Path, before: str, flags: str, told: str) -> None:
    """Among them those that keep every tensor's shape, which nothing else would notice."""
    saved(tmp_path, before)
    config = tiny_config(f"--load {tmp_path} {before} {flags}")
    with pytest.raises(CheckpointError) as refused:
        progress_to_resume(config, inputs_of(config))
    message = str(refused.value)
    assert "iter_0000007 cannot be resumed" in message and "it is another model (" in message and told in message
    assert "--finetune" in message and "other data" not in message
    finetuned = tiny_config(f"--load {tmp_path} {before} {flags} --finetune")
    assert progress_to_resume(finetuned, inputs_of(finetuned)) == Progress()


def test_fine_tuning_another_model_is_told(tmp_path: Path) -> None:
    saved(tmp_path, ROPE)
    config, said = tiny_config(f"--load {tmp_path} {ROPE} --rotary-base 500 --finetune"), list[str]()
    assert resume.load(make_trainer(config), inputs_of(config), said.append) == Progress()
    assert said[-1] == " > fine-tuning another model than the checkpoint's: --rotary-base 10000 there, 500 here"


@pytest.mark.parametrize(
    "flags",
    [
        "--micro-batch-size 1 --global-batch-size 2 --recompute-granularity full --no-compile --log-interval 3",
        "--cpu-optimizer --cpu-optimizer-ratio 0.5 --zero-stage 1 --no-pipeline-parallel",
        "--init-method-std 0.5 --num-workers 0 --exit-interval 5 --rotary-base 77 --add-qkv-bias --log-throughput",
        "--group-query-attention --num-query-groups 4 --kv-channels 8 --ffn-hidden-size 128 --eval-interval 4",
    ],
)
def test_what_changes_no_number_is_free(tmp_path: Path, flags: str) -> None:
    saved(tmp_path)
    config = tiny_config(f"--load {tmp_path} {flags}")
    assert progress_to_resume(config, inputs_of(config)) == DONE


def test_everything_that_differs_is_told_at_once(tmp_path: Path) -> None:
    saved(tmp_path)
    config = tiny_config(f"--load {tmp_path} --num-attention-heads 8 --seed 99 --lr 1 --norm-epsilon 1 --clip-grad 9")
    with pytest.raises(CheckpointError) as refused:
        progress_to_resume(config, inputs_of(config, {"type": "none", "vocab_size": 61}))
    message = str(refused.value)
    for told in (
        "  1. it is another model (--num-attention-heads 4 there, 8 here; --num-query-groups 4 there, 8 here; "
        "--kv-channels 8 there, 4 here; --norm-epsilon 1e-05 there, 1.0 here)",
        "  2. it was trained with another tokenizer (vocab_size 60 there, 61 here)",
        "  3. it was trained on other data (--seed 1234 there, 99 here): take the checkpoint's; or add --override-data "
        "to go on at sample 14 of this command line's; or begin anew with --finetune.",
        "  4. its schedule is another one (max_lr 0.01 there, 1.0 here",
    ):
        assert told in message
    assert "clip-grad" not in message


def test_what_a_stranger_wrote_is_escaped(tmp_path: Path) -> None:
    saved(tmp_path, change=lambda meta: meta.update(tokenizer={"\x1b[2J": "\n > loaded"}))
    config = tiny_config(f"--load {tmp_path}")
    with pytest.raises(CheckpointError) as refused:
        progress_to_resume(config, inputs_of(config))
    assert r"(\x1b[2J \n > loaded there, None here; " in str(refused.value)


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


def corpus(prefix: Path, documents: int, length: int = 50, seed: int = 0) -> Path:
    tokens = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(documents):
            writer.add_document(tokens.integers(60, size=length))
    return prefix


def corpus_differences(before: Config, here: Config) -> list[str]:
    there = json.loads(json.dumps(same_run.corpora_of(before.data)))
    return list(same_run.other_corpora(there, same_run.corpora_of(here.data)))


def data(*paths: object) -> Config:
    """The tiny model on corpora in place of mock data."""
    fields = {"data.mock_data": False, "data.data_path": tuple(map(str, paths)), "data.split": "969, 30, 1"}
    return with_fields(tiny_config(), fields)


def test_a_corpus_is_known_by_its_contents(tmp_path: Path) -> None:
    a, b = corpus(tmp_path / "a", 40), corpus(tmp_path / "b", 30)
    (tmp_path / "moved").mkdir()
    moved, like_a = corpus(tmp_path / "moved" / "a", 40), corpus(tmp_path / "c", 40, seed=1)
    assert corpus_differences(data(a), data(moved)) == []
    assert corpus_differences(data(3, a, 1, b), data(0.75, moved, 0.25, b)) == []
    assert corpus_differences(data(a), data(b)) == [
        f"corpus 1 of --data-path {a} (40 sequences, 2,000 tokens) there, {b} (30 sequences, 1,500 tokens) here"
    ]
    assert corpus_differences(data(a), data(like_a))[0].endswith(
        f"{like_a} (40 sequences, 2,000 tokens) of the same size with other contents here"
    )
    assert corpus_differences(data(a), data(a, b)) == ["--data-path 1 corpora there, --data-path 2 here"]
    assert corpus_differences(data(3, a, 1, b), data(1, a, 1, b)) == [
        f"the weight of corpus {n} of --data-path {w} there, 0.5 here" for n, w in ((1, 0.75), (2, 0.25))
    ]
    assert corpus_differences(data(a, b), data(1, a, 1, b))[0].endswith("--data-path none there, 0.5 here")
    assert len(corpus_differences(data(a, b), data(b, a))) == 2


def test_a_run_on_another_corpus_is_refused(tmp_path: Path) -> None:
    a, b = corpus(tmp_path / "a", 40), corpus(tmp_path / "b", 30)
    before = data(a)
    run = tmp_path / "run"
    trainer = make_trainer(with_fields(before, {"checkpoint.save": str(run)}))
    resume.save(trainer, DONE, inputs_of(before), keep=None)
    assert load_meta(run)["corpora"]["data_path"][0]["tokens"] == 2000

    def go_on(config: Config, **more: Any) -> Progress:
        config = with_fields(
            config, {"checkpoint.load": str(run), **{k.replace("__", "."): v for k, v in more.items()}}
        )
        return progress_to_resume(config, inputs_of(config))

    assert go_on(before) == DONE and go_on(data(a), data__split="9.69,.3,.01", data__num_workers=0) == DONE
    with pytest.raises(CheckpointError, match=r"other data \(corpus 1 of --data-path .*a \(40 sequences"):
        go_on(data(b))
    with pytest.raises(CheckpointError, match=r"other data \(--split 969, 30, 1 there, 50,50,0 here\)"):
        go_on(data(a), data__split="50,50,0")
    with pytest.raises(CheckpointError, match=r"other data \(--mock-data not given there, given here\)"):
        go_on(tiny_config())
    assert go_on(data(b), data__override_data=True) == DONE
    assert go_on(data(b), logging__skip_train=True) == DONE and go_on(data(b), checkpoint__finetune=True) == Progress()


def test_a_checkpoint_from_before_corpora_were_identified_goes_on(tmp_path: Path) -> None:
    a, b = corpus(tmp_path / "a", 40), corpus(tmp_path / "b", 30)
    run = tmp_path / "run"

    def forget(meta: dict[str, Any]) -> None:
        del meta["corpora"], meta["config"]["model"]["norm_epsilon"]
        meta["config"]["data"] |= {"mock_data": False, "data_path": ["3", str(a), "1", str(b)], "split": "969, 30, 1"}

    saved(run, change=forget)
    elsewhere = corpus(tmp_path / "c", 40)
    config = with_fields(data(3, elsewhere, 1, b), {"checkpoint.load": str(run), "model.norm_epsilon": 0.5})
    said: list[str] = []
    assert resume.load(make_trainer(config), inputs_of(config), said.append) == DONE
    assert said[-1] == f" > unlike the checkpoint: --data-path {a} there, {elsewhere} here"
    config = with_fields(data(1, a, 1, b), {"checkpoint.load": str(run)})
    with pytest.raises(
        CheckpointError, match=r"other data \(the weight of corpus 1 of --data-path 0.75 there, 0.5 here"
    ):
        progress_to_resume(config, inputs_of(config))


def test_other_data_for_evaluation_are_told(tmp_path: Path) -> None:
    a, b = str(corpus(tmp_path / "a", 40)), str(corpus(tmp_path / "b", 30))
    parts = {"data.mock_data": False, "data.train_data_path": (a,), "data.valid_data_path": (b,)}
    there = with_fields(tiny_config(), parts)

    def told(there: Config, here: Config) -> list[str]:
        corpora = (same_run.corpora_of(config.data) for config in (there, here))
        return list(same_run.other_evaluation(there, next(corpora), here, next(corpora)))

    assert told(there, there) == [] == told(data(a), with_fields(data(a), {"data.split": "96.9,3,.1"}))
    assert told(there, with_fields(there, {"data.valid_data_path": (a,)})) == [
        "--valid-data-path other corpora there than here"
    ]
    half = with_fields(data(a), {"data.split": "969,1,30"})
    assert told(data(a), half) == ["--split 969, 30, 1 there, 969,1,30 here"]
    assert same_run.differing(Rule.DATA, data(a), half, same_run.COMPARED) == []


def test_a_longer_run_that_reads_a_corpus_again_is_told_of_the_new_order(tmp_path: Path) -> None:
    """Epochs are shuffled together: of 2,000 tokens 40 samples of 16 are a part, 400 are several epochs."""
    a, b = corpus(tmp_path / "a", 40), corpus(tmp_path / "b", 40)
    for config, longer, told in ((data(a), 60, False), (data(a), 400, True), (data(a, b), 400, False)):
        assert same_run.reshuffled(config, same_run.corpora_of(config.data), 40, longer) is told
        assert not same_run.reshuffled(config, same_run.corpora_of(config.data), longer, longer)
    before = with_fields(data(a), {"checkpoint.save": str(tmp_path / "run")})
    resume.save(make_trainer(before), DONE, inputs_of(before), keep=None)
    fields = {"checkpoint.load": str(tmp_path / "run"), "batch.train_iters": 200}
    config = with_fields(before, fields | {"optimizer.override_opt_param_scheduler": True})
    said: list[str] = []
    resume.load(make_trainer(config), inputs_of(config), said.append)
    assert said[-1].startswith(" > the run has 400 samples in place of 40: epochs are shuffled together")


# What is done to the meta -> what is told.
EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "progress is missing or null": lambda m: m.clear(),
    "config is missing or null": lambda m: m.pop("config"),
    "config.model is missing or null": lambda m: m["config"].update(model=None),
    "config is 3": lambda m: m.update(config=3),
    "config.model is [1]": lambda m: m["config"].update(model=[1]),
    "config.model.hidden_size is '32', where a whole number": lambda m: m["config"]["model"].update(hidden_size="32"),
    "config.model.num_layers is -2, where at least 1": lambda m: m["config"]["model"].update(num_layers=-2),
    "config.model.norm_epsilon is 'x', where a number": lambda m: m["config"]["model"].update(norm_epsilon="x"),
    "config.model.normalization is 'New', where one of": lambda m: m["config"]["model"].update(normalization="New"),
    "config.model holds 'qk_norm' = True": lambda m: m["config"]["model"].update(qk_norm=True),
    "config.data.data_path is 7, where a list": lambda m: m["config"]["data"].update(data_path=7),
    "progress is [1]": lambda m: m.update(progress=[1]),
    "progress holds 'new', which this version does not know": lambda m: m["progress"].update(new=1),
    "progress.iteration is missing": lambda m: m["progress"].pop("iteration"),
    "progress.consumed_samples is -3, where at least 0": lambda m: m["progress"].update(consumed_samples=-3),
    "progress.iteration is True, where a whole number": lambda m: m["progress"].update(iteration=True),
    "progress.iteration is 1000": lambda m: m["progress"].update(iteration=10**40),
    "optimizer_steps is 'x', where a whole number": lambda m: m.update(optimizer_steps="x"),
    "optimizer_steps is -3, where at least 0": lambda m: m.update(optimizer_steps=-3),
    "loss_scale is missing": lambda m: m.pop("loss_scale"),
    "loss_scale.value is 'big', where a number": lambda m: m["loss_scale"].update(value="big"),
    "loss_scale holds 'more'": lambda m: m["loss_scale"].update(more=1),
    "schedule is 'linear', where an object": lambda m: m.update(schedule="linear"),
    "schedule.max_lr is nan, where a number": lambda m: m["schedule"].update(max_lr=float("nan")),
    "schedule.total is missing": lambda m: m["schedule"].pop("total"),
    "schedule holds 'extra'": lambda m: m["schedule"].update(extra=1),
    "tokenizer is 'gpt2', where an object": lambda m: m.update(tokenizer="gpt2"),
    "corpora is [3], where lists of corpora": lambda m: m.update(corpora=[3]),
    "corpora is {'data_path': [{}]}": lambda m: m.update(corpora={"data_path": [{}]}),
}


@pytest.mark.parametrize("told", EDITS)
def test_a_meta_that_is_no_run_s_is_told_in_sentences(tmp_path: Path, told: str) -> None:
    path = saved(tmp_path, change=EDITS[told])
    config = tiny_config(f"--load {tmp_path}")
    with pytest.raises(CheckpointError) as refused:
        progress_to_resume(config, inputs_of(config))
    message = str(refused.value)
    assert f"the meta of {path}" in message and told in message and "--finetune" in message
    finetuned = tiny_config(f"--load {tmp_path} --finetune")
    assert resume.load(make_trainer(finetuned), inputs_of(finetuned), lambda _: None) == Progress()


def test_all_of_it_is_told_at_once(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, {"weights/x": torch.zeros(1)}, {})
    config = tiny_config(f"--load {tmp_path}")
    with pytest.raises(CheckpointError) as refused:
        progress_to_resume(config, inputs_of(config))
    for name in ("config", "progress", "optimizer_steps", "loss_scale", "schedule", "tokenizer"):
        assert f"{name} is missing or null" in str(refused.value)


@pytest.mark.parametrize("told", [told for told in EDITS if told.startswith("config")])
def test_generate_tells_it_too(tmp_path: Path, told: str) -> None:
    saved(tmp_path, change=EDITS[told])
    if "config.data" in told:
        load_model(tmp_path, torch.device("cpu"), torch.float32)
        return
    with pytest.raises(CheckpointError) as refused:
        load_model(tmp_path, torch.device("cpu"), torch.float32)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"hidden_size": 2**16}, "says hidden_size 65,536, but it holds"),
        ({"num_layers": 10**9}, "says num_layers 1,000,000,000, but it holds"),
        ({"num_layers": None}, "the model's num_layers is not known"),
        ({"kv_channels": 4}, "in the model that its meta describes"),
        ({"padded_vocab_size": None}, "padded_vocab_size is missing"),
    ],
)
def test_generate_builds_no_model_but_the_checkpoint_s(tmp_path: Path, values: dict[str, Any], told: str) -> None:
    path = saved(tmp_path, change=lambda meta: meta["config"]["model"].update(values))
    with pytest.raises(CheckpointError) as refused:
        load_model(tmp_path, torch.device("cpu"), torch.float32)
    assert told in str(refused.value) and str(path) in str(refused.value)


def test_an_older_checkpoint_in_place_of_a_damaged_one_is_compared_too(tmp_path: Path) -> None:
    saved(tmp_path, change=lambda meta: meta["config"]["data"].update(seed=5))
    config = tiny_config(f"--load {tmp_path} --save {tmp_path}")
    newest = resume.save(make_trainer(config), Progress(9, consumed_samples=18), inputs_of(config), keep=None)
    with open(newest / "rank00000.bin", "r+b") as file:
        file.write(b"damage")
    assert read_manifest(newest).iteration == progress_to_resume(config, inputs_of(config)).iteration == 9
    with pytest.raises(CheckpointError, match=r"iter_0000007 cannot be resumed .*\n.*--seed 5 there, 1234 here"):
        resume.load(make_trainer(config), inputs_of(config), lambda _: None)


def test_a_checkpoint_from_before_there_was_a_field_goes_on(tmp_path: Path) -> None:
    """The length that ``--train-minutes`` fits came later than the format."""
    saved(tmp_path, change=lambda meta: meta["progress"].pop("fitted_iters"))
    config = tiny_config(f"--load {tmp_path}")
    assert resume.progress_to_resume(config, inputs_of(config)).fitted_iters is None


def test_a_resumed_run_keeps_its_fitted_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fits = "--train-minutes 3 --lr-warmup-iters 10 --train-iters 20"
    saved(tmp_path, fits, change=lambda meta: meta["progress"].update(fitted_iters=20))
    config = tiny_config(f"{fits} --train-minutes 7 --load {tmp_path}")
    resume.load(make_trainer(config), inputs_of(config), print)
    said = capsys.readouterr().out
    assert "--train-minutes 3.0 there, 7.0 here" in said and "keeps the 20 steps that were fitted" in said


@pytest.mark.parametrize("more", ["", "--position-embedding-type rope --normalization RMSNorm --num-query-groups 2"])
def test_norms_of_heads_are_saved_and_generate_has_them(tmp_path: Path, more: str) -> None:
    config = tiny_config(f"--save {tmp_path} --qk-layernorm {more}")
    trainer = make_trainer(config)
    weights = trainer.engine.optimizer.state_tensors()["weights"]
    norms = [name for name in weights if ".attention.query_norm." in name or ".attention.key_norm." in name]
    assert len(norms) == (4 if more else 8)  # two layers; LayerNorm has a bias, too
    for number, name in enumerate(norms):
        weights[name].fill(torch.linspace(0.5, 2.0 + number, 8))
    trainer.engine.publish()
    meta = json.loads(json.dumps(resume.meta_of(trainer, DONE, inputs_of(config))))
    save_checkpoint(tmp_path, 7, resume.checkpoint_tensors(trainer, with_moments=True), meta)
    stage, loaded = load_model(tmp_path, torch.device("cpu"), torch.float32)
    assert loaded.model.qk_layernorm
    tokens = torch.arange(16)[None]
    fields = {"seq_length": 16}
    trainer.pipeline.eval()
    with torch.no_grad():
        assert torch.equal(stage(tokens, fields), trainer.engine.stages[0](tokens, fields))
    trainer.close()
