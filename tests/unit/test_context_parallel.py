"""Which tokens a context-parallel rank has, how ranks see each other's, and what a GPU's kernel is given."""

from typing import Any, cast

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import gptpar.context_parallel as context_parallel
from gptpar.config.flags import parse_flags
from gptpar.config.sections import parallel
from gptpar.config.sections.parallel import groups_gathered
from gptpar.config.validate import resolve
from gptpar.context_parallel import ContextSplit, attend_by_gathering
from gptpar.data.loader import MicroBatch
from gptpar.model import head_exchange
from gptpar.model.core_attention import AttentionDropout, AttentionRule, core_attention
from gptpar.model.dropout import seed_fields, seeds_field
from gptpar.model.head_exchange import HeadExchange
from gptpar.plan.hardware import make_cluster
from gptpar.plan.job import Job
from gptpar.plan.timing import step_time
from gptpar.tensor_parallel.cost import Cost
from tests.one_by_one import OneByOne
from tests.pairs import every_pair
from tests.unit.model.plain_attention import use_plain_kernels

TINY = (
    "--num-layers 2 --hidden-size 64 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --vocab-size 90 "
    "--hidden-dropout 0 --eval-iters 0 --context-parallel-size 4"
)


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_divide_a_sample_and_see_equally_many_tokens_where_they_gather(size: int, gathers: bool) -> None:
    owners = [ContextSplit(size, rank, gathers) for rank in range(size)]
    places = [one.places(3, 16) for one in owners]
    assert sorted(torch.cat(places, 1).flatten().tolist()) == list(range(48))
    seen = {int((mine[0] + 1).sum()) for mine in places}
    assert len(seen) == (1 if gathers else size)
    assert all(
        torch.equal(mine, places[rank][:1] + torch.tensor([[0], [16], [32]])) for rank, mine in enumerate(places)
    )


def test_a_rank_s_tokens_keep_their_positions_and_the_whole_count() -> None:
    tokens = torch.arange(16).view(2, 8)
    mask = torch.tensor([[1.0] * 8, [1.0] * 3 + [0.0] * 5])
    cu_seqlens = torch.tensor([0, 3, 8, 16], dtype=torch.int32)
    own = ContextSplit(2, 1, True).own_batch(MicroBatch(tokens, tokens + 1, mask, cu_seqlens=cu_seqlens))
    assert own.tokens_BS.tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert own.labels_BS.tolist() == [[3, 4, 5, 6], [11, 12, 13, 14]]
    assert own.position_ids_BS is not None and own.position_ids_BS.tolist() == [[2, 3, 4, 5]] * 2
    assert own.cu_seqlens is cu_seqlens and own.num_counted == 11 / 2


WHOLE = "--seq-length 64 --attention-dropout 0"
DROPOUT = "--seq-length 64 --attention-dropout 0.1"
WINDOWS = f"{WHOLE} --window-size 16 --bf16"


@pytest.mark.parametrize(
    ("flags", "way", "reason"),
    [
        (f"--num-attention-heads 8 {WINDOWS}", "a2a", "16 by a2a, 48 by allgather"),
        (f"--num-attention-heads 8 --num-query-groups 1 {WINDOWS}", "allgather", "12 by a2a, 6 by allgather"),
        (f"--num-attention-heads 8 --num-query-groups 1 {WHOLE} --bf16", "a2a", "whole samples have a faster kernel"),
        (f"--num-attention-heads 8 --num-query-groups 1 {WHOLE}", "a2a", "a mask in memory without --bf16"),
        (f"--num-attention-heads 2 {WHOLE}", "allgather", "2 heads do not divide over 4"),
        (f"--num-attention-heads 8 --num-query-groups 4 {DROPOUT}", "a2a", "for all tokens"),
        (f"--num-attention-heads 8 --num-query-groups 2 {DROPOUT}", "allgather", "groups"),
        ("--num-attention-heads 4 --num-query-groups 1 --seq-length 60 --attention-dropout 0", "a2a", "8 chunks"),
    ],
)
def test_auto_takes_what_is_possible_and_sends_less(flags: str, way: str, reason: str) -> None:
    config, derived = resolve(parse_flags([*TINY.split(), *flags.split()]), 4)
    assert config.parallel.cp_comm_type == way
    assert reason in next(one.reason for one in derived if one.name == "cp comm type")


WAYS = ["masks", "masks, sinks", "kernel", "kernel, sinks", "dropout"]


def rule_of(way: str, starts: list[int] | None, window: int | None, heads: int, groups: int) -> AttentionRule:
    """Dropout is that of a tensor rank whose groups are not the first."""
    seeds = seed_fields(["layers.0"], 1234, 3, 1, torch.device("cpu"))[seeds_field("layers.0")]
    return AttentionRule(
        cu_seqlens=None if starts is None else torch.tensor([*starts, *[32] * 3], dtype=torch.int32),
        dropout=AttentionDropout(0.3, seeds, groups, 2 * groups) if way == "dropout" else None,
        window=window,
        scale=0.3,
        sinks_H=torch.randn(heads, dtype=torch.float64, requires_grad=True) if "sinks" in way else None,
    )


def note_gathered(monkeypatch: pytest.MonkeyPatch) -> list[StorageWeakRef]:
    """The storages of all keys and values that are gathered."""
    gathered: list[StorageWeakRef] = []

    def noted(*args: Any, gather: Any = context_parallel._gathered) -> list[torch.Tensor]:
        found: list[torch.Tensor] = gather(*args)
        gathered.extend(StorageWeakRef(x.untyped_storage()) for x in found)
        return found

    monkeypatch.setattr(context_parallel, "_gathered", noted)
    return gathered


@every_pair(
    divided=[(2, 4, 2, 1), (2, 6, 3, 2), (4, 4, 4, 4), (4, 2, 1, 1)],
    starts=[None, [0, 3, 4, 5, 16, 20, 31], [*range(32)]],
    window=[None, 5],
    way=WAYS,
)
def test_keys_and_values_are_gathered_again(
    monkeypatch: pytest.MonkeyPatch,
    divided: tuple[int, int, int, int],
    starts: list[int] | None,
    window: int | None,
    way: str,
) -> None:
    """Outputs and gradients are those of one process, and of others' tokens nothing is kept for the backward pass."""
    size, heads, groups, at_once = divided
    monkeypatch.setattr(parallel, "MAX_GATHERED_BYTES", at_once * 2 * 2 * 16 * 8 * 8)
    whole = [torch.randn(2, n, 16, 8, dtype=torch.float64, requires_grad=True) for n in (heads, groups, groups)]
    rule = rule_of(way, starts, window, heads, groups)
    sinks = [] if rule.sinks_H is None else [rule.sinks_H]
    wanted = core_attention(whole[0], whole[1], whole[2], rule)
    grad = torch.randn_like(wanted)
    d_q, d_k, d_v, *d_sinks = torch.autograd.grad(wanted, [*whole, *sinks], grad)
    if way.startswith("kernel"):
        monkeypatch.setattr(context_parallel, "has_varlen_kernel", lambda *shape: True)
        use_plain_kernels(monkeypatch)
    ranks = OneByOne(size, whole[1].detach(), whole[2].detach())
    ranks.exchange(monkeypatch)
    gathered = note_gathered(monkeypatch)
    sums = [torch.zeros_like(one) for one in sinks]
    for split in ranks.splits:
        ranks.rank, places = split.rank, split.places(1, 16)[0]
        q, k, v = (x.detach()[:, :, places].requires_grad_() for x in whole)
        y = attend_by_gathering(split, cast(Any, ranks), q, k, v, rule)
        assert gathered and all(one.expired() for one in gathered)
        torch.testing.assert_close(y, wanted[:, :, places], rtol=1e-12, atol=1e-12)
        for _ in range(2):  # a graph can be used again
            found, *of_sinks = torch.autograd.grad(y, [q, *sinks], grad[:, :, places], retain_graph=True)
            torch.testing.assert_close(found, d_q[:, :, places], rtol=1e-12, atol=1e-12)
            sums = [x + y / 2 for x, y in zip(sums, of_sinks, strict=True)]
    for found, d in zip([*ranks.gradients() / 2, *sums], (d_k, d_v, *d_sinks), strict=True):
        torch.testing.assert_close(found, d, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("groups", "megabytes", "at_once"), [(8, 64, 4), (8, 256, 1), (8, 300, 1), (6, 60, 3), (3, 1, 3)]
)
def test_groups_are_gathered_in_equal_parts(groups: int, megabytes: int, at_once: int) -> None:
    assert groups_gathered(groups, megabytes << 20) == at_once


def test_what_attention_has_of_others_tokens_is_in_the_plan() -> None:
    """Copies of groups are kept by a2a; by allgather nothing is, but buffers of all tokens come and go."""
    shape = "--num-attention-heads 8 --seq-length 4096 --bf16"

    def planned(flags: str) -> tuple[float, Cost, float]:
        config, _ = resolve(parse_flags([*TINY.split(), *shape.split(), *flags.split()]), 4)
        job = Job(config, config.parallel.mesh(4))
        assert job.tokens == 1024 and job.num_copies == 4
        block = next(number for number in job.layers.blocks)
        return job.kept(block), job.costs[block], step_time(job, make_cluster("h100", "bf16")).total

    for groups, copies in ((4, 0), (2, 2)):
        flags = f"--num-query-groups {groups} --attention-dropout 0 --cp-comm-type"
        by_heads, by_gathering = planned(f"{flags} a2a"), planned(f"{flags} allgather")
        assert by_heads[0] - by_gathering[0] == 1024 * 2 * copies * 8 * 2
        assert by_gathering[1].workspace - by_heads[1].workspace == 4 * 2 * groups * 8 * 2 * 4
        assert by_heads[2] > 0 and by_gathering[2] > 0
    flags = "--num-query-groups 2 --cp-comm-type allgather --attention-dropout"
    (kept, cost, time), (kept_of_all, of_all, longer) = planned(f"{flags} 0"), planned(f"{flags} 0.1")
    assert of_all.attention == cost.attention and longer > time
    assert of_all.masked + of_all.attention == 4 * (cost.masked + cost.attention)
    assert kept_of_all - kept == 1024 * 2 * 8 * 8 * 2 * 3


@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 4, 2), (8, 2, 2), (8, 2, 4), (16, 12, 2)])
def test_attention_by_heads_copies_no_message(
    monkeypatch: pytest.MonkeyPatch, heads: int, groups: int, size: int
) -> None:
    in_order, read = [], []

    def each_gets_its_own_back(x: torch.Tensor, group: Any) -> torch.Tensor:
        in_order.append(x.is_contiguous())
        return x.clone(memory_format=torch.contiguous_format)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        read.extend([q, k, v])
        return torch.empty_like(q).copy_(q)  # as kernels allocate it: in the order of the queries' strides

    monkeypatch.setattr(head_exchange, "all_to_all", each_gets_its_own_back)
    monkeypatch.setattr(head_exchange, "core_attention", attention)
    exchange = HeadExchange(size, 0, None, heads, groups)
    q, k, v = (torch.randn(1, n, 6, 8, dtype=torch.float64).requires_grad_() for n in (heads, groups, groups))
    y = exchange.unpack(exchange.attend(exchange.pack(q, k, v)))
    assert len({x.untyped_storage().data_ptr() for x in read}) == 1
    assert [x.shape[1] for x in read] == [heads // size, *[max(1, groups // size)] * 2]
    grad = torch.randn_like(y)
    assert torch.equal(y, q) and torch.equal(torch.autograd.grad(y, q, grad)[0], grad)
    assert in_order == [True, True, False, True]  # y's gradient is copied
