"""A weight that is embedding and LM head: the CPU begins with the LM head's gradient, and no bit changes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gptpar
from gptpar.offload import buckets
from gptpar.offload.events import EventLog, What
from tests.any_module.case import engine_config
from tests.offload_log import logged, starts_of
from tests.unit.offload.host_optimizers import wait_until

VOCAB, WIDTH, STEPS = 4099, 320, 3
UNIT = "embedding.weight"


class Model(nn.Module):
    """A language model whose head may be called in pieces, and whose weight may be read in a third place.

    Args:
        calls: of the head in a forward pass.
        reads_weight: whether the loss has a term of the weight itself, which changes every row of its gradient.
    """

    def __init__(self, calls: int = 1, reads_weight: bool = False):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head.weight = self.embedding.weight
        self.calls, self.reads_weight = calls, reads_weight
        self.embedded: torch.Tensor | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedded = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        logits = torch.cat([self.head(part) for part in x.chunk(self.calls)])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        return loss + 1e-3 * self.embedding.weight.square().sum() if self.reads_weight else loss


def train(ratio: float, passes: int, log: EventLog | None = None, **options: bool | int) -> list[torch.Tensor]:
    """The losses, and the weights after some steps; the embedding's gradient comes after the speculation has begun."""
    torch.manual_seed(0)
    model = Model(**options).double()
    nn.init.normal_(model.embedding.weight, std=0.02)
    config = engine_config(ratio=ratio, accumulation=passes, gradient_clipping=1000.0)
    engine, *_ = gptpar.initialize(model=model, config=config)
    generator, losses = torch.Generator().manual_seed(1), []
    for number in range(STEPS * passes):
        loss = engine(torch.randint(VOCAB, (3, 9), generator=generator))
        if log is not None and (number + 1) % passes == 0:
            assert model.embedded is not None
            prepared = {event.start for event in log.of(What.PREPARED, unit=UNIT)}
            model.embedded.register_hook(
                lambda grad, mine=prepared: wait_until(lambda: mine <= starts_of(log, What.SPECULATION_BEGUN, UNIT))
            )
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    engine.close()
    return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]


@pytest.mark.parametrize(
    ("options", "passes", "ratio"),
    [({}, 1, 0.6), ({"calls": 3}, 2, 1.0), ({"reads_weight": True}, 2, 1.0)],
    ids=str,
)
def test_a_partial_gradient_changes_no_bit(
    ratio: float, passes: int, options: dict[str, bool | int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several buckets cut the weight, and each of them has rows that are looked up."""
    monkeypatch.setattr(buckets, "BUCKET_ELEMENTS", 300_007)
    expected = train(0.0, passes, **options)
    with logged() as log:
        got = train(ratio, passes, log, **options)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    number = len(log.of(What.PREPARED, unit=UNIT))
    assert number > 1 and len(log.of(What.SUBMITTED_PARTIAL, unit=UNIT)) == STEPS * number
    assert len(log.of(What.COMPLETION_BEGUN, unit=UNIT)) == STEPS * number  # the looked-up rows, or all of them
    assert not log.of(What.UPDATE_BEGUN, unit=UNIT)


def test_a_head_without_a_gradient_is_waited_for_by_nobody() -> None:
    """The head is called and its output is not used: the gradient comes from the embedding alone."""
    torch.manual_seed(0)
    model = Model().double()
    with logged() as log:
        engine, *_ = gptpar.initialize(model=model, config=engine_config(ratio=1.0, optimizer={"type": "AdamW"}))
        before = model.embedding.weight.detach().clone()
        engine(torch.arange(9).expand(3, 9))
        assert model.embedded is not None
        engine.backward(model.embedded.sum())
        engine.step()
        engine.close()
    assert not log.of(What.SUBMITTED_PARTIAL)
    moved = (model.embedding.weight.detach() != before).any(dim=1).nonzero().flatten().tolist()
    assert moved == list(range(8))
