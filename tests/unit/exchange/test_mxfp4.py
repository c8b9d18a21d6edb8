"""Experts in MXFP4 are read as transformers unpacks them, bit for bit, and go back as plain bf16."""

import json
from pathlib import Path

import pytest
import torch

from gptpar.checkpoint.data_file import AlignedBuffers
from gptpar.exchange.files import mxfp4
from gptpar.exchange.files.mxfp4 import Mxfp4File
from gptpar.exchange.files.safetensors_file import open_safetensors
from tests.unit.exchange.hf_models import TOKENS, made_hf, made_run, our_logits, require_equal_logits, save_theirs
from tests.unit.model.test_families import GPT_OSS

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

PACKED = {**GPT_OSS, "hidden_size": 64, "intermediate_size": 32, "head_dim": 16, "num_hidden_layers": 2}
UNPACKED = ("gate_up_proj", "down_proj")


def save_packed(folder: Path) -> dict[str, torch.Tensor]:
    """A folder as gpt-oss's own ones are; returns the experts' tensors as transformers unpacks them, by name."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    save_theirs(folder, PACKED, dtype=torch.bfloat16)
    weights, wanted = safetensors.load_file(folder / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in weights if name.endswith(UNPACKED)]:
        experts, inputs, outputs = weights.pop(name).shape
        shape = experts, outputs, inputs // 32
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 127, shape, dtype=torch.uint8, generator=generator)
        scales[0, 0, 0] = 0  # of denormal numbers
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        wanted[name] = convert_moe_packed_tensors(blocks, scales)
    safetensors.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(fields))
    return wanted


def test_packed_experts_are_read_and_written_as_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts that end inside rows; transformers loads what is written, and computes the same."""
    monkeypatch.setattr(mxfp4, "PART", 96)
    wanted = save_packed(tmp_path / "theirs")
    assert len(wanted) == 4
    run, out = made_run(tmp_path), made_hf(tmp_path)
    written, before = (safetensors.load_file(folder / "model.safetensors") for folder in (out, tmp_path / "theirs"))
    wanted |= {name: value for name, value in before.items() if not name.endswith(("_blocks", "_scales"))}
    assert written.keys() == wanted.keys()
    for name, value in wanted.items():
        assert written[name].dtype == torch.bfloat16 and torch.equal(written[name], value), name
    fields = json.loads((tmp_path / "theirs/config.json").read_text())
    del fields["quantization_config"]
    assert json.loads((out / "config.json").read_text()) == fields
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    require_equal_logits(our_logits(run, TOKENS), loaded, TOKENS)


def test_all_numbers_and_scales_of_the_format(tmp_path: Path) -> None:
    """Each byte with each scale, against the format's definition; a number too large for bf16 is infinite."""
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).repeat(1, 1, 16)
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 256, 1, 1)
    safetensors.save_file({"x_blocks": blocks, "x_scales": scales}, tmp_path / "x.safetensors")
    file = open_safetensors(tmp_path / "x.safetensors")
    one = Mxfp4File(file, file, "x_blocks")
    assert one.tensors["x_blocks"].shape == (1, 256, 512) and one.part_starts("x_blocks") == [0]
    with one.part("x_blocks", 0, 256 * 512, AlignedBuffers(1), past_cache=False) as values:
        found = values.view(256, 256, 2).double()
    for scale in (0, 1, 64, 127, 128, 252):
        for byte in range(256):
            for half, code in enumerate((byte % 16, byte // 16)):
                exponent, mantissa = code % 8 // 2, code % 2
                size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
                assert found[scale, byte, half] == (-1) ** (code // 8) * size * 2.0 ** (scale - 127)
    assert found[255].isnan().all() and found[254].isinf().any()
