"""Trains a Hugging Face GPT-2, unchanged, with ZeRO-3 and everything in host memory.

python examples/any_module.py
torchrun --nproc-per-node 2 examples/any_module.py
python -m gptpar check-layouts --module examples/any_module.py:make --nproc 2    # is it the same as plain PyTorch?
"""

from pathlib import Path

import torch

import gptpar

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}},
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    },
}
TEXT = torch.tensor(list(Path(__file__).read_bytes()))  # this file, a byte a token


def make_model():
    """A small GPT-2; without transformers, a layer that guesses the next byte from the last one."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        return Bigrams()
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 32, "vocab_size": 256}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0))


class Bigrams(torch.nn.Module):
    """Called as transformers' models are."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(256, 64), torch.nn.Linear(64, 256)

    def forward(self, input_ids, labels):
        logits = self.head(self.embedding(input_ids[:, :-1]))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())}


def make_batch(number):
    """Keyword arguments of the model: pieces of the text, others for each number."""
    starts = torch.randint(len(TEXT) - 32, (8, 1), generator=torch.Generator().manual_seed(number))
    x = TEXT[starts + torch.arange(32)]
    return {"input_ids": x, "labels": x}


def make():
    """What the command line's ``--module`` takes."""
    return make_model(), make_batch


def main():
    """Forty steps."""
    torch.manual_seed(0)
    engine, *_ = gptpar.initialize(model=make_model(), config=CONFIG)
    processes, rank = engine.topology.mesh.data, engine.topology.rank
    for step in range(40):
        batch = make_batch(step * processes + rank)
        loss = engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()})["loss"]
        engine.backward(loss)
        engine.step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    engine.close()


if __name__ == "__main__":
    main()
