"""Other programs' checkpoints are named, and neither taken for a fresh start nor written into."""

import re
from pathlib import Path

import pytest
import torch

from gptpar.checkpoint import save_checkpoint
from gptpar.cli.convert import main as convert
from gptpar.cli.inspect import main as inspect
from gptpar.cli.pretrain import main as pretrain
from gptpar.cli.runs import main as runs
from gptpar.errors import CheckpointError, ConfigError
from gptpar.exchange.foreign import foreign_checkpoint
from gptpar.run.generation import load_model
from gptpar.run.resume import checkpoint_to_resume, refuse_foreign_folders
from tests.helpers import TINY, tiny_config
from tests.unit.exchange.hf_models import contents

TRACKER = "latest_checkpointed_iteration.txt=100"
MAKES_ONE = "gptpar convert {} NEW_FOLDER makes one of it, or says what it cannot reproduce"
BEGINS = " (a run begins with it by --load-hf"
NO_WAY = "this version has no command that converts it"
META = "transformers' models/llama/convert_llama_weights_to_hf.py"
NANOTRON = "nanotron's examples/llama/convert_nanotron_to_hf.py"
OLMO = "OLMo-core's src/examples/huggingface/convert_checkpoint_to_hf.py"
TITAN = "torchtitan's scripts/checkpoint_conversion/convert_to_hf.py"
# What is saved ("NAME=TEXT" gives a file its contents) -> what is told of it, and what to do.
FOREIGN = {
    "iter_0000100/mp_rank_00/model_optim_rng.pt " + TRACKER: ("legacy format (iter_0000100)", "{}"),
    "release/mp_rank_00/model_optim_rng.pt latest_checkpointed_iteration.txt=release": ("format (release)", "{}"),
    "extra.pt iter_0000100/mp_rank_00/model_optim_rng.pt": ("legacy format (iter_0000100)", "{}"),
    "mp_rank_00/model_optim_rng.pt": ("a Megatron-LM checkpoint, legacy format (mp_rank_00)", f"{MAKES_ONE}, and"),
    "iter_0000100/.metadata iter_0000100/__0_0.distcp iter_0000100/common.pt iter_0000100/metadata.json " + TRACKER: (
        "a Megatron-LM checkpoint, torch_dist format (iter_0000100)",
        MAKES_ONE,
    ),
    "iter_0000009/common.pt iter_0000009/metadata.json iter_0000009/w/.zarray": (
        "zarr format (iter_0000009)",
        NO_WAY,
    ),
    "latest=global_step100 zero_to_fp32.py global_step100/mp_rank_00_model_states.pt "
    "global_step100/zero_pp_rank_0_mp_rank_00_optim_states.pt global_step20/mp_rank_00_model_states.pt " + TRACKER: (
        "a DeepSpeed checkpoint (global_step100)",
        f"{MAKES_ONE}, and",
    ),
    "latest=global_step5 global_step5/": ("a DeepSpeed checkpoint (global_step5)", MAKES_ONE),
    "latest=global_step5": ("a DeepSpeed checkpoint's file 'latest', which names 'global_step5'", ""),
    "latest_universal=global_step5_universal global_step5_universal/zero/w/fp32.pt "
    "global_step5_universal/mp_rank_00_model_states.pt": ("universal checkpoint (global_step5_universal)", MAKES_ONE),
    "config.json model.safetensors tokenizer.json": ("a Hugging Face model (model.safetensors)", MAKES_ONE + BEGINS),
    "config.json model.safetensors.index.json model-00001-of-00002.safetensors": ("a Hugging Face model", MAKES_ONE),
    "checkpoint-9/model.safetensors checkpoint-10/model.safetensors checkpoint-9/trainer_state.json": (
        "a Hugging Face model (checkpoint-10)",
        MAKES_ONE.replace("{}", "{}/checkpoint-10") + BEGINS,
    ),
    "adapter_config.json adapter_model.safetensors": ("a Hugging Face adapter", ""),
    ".metadata __0_0.distcp": ("torch.distributed.checkpoint", NO_WAY),
    "step-1000/.metadata step-1000/__0_0.distcp": ("as torchtitan and FSDP save it (step-1000)", TITAN),
    "step1000/model_and_optim/.metadata step1000/model_and_optim/__0_0.distcp": (
        "OLMo-core checkpoint (step1000)",
        OLMO,
    ),
    "ckpt.pt": ("a nanoGPT checkpoint (ckpt.pt)", NO_WAY),
    "latest.txt=10 10/config.yaml 10/model_config.json 10/model/a.safetensors": (
        "nanotron checkpoint (10)",
        NANOTRON,
    ),
    "latest.txt=9 9/checkpoint_metadata.json 9/model/w.safetensors 9/opt/x.pt": (
        "nanotron checkpoint (9)",
        NANOTRON,
    ),
    "50/weights_tp_rank_0.pth": ("a picotron checkpoint (50)", NO_WAY),
    "model_00000100.bin DONE_00000100": ("an llm.c checkpoint", "llm.c's dev/eval/export_hf.py"),
    "final/lit_model.pth": ("a LitGPT checkpoint (final)", "litgpt convert_from_litgpt"),
    "consolidated.00.pth params.json": ("weights as Meta and Mistral publish them", META),
    "last.ckpt": ("a PyTorch Lightning checkpoint", NO_WAY),
    TRACKER: ("latest_checkpointed_iteration.txt, which names '100', without a checkpoint", ""),
}
UNRELATED = [
    "README.md train.log metrics.jsonl events.out.tfevents.1 slurm-1.out",
    "tokenizer.json tokenizer_config.json config.json vocab.json merges.txt tokenizer.model",
    "data/corpus_text_document.bin data/corpus_text_document.idx data/corpus.jsonl fitted_flags",
    "iter_0000020.tmp-host-1-ab/rank00000.bin",
    "hf/model.safetensors hf/config.json",
]


def make(folder: Path, listing: str) -> Path:
    """Files, each with something in it; a name that ends in "/" is an empty folder."""
    for word in listing.split():
        name, _, text = word.partition("=")
        path = folder / name
        if name.endswith("/"):
            path.mkdir(parents=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text or "theirs")
    return folder


@pytest.mark.parametrize("listing", FOREIGN)
def test_a_foreign_checkpoint_is_named_with_what_to_do(tmp_path: Path, listing: str) -> None:
    folder, (what, remedy) = make(tmp_path / "theirs", listing), FOREIGN[listing]
    with pytest.raises(CheckpointError) as refused:
        checkpoint_to_resume(tiny_config(f"--load {folder} --finetune"))
    assert what in str(foreign_checkpoint(folder)) and f" holds {foreign_checkpoint(folder)}" in str(refused.value)
    assert remedy.replace("{}", str(folder)) in str(refused.value)
    if remedy in (META, NANOTRON, OLMO, TITAN):
        with pytest.raises(CheckpointError, match=f"comes from {re.escape(remedy)}"):
            convert([str(folder), str(tmp_path / "ours")])


@pytest.mark.parametrize("listing", ["ckpt.pt", "latest=global_step5 global_step5/", TRACKER])
def test_a_foreign_checkpoint_is_told_by_every_verb_and_left_alone(tmp_path: Path, listing: str) -> None:
    before = contents(make(tmp_path, listing))
    with pytest.raises(ConfigError) as told:
        pretrain(f"{TINY} --load {tmp_path} --save {tmp_path} --hidden-size 30".split())
    assert FOREIGN[listing][0] in str(told.value) and "has 2 problems" in str(told.value)
    with pytest.raises(CheckpointError) as refused:
        checkpoint_to_resume(tiny_config(f"--load {tmp_path} --finetune"))
    assert FOREIGN[listing][0] in str(refused.value)
    for verb in (inspect, runs):
        if listing != TRACKER:  # a hint may be left over in a folder of ours
            with pytest.raises(CheckpointError) as shown:
                verb([str(tmp_path)])
            assert str(shown.value).startswith(f"{tmp_path} holds {foreign_checkpoint(tmp_path)}: gptpar shows its own")
    with pytest.raises(ConfigError, match="nothing is written into it"):
        refuse_foreign_folders(tiny_config(f"--save {tmp_path}"))
    assert contents(tmp_path) == before


@pytest.mark.parametrize("listing", UNRELATED)
def test_unrelated_files_do_not_make_a_checkpoint(tmp_path: Path, listing: str) -> None:
    config = tiny_config(f"--load {make(tmp_path, listing)} --save {tmp_path}")
    assert foreign_checkpoint(tmp_path) is None and checkpoint_to_resume(config) is None
    refuse_foreign_folders(config)


def test_ours_win_over_stray_files(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 10, {"w": torch.zeros(1)}, {})
    make(tmp_path, f"ckpt.pt global_step100/mp_rank_00_model_states.pt iter_0000100/mp_rank_00/x.pt {TRACKER}")
    manifest = checkpoint_to_resume(tiny_config(f"--load {tmp_path} --finetune"))
    assert manifest is not None and manifest.iteration == 10


def test_one_checkpoint_in_place_of_its_folder(tmp_path: Path) -> None:
    one = save_checkpoint(tmp_path, 10, {"w": torch.zeros(1)}, {})
    with pytest.raises(ConfigError, match=f"give --load {tmp_path} --ckpt-step 10"):
        pretrain(f"{TINY} --load {one}".split())
    with pytest.raises(ConfigError, match=f"--save {one} is itself a checkpoint: give --save {tmp_path}"):
        pretrain(f"{TINY} --save {one}".split())
    with pytest.raises(CheckpointError, match=f"give --load {tmp_path} --ckpt-step 10"):
        load_model(one, torch.device("cpu"), torch.float32)
