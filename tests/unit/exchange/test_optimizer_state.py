"""Megatron-DeepSpeed's optimizer state comes along: training goes on as if undisturbed."""

import sys
import types
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from gptpar.checkpoint import read_manifest, read_tensors
from gptpar.cli.pretrain import main as pretrain
from tests.helpers import TINY
from tests.unit.exchange.hf_models import made_run, refusal
from tests.unit.exchange.megatron_models import (
    GPT2,
    Weights,
    arguments,
    of_module,
    of_pipeline,
    of_rank,
    save,
    save_pipelined,
    stages_of,
)

BEFORE, AFTER, BATCH = 4, 5, 4
RUN = (
    f"{TINY} {GPT2} --global-batch-size {BATCH} --train-iters {BEFORE + AFTER} --lr-warmup-iters 3 --min-lr 1e-3 "
    "--lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 0.5 --fp64"
)
SCHEDULER = {
    **{"max_lr": 1e-2, "min_lr": 1e-3, "lr_warmup_steps": 3 * BATCH, "lr_decay_steps": (BEFORE + AFTER) * BATCH},
    **{"lr_decay_style": "cosine", "start_wd": 0.1, "end_wd": 0.1, "wd_incr_style": "constant"},
    **{"wd_incr_steps": (BEFORE + AFTER) * BATCH, "num_steps": BEFORE * BATCH},
}
MOMENTS = ("exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose softmax is over the padding, as Megatron trains."""
    folder = tmp_path_factory.mktemp("undisturbed")
    pretrain(f"{RUN} --softmax-over-padding --save {folder} --save-interval {BEFORE}".split())
    return folder


@pytest.fixture
def states(undisturbed: Path) -> dict[str, Weights]:
    """Those after BEFORE steps, by kind and our name."""
    found: dict[str, Weights] = {}
    for name, value in read_tensors(undisturbed / f"iter_{BEFORE:07d}").items():
        kind, _, inner = name.partition("/")
        found.setdefault("fp32" if kind == "weights" else kind, {})[inner] = value
    return found


def states_file(more: dict[str, Any]) -> dict[str, Any]:
    given = arguments(GPT2, consumed_train_samples=BEFORE * BATCH, lr=1e-2, min_lr=1e-3, weight_decay=0.1)
    given.num_experts = [1]
    info = {"original_vocab_size": 60, "padded_vocab_size": 64}
    beside = {"iteration": BEFORE, "lr_scheduler": SCHEDULER, "skipped_steps": 0, "universal_checkpoint_info": info}
    return {"args": given, "checkpoint_version": 3.0, "module": {}, **beside, **more}


def save_universal(root: Path, states: dict[str, Weights], *, pipeline: bool) -> None:
    """With a pipeline the number of steps is in the groups, else beside each parameter. No padding is stored."""
    folder, named = root / f"global_step{BEFORE}_universal", of_pipeline if pipeline else of_module
    for kind, values in states.items():
        for name, value in values.items():
            whole = value.flatten(0, 1) if value.dim() == 3 else value
            of_vocabulary = {"vocab_tensor": True} if name == "embedding.weight" else {}
            param = whole[:60].clone() if of_vocabulary else whole
            save(folder / "zero" / named(name) / f"{kind}.pt", {"param": param, "cat_dim": 0, **of_vocabulary})
            if not pipeline:
                save(folder / "zero" / named(name) / "step.pt", torch.tensor(float(BEFORE)))
    groups = [{"lr": 1e-3, "step": BEFORE} if pipeline else {"lr": 1e-3}]
    save(folder / "zero/optimizer_state.pt", {"param_groups": groups, "loss_scaler": None, "zero_stage": 1})
    save(folder / "mp_rank_00_model_states.pt", states_file({}))
    (root / "latest_universal").write_text(folder.name)


@pytest.fixture
def fragment(monkeypatch: pytest.MonkeyPatch) -> type:
    """A class of the name and form of DeepSpeed's; reading does not need it."""
    made = make_dataclass("fragment_address", ["numel", "start"])
    made.__module__ = "deepspeed.utils.tensor_fragment"
    for name in ("deepspeed", "deepspeed.utils", made.__module__):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[made.__module__].fragment_address = made  # type: ignore[attr-defined]
    return made


def save_zero(root: Path, states: dict[str, Weights], fragment: type, *, pipeline: bool) -> None:
    """Two data ranks and two tensor ranks, and with a pipeline two stages; each group is cut without regard to ends."""
    folder, named, tensor_ranks = root / f"global_step{BEFORE}", of_pipeline if pipeline else of_module, 2
    for model_rank in range(tensor_ranks * (2 if pipeline else 1)):
        stage, rank = divmod(model_rank, tensor_ranks)
        here = [name for name in states["fp32"] if not pipeline or stage in stages_of(name)]
        decayed = [name for name in here if states["fp32"][name].dim() > 1]
        groups = [decayed, [name for name in here if name not in decayed]]
        files: list[Any] = [([], {}, []), ([], {}, [])]
        for number, group in enumerate(groups):
            flat = {
                kind: [of_rank(name, values[name], rank).flatten() for name in group] for kind, values in states.items()
            }
            half = sum(map(len, flat["fp32"])) // 2 + 3
            for data_rank, (low, high) in enumerate(((0, half), (half, 10**9))):
                vectors = {kind: torch.cat(parts)[low:high].clone() for kind, parts in flat.items()}
                places, start = {}, 0
                for name, part in zip(group, flat["fp32"], strict=True):
                    first, last = max(start, low), min(start + len(part), high)
                    if first < last:
                        places[named(name)] = fragment(last - first, first - low)
                    start += len(part)
                masters, moments, mappings = files[data_rank]
                masters.append(vectors["fp32"])
                moments[number] = {kind: vectors[kind] for kind in MOMENTS} | {"step": BEFORE}
                mappings.append(places)
        for data_rank, (masters, moments, mappings) in enumerate(files):
            base = {"state": moments, "param_groups": [{"lr": 0.1}, {"lr": 0.1}]}
            state = {"base_optimizer_state": base, "single_partition_of_fp32_groups": masters, "zero_stage": 1}
            name = f"bf16_zero_pp_rank_{data_rank}_mp_rank_{model_rank:02d}_optim_states.pt"
            save(folder / name, {"optimizer_state_dict": {**state, "param_slice_mappings": mappings}})
    save_models(folder, {name: value.bfloat16() for name, value in states["fp32"].items()}, pipeline=pipeline)


def save_models(folder: Path, weights: Weights, *, pipeline: bool) -> None:
    if pipeline:
        save_pipelined(folder, weights, states_file({}))
        return
    for rank in range(2):
        module = {of_module(name): of_rank(name, value, rank) for name, value in weights.items()}
        save(folder / f"mp_rank_{rank:02d}_model_states.pt", states_file({"module": module}))


@pytest.mark.slow
@pytest.mark.parametrize("universal", [True, False], ids=["universal", "partitioned"])
@pytest.mark.parametrize("pipeline", [True, False], ids=["of a pipeline", "of one piece"])
def test_the_state_comes_along_and_training_goes_on_as_if_undisturbed(
    universal: bool,
    pipeline: bool,
    undisturbed: Path,
    states: dict[str, Weights],
    fragment: type,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if universal:
        save_universal(tmp_path / "theirs", states, pipeline=pipeline)
        for values in states.values():
            values["embedding.weight"][60:] = 0.0
    else:
        save_zero(tmp_path / "theirs", states, fragment, pipeline=pipeline)
    path = made_run(tmp_path) / f"iter_{BEFORE:07d}"
    assert f"the optimizer's state after {BEFORE} updates: a run goes on with it by" in capsys.readouterr().out
    meta, stored = read_manifest(path).meta, read_tensors(path)
    assert (meta["optimizer_steps"], meta["progress"]["consumed_samples"]) == (BEFORE, BEFORE * BATCH)
    assert len(stored) == 3 * len(states["fp32"])
    for kind, values in states.items():
        for name, value in values.items():
            assert torch.equal(stored[f"{'weights' if kind == 'fp32' else kind}/{name}"], value), (kind, name)
    if not universal:  # which differs from the run in the padding
        pretrain(f"{RUN} --load {tmp_path / 'run'} --save {tmp_path / 'out'} --save-interval 100".split())
        last = f"iter_{BEFORE + AFTER:07d}"
        found, wanted = read_tensors(tmp_path / "out" / last), read_tensors(undisturbed / last)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


def test_partitioned_state_that_is_damaged_or_of_another_form(
    states: dict[str, Weights], fragment: type, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_zero(tmp_path / "theirs", states, fragment, pipeline=False)
    file = tmp_path / f"theirs/global_step{BEFORE}/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = torch.load(file, weights_only=False)
    state = content["optimizer_state_dict"]
    groups = state["base_optimizer_state"]["state"]
    for change, told in (
        ({"single_partition_of_fp32_groups": [torch.zeros(3), torch.zeros(3)]}, "weights of group 0 ends before"),
        ({"param_slice_mappings": [{"x": 3}, {}]}, "is no pair of whole numbers"),
        ({"param_slice_mappings": [{}, {}]}, "in the model, and the 2 ranks have"),
        ({"base_optimizer_state": {"state": {}, "param_groups": [{"step": BEFORE}]}}, "not an optimizer's state"),
        ({"base_optimizer_state": {"state": {n: one | {"step": 9} for n, one in groups.items()}}}, "different steps"),
    ):
        save(file, {"optimizer_state_dict": {**state, **change}})
        assert told in refusal(tmp_path), told
    save(file, {"optimizer_state_dict": {"fp32_flat_groups": []}})  # ZeRO-3
    made_run(tmp_path)
    assert "it holds weights alone" in capsys.readouterr().out
