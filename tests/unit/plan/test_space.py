"""The space of layouts: what is enumerated, how a candidate is applied and printed, and what stays as it was typed."""

from argparse import ArgumentTypeError, Namespace

import pytest

from gptpar.cli.check_layouts import SMALL, _chosen
from gptpar.config import Flags
from gptpar.config.flags import parse_flags
from gptpar.errors import ConfigError
from gptpar.plan.space import dimensions as d
from gptpar.plan.space.candidate import Candidate
from gptpar.plan.space.pairwise import pairwise
from gptpar.plan.space.spaces import SweepValues, to_measure, to_predict, to_prove, to_prove_of_a_module
from gptpar.topology.mesh import Mesh

WORDS = [*SMALL.split(), "--fp64"]


def typed(words: list[str]) -> Flags:
    parsed = parse_flags(words)
    assert not parsed.problems
    return parsed.flags


@pytest.mark.slow
def test_flags_say_what_is_applied() -> None:
    """With every pair of values: what one says does not depend on a third."""
    plain = typed(WORDS)
    for candidate in pairwise(list(to_prove(plain, 4))):
        assert typed([*WORDS, *candidate.flags]) == candidate.applied_to(plain), candidate.name


def test_every_layout_is_proved_in_every_way() -> None:
    assert [len(list(to_prove(typed(WORDS), n))) for n in (1, 2, 4)] == [15, 208, 988]
    names = [candidate.name for candidate in to_prove(typed(WORDS), 4)]
    assert len(set(names)) == 988 and names[0] == "dp4 x tp1 x pp1, ZeRO-0"
    assert "dp2 x tp2 x pp1, ZeRO-3, sequence parallel, all on the CPU" in names
    assert "dp1 x tp2 x pp2, interleaved, every 2" in names


def test_few_combinations_have_every_pair() -> None:
    every = list(to_prove(typed(WORDS), 2))
    few = pairwise(every)
    assert len(few) == 57 and few == [one for one in every if one in few]

    def pairs(candidates: list[Candidate]) -> set[tuple[object, ...]]:
        names = sorted({name for one in every for name in one.changes})
        values = [[(name, one.changes.get(name)) for name in names] for one in candidates]
        return {(a, b) for one in values for a in one for b in one}

    assert pairs(few) == pairs(every)
    several = [Candidate({"batch.micro_batch_size": size}, str(size), Mesh()) for size in (1, 2)]
    assert pairwise(several) == several and pairwise(several[:1]) == several[:1]  # they differ in one field


def test_what_the_model_does_not_allow_is_left_out_with_the_reason() -> None:
    """Four heads for eight tensor ranks, or for more ranks that exchange them; ten layers for sixteen stages."""
    chosen = _chosen(WORDS, 8, Namespace(only="every 2", pairwise=False))
    kept, told = {case.name for case, _ in chosen.cases}, [*chosen.left_out.values()]
    every = {one.name for one in to_prove(typed(WORDS), 8) if "every 2" in one.name}
    exchanged = [names for names in told if "cp" in names[0]]
    assert {name.split(",")[0] for names in exchanged for name in names if " a2a" in name} == {
        f"dp1 x tp{8 // size} x pp1 x cp{size}" for size in (2, 4, 8)
    }
    assert [names for names in told if names not in exchanged] == [
        ["dp1 x tp1 x pp8, interleaved, every 2"],
        ["dp1 x tp8 x pp1, every 2", "dp1 x tp8 x pp1, sequence parallel, every 2"],
    ]
    assert kept == every - {name for names in told for name in names} and len(every) == 216
    with pytest.raises(ConfigError, match="tp8 x pp1, every 2: --num-attention-heads 4 is not divisible"):
        _chosen(WORDS, 8, Namespace(only="tp8 x pp1, every 2", pairwise=False))


def test_a_search_looks_at_everything_that_is_not_typed() -> None:
    """4 GPUs: 6 layouts; with data parallelism 4 ZeRO stages, with a pipeline 3 schedules; 6 batches, twice."""
    every = list(to_predict(Flags(), set(), 4, 8))
    assert len(every) == 6 * 2 * (4 + 4 + 1 + 3 * 4 + 3 + 3)
    assert every[0].name == "tp1, pp1, virtual stages 1, ZeRO-0, micro-batch 1"
    config = typed(["--tensor-model-parallel-size", "2", "--zero-stage", "1", "--micro-batch-size", "4"])
    given = {d.TENSOR, d.ZERO_STAGE, d.MICRO_BATCH}
    few = list(to_predict(config, given, 4, 8))
    assert {one.mesh for one in few} == {Mesh(2, 2, 1), Mesh(1, 2, 2)}
    assert not given & {name for one in few for name in one.changes}
    assert {one.name for one in few} == {
        f"pp{pp}, virtual stages {chunks}{recompute}"
        for pp, chunks in ((1, 1), (2, 1), (2, 2), (2, 4))
        for recompute in ("", ", recompute full")
    }


def test_a_search_and_a_sweep_try_every_size_of_the_expert_axis() -> None:
    """Divisors of the number of experts and of data x context, unless one is typed."""
    experts = typed(["--num-experts", "6", "--context-parallel-size", "2"])
    at_first = [one for one in to_predict(experts, set(), 8, 8) if (one.mesh.tensor, one.mesh.pipeline) == (1, 1)]
    assert {one.mesh.expert for one in at_first} == {1, 2} and at_first[-1].changes[d.EXPERT] == 2
    assert {one.mesh.expert for one in to_predict(experts, {d.EXPERT}, 8, 8)} == {1}
    swept = list(to_measure(experts, {d.TENSOR, d.PIPELINE}, 12, SweepValues()))
    assert [one.mesh.expert for one in swept] == [1, 2, 3, 6]
    listed = SweepValues(layouts=[d.layout_sizes(text) for text in ("dp4ep2", "dp2cp2ep4")])
    assert [one.mesh for one in to_measure(experts, set(), 4, listed)] == [
        Mesh(4, expert=2),
        Mesh(2, context=2, expert=4),
    ]
    with pytest.raises(ConfigError, match="a layout has ep4, which does not divide dp2 x cp1: choose"):
        list(to_measure(experts, set(), 4, SweepValues(layouts=[d.layout_sizes("dp2ep4")])))


def test_a_search_gives_long_samples_a_context_axis() -> None:
    """With 4 GPUs: cp 2 where a rank keeps 2,048 tokens, cp 4 where the whole world does; one that is typed stays."""

    def sizes(words: list[str], given: set[str]) -> set[tuple[int, ...]]:
        found = to_predict(typed(words), given, 4, 8)
        return {(at.mesh.data, at.mesh.tensor, at.mesh.pipeline, at.mesh.context) for at in found}

    length = {"model.seq_length"}
    assert {at[3] for at in sizes(["--preset", "124M"], set())} == {1}
    four = sizes(["--seq-length", "4096"], length)
    assert {at for at in four if at[3] > 1} == {(2, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2)}
    assert (1, 1, 1, 4) in sizes(["--seq-length", "8192"], length) and (1, 1, 1, 4) not in four
    words = ["--seq-length", "8192", "--context-parallel-size", "2"]
    assert {at[3] for at in sizes(words, {*length, d.CONTEXT})} == {2}


def test_one_gpu_may_recompute_parts_and_leave_the_rest_to_the_host() -> None:
    every = list(to_predict(typed(["--num-layers", "8"]), {"model.num_layers", d.MICRO_BATCH}, 1, 8))
    assert [one.name.partition("recompute ")[2] for one in every] == [
        *("", "layernorm mlp_act", "layernorm mlp"),
        *(f"layernorm mlp, {count} blocks on the host" for count in (2, 4, 6, 8)),
        *("full", "full, inputs on the host"),
    ]
    assert len(list(to_predict(typed(["--num-layers", "1"]), {d.MICRO_BATCH}, 1, 8))) == 6
    given = {d.MICRO_BATCH, "recompute.recompute_granularity"}
    assert len(list(to_predict(typed(["--recompute-granularity", "full"]), given, 1, 8))) == 1


def test_a_module_is_proved_with_every_stage_and_offload() -> None:
    assert [len(list(to_prove_of_a_module(n))) for n in (1, 2)] == [4, 16]
    assert list(to_prove_of_a_module(2))[-1].name == "2 processes, ZeRO-3, all on the CPU"


def test_a_layout_names_each_axis_once() -> None:
    with pytest.raises(ArgumentTypeError, match="dp2dp4 names dp more than once"):
        d.layout_sizes("dp2dp4")
