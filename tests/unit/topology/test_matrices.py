"""How a parameter divides into logical matrices, and comes together again."""

import pytest
import torch

from gptpar.topology.matrices import WHOLE, Interleaved, Matrices

GROUPS = Interleaved((6, 2, 2), 2)
GATED = Interleaved((6, 2, 2, 6), 2)


@pytest.mark.parametrize(
    ("matrices", "full", "shapes"),
    [
        (WHOLE, (5, 7), ((1, 5, 7),)),
        (WHOLE, (2, 5, 7), ((2, 5, 7),)),
        (WHOLE, (3, 2, 5, 7), ((6, 5, 7),)),
        (GROUPS, (30, 7), ((1, 18, 7), (1, 6, 7), (1, 6, 7))),
        (GATED, (32, 3), ((1, 12, 3), (1, 4, 3), (1, 4, 3), (1, 12, 3))),
        (GROUPS.heads, (30, 7), ((15, 2, 7),)),
    ],
)
def test_a_parameter_is_what_its_matrices_were(
    matrices: Matrices, full: tuple[int, ...], shapes: tuple[tuple[int, int, int], ...]
) -> None:
    whole = torch.randn(full)
    batches = matrices.split(whole)
    assert matrices.shapes(whole.shape) == shapes == tuple(tuple(batch.shape) for batch in batches)
    assert torch.equal(matrices.join(batches, whole.shape), whole)
    assert sum(view.numel() for view in matrices.views(whole)) == whole.numel()


def test_blocks_of_one_kind_are_one_matrix() -> None:
    rows = torch.arange(30.0)[:, None].expand(30, 4).contiguous()
    q, k, v = GROUPS.split(rows)
    assert q[0, :, 0].tolist() == [*range(6), *range(10, 16), *range(20, 26)]
    assert k[0, :, 0].tolist() == [6, 7, 16, 17, 26, 27] and v[0, :, 0].tolist() == [8, 9, 18, 19, 28, 29]
    assert GROUPS.heads.split(rows)[0][4, :, 0].tolist() == [8, 9]


def test_views_of_a_part_with_whole_blocks_are_parts_of_the_matrices() -> None:
    whole = torch.randn(30, 4)
    for kind, view in zip(GROUPS.split(whole), GROUPS.views(whole[10:20]), strict=True):
        assert torch.equal(view.reshape(-1, 4), kind[0].chunk(3)[1])


def test_which_split_dims_divide_matrices() -> None:
    assert [WHOLE.divides(dim, 3) for dim in range(3)] == [False, True, True]
    assert [GROUPS.divides(dim, 2) for dim in range(2)] == [True, True]
    assert [GROUPS.heads.divides(dim, 2) for dim in range(2)] == [False, True]
