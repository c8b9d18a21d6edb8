"""docs/extending.md, "An elementwise optimizer": its code, trained at several ratios beside its plain formula."""

import re
from pathlib import Path
from typing import Any

import pytest

from gptpar.config.sections.optimizer import OptimizerConfig
from gptpar.optim.elementwise import ElementwiseOptimizer
from gptpar.optim.optimizers import OPTIMIZERS
from tests.unit.optim.plain_runs import COMMON, assert_follows, momentum

PAGE = Path(__file__).parents[3] / "docs" / "extending.md"


def blocks() -> list[str]:
    section = PAGE.read_text().split("## An elementwise optimizer\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


@pytest.fixture
def optimizer(monkeypatch: pytest.MonkeyPatch) -> str:
    """The page's optimizer, as its three pieces of code make it known: its name."""
    module, registry, flag = blocks()
    names: dict[str, Any] = {}
    exec(module, names)
    exec(registry, {**names, "ADAMW": OPTIMIZERS["adam"], "LION": OPTIMIZERS["lion"]}, found := {})
    made: ElementwiseOptimizer = found["OPTIMIZERS"]["momentum"]
    monkeypatch.setitem(OPTIMIZERS, "momentum", made)
    ((name, default),) = re.findall(r"(\w+): float = flag\(([\d.]+),", flag)
    assert (name,) == made.flags and '"momentum")' in flag
    monkeypatch.setattr(OptimizerConfig, name, float(default), raising=False)
    return "momentum"


@pytest.mark.parametrize("ratio", [0.3, pytest.param(1.0, marks=pytest.mark.slow)])
def test_the_page_s_optimizer_follows_its_plain_formula(optimizer: str, ratio: float) -> None:
    flags = f"--no-pipeline-parallel --cpu-optimizer --cpu-optimizer-ratio {ratio}"
    assert_follows([*COMMON, "--num-layers", "2"], flags, momentum(), optimizer)
