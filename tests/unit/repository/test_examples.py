"""Examples and scripts that no test can run: shapes that need many GPUs, files for clusters, benchmarks."""

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import gptpar.cli
from gptpar.config.flags import parse_flags
from gptpar.config.presets import PRESETS
from gptpar.config.run_file import read_run_file
from tests.documents import ROOT, commands

EXAMPLES = ROOT / "examples"
SHAPES = sorted((EXAMPLES / "shapes").glob("*.toml"))
SCRIPTS = sorted(path for folder in ("benchmarks", "tools") for path in (ROOT / folder).glob("*.py"))
CLUSTERS = ("kubernetes_pytorchjob.yaml", "skypilot.yaml")


@pytest.mark.parametrize("path", SHAPES, ids=lambda path: path.stem)
def test_a_shape_fits_where_its_first_lines_say(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = read_run_file(str(path))
    assert not file.problems and file.values["model.preset"] == path.stem
    words = re.search(r"#   gptpar (plan .*)", path.read_text())
    assert words is not None and str(path.relative_to(ROOT)) in words[1]
    status = gptpar.cli.main([*words[1].replace("examples/", f"{EXAMPLES}/").split(), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert status == 0, told


def test_shapes_are_the_usual_names() -> None:
    of_gpt_3 = {name for name, shape in PRESETS.items() if shape.get("normalization") is None} - {"31M", "70M", "10B"}
    assert {path.stem for path in SHAPES} == of_gpt_3


def loaded(name: str) -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((EXAMPLES / name).read_text())


def test_a_pytorchjob_has_what_its_operator_asks_for() -> None:
    job = loaded("kubernetes_pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    pods = [one["template"]["spec"] for one in replicas.values()]
    (container,) = pods[0]["containers"]
    env = {one["name"]: one["value"] for one in container["env"]}
    assert replicas["Master"]["replicas"] == 1 and container["name"] == "pytorch"
    assert int(env["NNODES"]) == sum(one["replicas"] for one in replicas.values())
    assert int(env["NPROC"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pods[0]["volumes"]}
    assert pods[0] == pods[1]


def test_a_skypilot_task_has_its_parts() -> None:
    task = loaded("skypilot.yaml")
    assert {"resources", "setup", "run", "file_mounts"} <= task.keys() and task["workdir"] == "."
    assert task["num_nodes"] == 1, "a bucket is no file system that machines share"


@pytest.mark.parametrize("name", CLUSTERS)
def test_command_lines_for_clusters_are_understood(name: str, tmp_path: Path) -> None:
    task = loaded(name)
    script = task["run"] if "run" in task else pod_script(task)
    found = commands(script.replace("exec ", ""), tmp_path)
    (words,) = [one for one in found if one[:1] == ["bash"]]
    assert (ROOT / words[1]).exists()
    parsed = parse_flags([word.replace("examples/", f"{EXAMPLES}/") for word in words[2:]])
    assert not parsed.problems and parsed.flags.checkpoint.save == parsed.flags.checkpoint.load
    for doctor in (one for one in found if "doctor" in one):
        assert doctor == ["python", "-m", "gptpar", "doctor", "--folder", "/runs"]


def pod_script(job: Any) -> str:
    """What the first container runs."""
    template = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]
    (script,) = template["spec"]["containers"][0]["args"]
    return str(script)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_scripts_import_names_that_exist(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])
    assert "__name__" in runpy.run_path(str(script), run_name="imported")
