"""A run that needs far more memory of its machine than is free is refused before anything is allocated."""

from types import SimpleNamespace

import pytest
import torch

from gptpar.config import Config
from gptpar.errors import GptparError
from gptpar.run import banner
from gptpar.run.banner import host_need, refuse_what_cannot_fit
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import Mesh
from tests.helpers import tiny_config

OFFLOADED = "--cpu-optimizer --cpu-optimizer-ratio 1"


def config_of(flags: str) -> Config:
    return tiny_config(f"--hidden-size 256 --num-layers 4 {flags}")


@pytest.mark.parametrize(
    ("device", "flags", "need", "remedy"),
    [
        ("cpu", "", 53.79, "lower --micro-batch-size 2, add --recompute-granularity full, or put the optimizer's"),
        ("cuda", f"{OFFLOADED} --offload-speculation off", 1060.4, "a lower --cpu-optimizer-ratio"),
    ],
)
def test_a_run_far_too_large_for_its_host_is_refused_with_numbers(
    device: str, flags: str, need: float, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The 3.2 million parameters take 48.5 MiB of states, on a GPU beside 1 GiB of pinned memory.

    A run whose expected need exceeds what is free by less than the expectation's error is let go on.
    """
    config = config_of(flags)
    topology = Topology(Mesh(), 0, torch.device(device))
    found = host_need(config, topology) / (1 << 20)
    assert found == pytest.approx(need, rel=0.02)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1 << 40))
    monkeypatch.setattr(banner, "free_swap", lambda: 1 << 20)
    free = int((found / 1.1 - 1) * (1 << 20))
    monkeypatch.setattr(banner, "available_memory", lambda: free + 1000)
    refuse_what_cannot_fit(config, topology)
    monkeypatch.setattr(banner, "available_memory", lambda: free - 1000)
    with pytest.raises(GptparError) as error:
        refuse_what_cannot_fit(config, topology)
    said = str(error.value)
    assert f"of this machine's memory (1 process), and {found / 1.1:.2f} MiB are free: " in said and remedy in said
    refuse_what_cannot_fit(config.update("logging", skip_train=True), topology)


def test_processes_of_one_machine_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("").update("batch", global_batch_size=8)
    alone = host_need(config, Topology(Mesh(), 0, torch.device("cpu")))
    for rank, (place, count), times in ((1, (1, 2), 2), (0, (0, 2), 2), (1, (0, 1), 1)):
        monkeypatch.setattr(banner, "place_on_machine", lambda place=(place, count): place)
        two = host_need(config, Topology(Mesh(data=2), rank, torch.device("cpu")))
        assert two == pytest.approx(times * alone, rel=0.05)
