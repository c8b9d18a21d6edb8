"""Workers die in every way there is: the run goes on by itself, and its numbers are those of an undisturbed one."""

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gptpar.checkpoint import load_meta
from gptpar.cli.launch.memory import KEPT, OWNER, PREFIX
from gptpar.system.processes import Process
from tests.e2e.commands import Started, said_by, words
from tests.e2e.recovery_runs import environment_with, run

MEMORY = Path("/dev/shm")
SAVES = "--nproc-per-node 2 --train-iters 24 --global-batch-size 4 --save-interval 8"
# A save behind the training may be cut off by the death after it, and which one is whole would be chance.
RESTARTS = "--max-restarts 8 --mirror-interval 3 --hang-seconds 4 --no-async-save"
KILLED = "was killed by SIGKILL, as Linux does to the largest process when memory is full, while it was at"
# Each is met once, for the next start of the workers has another number.
EVERY_FAULT = """
if at == (0, 1, 5): os.kill(me, signal.SIGKILL)
if at == (1, 0, 7): os.kill(me, signal.SIGSEGV)
if at == (2, 1, 10): os.kill(me, signal.SIGSTOP)
if at == (3, 1, 13): raise RuntimeError("a device has fallen off the bus")
if at == (4, 0, 0): os.kill(me, signal.SIGKILL)
if at == (5, 1, 17): os.kill(me, signal.SIGTERM); os.kill(me, signal.SIGKILL)
"""
LAYOUTS = {
    "pp2": "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "zero3": "--zero-stage 3 --no-pipeline-parallel --cpu-optimizer --cpu-optimizer-ratio 0.5",
}


@pytest.fixture(autouse=True)
def nothing_stays_in_memory() -> Iterator[None]:
    """Other runs of this machine may have folders there, too."""
    before = set(MEMORY.glob(f"{PREFIX}*"))
    yield
    new = set(MEMORY.glob(f"{PREFIX}*")) - before
    for folder in new:
        if (folder / KEPT).exists():
            shutil.rmtree(folder)
        else:
            assert Process.from_dict(json.loads((folder / OWNER).read_text())).is_alive()


@pytest.mark.parametrize("layout", ["zero3", pytest.param("pp2", marks=pytest.mark.long)])
def test_a_run_that_met_every_fault_is_the_undisturbed_one(tmp_path: Path, layout: str) -> None:
    flags = f"{SAVES} {LAYOUTS[layout]}"
    undisturbed = run(flags, tmp_path, "undisturbed")
    done = run(f"{flags} {RESTARTS}", tmp_path, "faults", EVERY_FAULT)
    assert done.code == 0, "\n".join([done.said, *done.errors])
    told = [line for line in done.errors if line.startswith("restart ")]
    assert [line.split(":")[0] for line in told] == [f"restart {number} of 8" for number in range(1, 7)]
    assert f"rank 1 {KILLED} iteration 5" in told[0] and "rank 0 was killed by SIGSEGV" in told[1]
    assert re.search(r"rank 1 is stopped at iteration 10, .* shown a sign of life for [45] s$", told[2]), told[2]
    assert "rank 1 ended with exit code 1 while it was at iteration 13" in told[3]
    assert f"rank 0 {KILLED} start-up" in told[4] and f"rank 1 {KILLED} iteration 17" in told[5]
    loaded = re.findall(r"loaded (\S+)/iter_\d+ \(iteration (\d+)\)", done.said)
    assert [int(iteration) for _, iteration in loaded] == [3, 6, 9, 12, 16]
    assert [Path(folder).parent == MEMORY for folder, _ in loaded] == [True, True, True, True, False]
    took = r"restart \d of 8 took .* \(noticed .*, ended .*, started .*, built .*, loaded .*\)"
    assert len(re.findall(took, done.said)) == 5
    assert done.losses() == undisturbed.losses() and done.state() == undisturbed.state()
    assert done.restarts() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3 + [5] * 4 + [6] * 8


# The request reaches a worker once more when its run has ended, as the launcher sends it to one that begins later.
ENDS = """
if at == (0, 1, 7): os.kill(me, signal.SIGKILL)
if place == "load" and restart == 1:
    import atexit, time
    atexit.register(os.kill, me, signal.SIGTERM)
    print("LOADING", flush=True)
    time.sleep(2)
"""


def test_a_request_to_stop_during_a_restart_saves_what_was_in_memory(tmp_path: Path) -> None:
    flags = "--nproc-per-node 2 --train-iters 100000 --lr-decay-style constant --max-restarts 1 --mirror-interval 3"
    flags += " --no-async-save"  # the copy of iteration 6 is whole at the death
    process = Started(words(f"{flags} --save {tmp_path}/run"), environment_with(ENDS, tmp_path / "site"))
    seen = []
    for line in process.stdout:
        seen.append(line)
        if "LOADING" in line:
            os.kill(process.pid, signal.SIGTERM)
            break
    seen += process.stdout.readlines()
    assert process.wait(timeout=60) == 143, "".join(seen)
    assert load_meta(tmp_path / "run")["progress"]["iteration"] >= 7, "".join(seen)


SCRIPT = """
import json, os, signal, sys
import torch
import gptpar

folder, killed = sys.argv[1], sys.argv[2] == "killed"
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3},
}
engine, *_ = gptpar.initialize(model=model, config=config)
engine.load_checkpoint(folder)
rank, start = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
while engine.global_steps < 12:
    step = engine.global_steps  # the position in the data follows from it
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(step))[rank]
    loss = (engine(x) - x).square().mean()
    engine.backward(loss)
    engine.step()
    if killed and (start, rank, engine.global_steps) in {("0", 1, 7), ("1", 0, 10)}:
        os.kill(os.getpid(), signal.SIGKILL)
    if engine.global_steps % 3 == 0:
        engine.save_checkpoint(folder)
"""


def test_any_module_goes_on_through_the_launcher(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    states = []
    for how, restarts in (("killed", 2), ("undisturbed", 0)):
        given = f"launch --standalone --nproc-per-node 2 --max-restarts 3 {script} {tmp_path / how} {how}"
        said = said_by(given.split())
        assert said.count("restart ") == restarts, said
        path = tmp_path / how / "iter_0000012"
        states.append({file.name: file.read_bytes() for file in path.glob("*.bin")})
    assert states[0] == states[1] and states[0]


LISTENS = r"""
import os, sys, time
from pathlib import Path
port = int(os.environ["MASTER_PORT"])
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
table = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
mine = {os.readlink(f"/proc/{pid}/fd/{fd}") for pid in (os.getpid(), os.getppid())
        for fd in os.listdir(f"/proc/{pid}/fd") if os.path.exists(f"/proc/{pid}/fd/{fd}")}
for row in table:
    if row[3] == "0A" and f"socket:[{row[9]}]" in mine:
        address, number = row[1].split(":")
        os.write(1, f"listens {address} {int(number, 16) == port}\n".encode())  # at once: the other writes there, too
dist.barrier()
"""


def test_workers_of_one_machine_listen_there_alone(tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text(LISTENS)
    said = said_by(["launch", "--nproc-per-node", "2", f"{tmp_path}/look.py"])
    found = set(re.findall(r"listens (\w+) (\w+)", said))
    assert ("0100007F", "True") in found and {address for address, _ in found} == {"0100007F"}, said
