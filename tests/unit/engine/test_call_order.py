"""Which layers' parameters are brought while another layer runs."""

from gptpar.engine.call_order import CallOrder, call_order

BLOCKS = [f"block{number}" for number in range(5)]
NAMES = ["embedding", *BLOCKS, "norm", "head"]
SIZES = {"embedding": 25, "norm": 1, "head": 25, **dict.fromkeys(BLOCKS, 10)}


def test_layers_ahead_have_as_many_bytes_as_the_largest() -> None:
    order = call_order([NAMES], SIZES)
    assert order.following["embedding"] == BLOCKS[:3]
    assert order.following["block2"] == ["block3", "block4", "norm", "head"]
    assert order.following["block4"] == ["norm", "head"]
    assert order.following["head"] == []
    assert call_order([BLOCKS], SIZES).following["block1"] == ["block2"]


def test_the_first_layer_and_those_that_stay_are_not_brought_amid_a_pass() -> None:
    tied = call_order([["embedding", *BLOCKS, "norm", "embedding"]], SIZES)
    assert tied.following["embedding"] == ["block0"]
    assert tied.following["block4"] == ["norm", "embedding"]
    root = call_order([["embedding", *BLOCKS, "head"]], SIZES, stays=["head"])
    assert root.following["block1"] == ["block2"]


def test_a_lookup_is_started_with_the_layer_behind_it() -> None:
    order = call_order([NAMES], SIZES, lookups=["embedding"])
    assert order.previous["block1"] == ["block0", "embedding"]
    assert order.previous["block2"] == ["block1"]
    assert order.previous["block0"] == ["embedding"]
    assert order.previous["embedding"] == []
    assert call_order([NAMES], SIZES).previous["block1"] == ["block0"]


def test_each_virtual_stage_has_its_own_last_layer() -> None:
    order = call_order([["a", "b"], ["c", "d"]], dict.fromkeys("abcd", 1), stays=["a"])
    assert order.last == {"a", "b", "d"}
    assert order.following == {"a": ["b"], "b": [], "c": ["d"], "d": []}
    assert call_order([], {}) == CallOrder(last=frozenset())


def test_a_tied_layer_is_followed_as_at_its_first_call() -> None:
    order = call_order([["embedding", "block0", "embedding"]], SIZES)
    assert order.following["embedding"] == ["block0"]
    assert order.previous["embedding"] == ["block0"]
