"""Kernels summed up by kind."""

from gptpar.cli.benchmark.breakdown import break_down, table
from gptpar.reporting.trace import COMMUNICATION, kind_of


def test_two_steps_are_broken_down() -> None:
    """20 ms: computation in 0-6 and 10-14, communication in 4-8 (2 exposed) and 12-13 (hidden), a copy at 18-20."""
    kernels = [
        ("nvjet_a", 0.0, 6.0),
        ("nccl_b", 4.0, 8.0),
        ("triton_c", 10.0, 14.0),
        ("nccl_d", 12.0, 13.0),
        ("Memcpy", 18.0, 20.0),
    ]
    found = break_down(kernels, steps=2)
    assert found.kinds == {"matrix products": 3, COMMUNICATION: 2.5, "compiled pointwise": 2, "copies": 1}
    assert (found.step, found.computing, found.exposed, found.idle) == (10, 6, 1, 3)
    lines = table([found, found]).splitlines()
    assert lines[-1].split() == ["not", "computing,", "share", "40.0%", "40.0%"]
    assert [line for line in lines if line.startswith("nothing running")][0].split()[-2:] == ["3.0", "3.0"]


def test_the_projects_own_kernels_are_named() -> None:
    kinds = {
        "matrix products": ["_symmetric", "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT"],
        "optimizer": ["_update", "_numbers", "void at::native::reduce_kernel<512, 1, at::native::NormTwoOps>norm_"],
        "own kernels": ["_norm_backward", "_add", "_loss_and_grad", "_scatter", "_weighted_backward", "_activate"],
        "routing of experts": ["_scatter_gather_elementwise_kernel"],
        "compiled pointwise": ["triton_red_fused__fused_rms_norm_add_5"],
    }
    assert {kind: [name for name in names if kind_of(name) != kind] for kind, names in kinds.items()} == dict.fromkeys(
        kinds, []
    )
