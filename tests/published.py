"""Which published DeepSpeed configurations and launch scripts would start here, and what is said of the others.

    python -m tests.published FOLDER... [--verbose]

FOLDER holds other projects' files, such as checkouts; nothing of them is kept. A ``.json`` counts as a configuration
if it has keys of DeepSpeed's and is no template, which its script fills. A shell script is run with stubs in
place of the launchers, and counts if one of them was to start ``pretrain_gpt.py`` or its like. What a script's author
has and nobody else, data, vocabularies, folders and sizes, is replaced; everything else is judged as it stands. Nothing
is trained: a file starts if its configuration resolves. Files that ask for what gptpar lacks on purpose, and launches
whose variables or files nobody else has, are counted apart.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gptpar.config.deepspeed_reader import read_file, without_auto
from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from gptpar.errors import GptparError

SIGNS = {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "gradient_accumulation_steps"}
SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --eval-iters 0 --train-iters 3 "
    "--mock-data --vocab-size=1000 --tokenizer-type=NullTokenizer"
)
_TAKEN_AWAY = (
    "data-path train-data-path valid-data-path test-data-path data-cache-path mock-data vocab-file merge-file "
    "tokenizer-model tokenizer-type vocab-size split save load finetune reset-iteration no-load-lr-state "
    "tensorboard-dir num-layers hidden-size num-attention-heads seq-length max-position-embeddings eval-iters "
    "ffn-hidden-size num-query-groups kv-channels num-key-value-heads distributed-backend "
    "make-vocab-size-divisible-by tensor-model-parallel-size pipeline-model-parallel-size global-batch-size "
    "train-samples micro-batch-size rampup-batch-size train-iters train-tokens lr-warmup-samples lr-decay-samples "
    "lr-warmup-iters lr-decay-iters lr-warmup-tokens lr-decay-tokens pad-vocab-size-to kill-switch-path "
    "kill-switch-file tokenizer-name-or-path num-virtual-stages-per-pipeline-rank "
    "num-layers-per-virtual-pipeline-stage data-file-list data-suffix dataset-path use-dataset-manager "
    "use-dataloader-manager padded-vocab-size patch-tokenizer-type extra-vocab-size dataset max-padding-length "
    "train-data valid-data test-data tokenizer-path tokenizer-file model-parallel-size pipe-parallel-size gas "
    "world-size rank local-rank num-workers dataloader-type log-interval eval-interval group-query-attention "
    "sequence-parallel"
)
TAKEN_AWAY = {
    *(f"--{name}" for name in _TAKEN_AWAY.split()),
    *(f"--{split}-weighted-split-paths{end}" for split in ("train", "valid", "test") for end in ("", "-path")),
}
"""Data, folders and sizes of a script, with what measures the run in them."""
OTHER_PROGRAMS = ("CONFIG_", "${", "per_device_train_batch_size", "pipe-parallel-size")
"""Words of templates, of the Trainer's arguments, and of GPT-NeoX's own files, which are no configurations."""
ENTRY = re.compile(r"(^|/)(pretrain_(gpt|llama|qwen|mistral)|finetune_llama)\w*\.py$")
"""The program that a launch starts, with Megatron's flags for a decoder."""
ARGUMENTS = {"--lr": "1e-4", "--min-lr": "0", "--save-interval": "1000", "--norm-epsilon": "1e-5"}
"""Numbers that a script's user gives as its arguments, and others in their place."""
LAUNCHERS = "deepspeed torchrun mpirun mpiexec aprun jsrun python python3 accelerate numactl"
COUNTED = {"nvidia-smi": 8, "ds_ssh": 10, "scontrol": 8, "hostname": 1, "whoami": 1}
"""Programs whose lines of output scripts count, or take a name from, and how many they print."""
TOOLS = (
    "sed cat date dirname basename expr bc cp seq grep awk cut tr env tee touch head tail wc sort test uname bash sh "
    "realpath readlink ln mv nohup"
)
"""What a script may call besides: nothing that fetches, installs or removes."""
OWN = re.compile(r"&>>?\s*[^\s\"']+|^\s*(source|cd|pushd|clear|set -\w+)\b[^;\n]*;?", re.MULTILINE)
"""What only its author has: folders of logs and programs, and a script that stops without them."""
PLACEHOLDER = re.compile(r"(?<=[=\s])<[A-Za-z][^<>|&;\n]*>")
"""What a script's user is to fill in."""
SRUN = (
    '#!/bin/bash\nwords=("$@")\nwhile (($#)); do [[ "$1" == -c && "$2" == *" "* ]] && exec bash -c "$2"; shift; done\n'
    'set -- "${words[@]}"\n'
)
"""Of a launcher that may start a shell's words."""
MKDIR = (
    '#!/bin/bash\nfor word in "$@"; do [[ "$word" == [-/.]* && "$word" != "$HOME"/* ]] || /bin/mkdir -p "$word"; done\n'
)
JOB = {
    **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_NTASKS", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"), "1"),
    **dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0"),
    **{"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
    **dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NAME"), "name"),
}
"""A job's variables and mpirun's, without which a script submits itself and ends, or names no rank."""
OPTION = re.compile(r"^\s*(--?[\w-]+)\)\s*\w+=\"?\$\{?2", re.MULTILINE)
"""A flag of the script's own, with a value."""
STUB = '#!/bin/bash\nfor word in "$@"; do printf "%s\\0" "$word"; done >> "$WORDS"; printf "\\n\\0" >> "$WORDS"\n'


ON_PURPOSE = (
    *("this option of experts is", "processes with experts", "training in FP8", "context parallelism is"),
    *("a vision model is", "retrieval is", "an inference server", "a model with an encoder is"),
    "the Mamba architecture is",
)
"""What gptpar lacks on purpose, as its sentences begin to say it."""
INCOMPLETE = re.compile(
    r"expected (one|at least one) argument|takes 1 value\(s\), 0 given|^it is empty|^cannot be read"
)
"""Sentences about a variable or a file that the script's author has and nobody else."""


def configurations(folder: Path) -> Iterator[Path]:
    """DeepSpeed's among the JSON files."""
    for path in sorted(folder.rglob("*.json")):
        try:
            text = path.read_text(errors="replace")
            other = "TEMPLATE" in path.name or any(word in text for word in OTHER_PROGRAMS)
            if not other and len(text) < 50_000 and any(f'"{sign}"' in text for sign in SIGNS):
                yield path
        except OSError:
            continue


def verdict(words: list[str], world: int) -> list[str]:
    """The problems of a command line; empty: it would start."""
    try:
        resolve(parse_flags(words), world)
    except GptparError as error:
        return getattr(error, "problems", [str(error)])
    return []


def judge_configuration(path: Path) -> list[str]:
    """The problems of a file beside the flags that its own script would give."""
    words = [*SMALL.split(), "--deepspeed", "--deepspeed_config", str(path)]
    try:
        plain = without_auto(read_file(path))
    except ValueError as error:
        return [str(error)]
    if "lr" not in json.dumps(plain.get("optimizer", {})):
        words += ["--lr", "1e-3"]
    sizes = ("train_micro_batch_size_per_gpu", "train_batch_size")
    if not any(isinstance(plain.get(name), int) for name in sizes):
        words += ["--micro-batch-size", "2"]
    return [problem for problem in verdict(words, world_of(plain, 2)) if "is not a folder: make it" not in problem]


def world_of(plain: Mapping[str, Any], otherwise: int) -> int:
    """The processes for which the batch sizes of a file fit; ``otherwise`` where it does not say all three."""
    batch, micro = plain.get("train_batch_size"), plain.get("train_micro_batch_size_per_gpu")
    steps = plain.get("gradient_accumulation_steps", 1)
    if not all(isinstance(number, int) and number > 0 for number in (batch, steps)):
        return otherwise
    if not isinstance(micro, int) or micro < 1:
        return otherwise if batch % (steps * otherwise) == 0 else 1
    return batch // (micro * steps) if batch % (micro * steps) == 0 else otherwise


def command_lines(script: Path) -> list[list[str]]:
    """The words behind the program of each launch that the script makes, with stubs for the launchers.

    A script that starts nothing without arguments is given some: its own flags with values, or words.
    """
    own = [word for name in OPTION.findall(script.read_text(errors="replace")) for word in (name, "1")]
    for arguments in ([], own, [f"argument{i}" for i in range(6)]):
        if launches := list(launches_of(script, arguments)):
            return launches
    return []


def launches_of(script: Path, words: list[str]) -> Iterator[list[str]]:
    """What it starts with the words behind its name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stubs = folder / "stubs"
        stubs.mkdir()
        texts = {**dict.fromkeys(LAUNCHERS.split(), STUB), "mkdir": MKDIR}
        texts |= dict.fromkeys(("srun", "singularity", "apptainer", "docker"), SRUN + STUB)
        texts |= {program: "#!/bin/bash\n" + "echo name\n" * number for program, number in COUNTED.items()}
        for program, text in texts.items():
            (stubs / program).write_text(text)
            (stubs / program).chmod(0o755)
        for tool in TOOLS.split():
            if found := shutil.which(tool):
                (stubs / tool).symlink_to(found)
        work = folder / "work"
        shutil.copytree(script.parent, work)
        for template in script.parent.parent.glob("*/*.json"):
            (folder / template.parent.name).mkdir(exist_ok=True)
            shutil.copyfile(template, folder / template.parent.name / template.name)
        (work / "dataset").mkdir(exist_ok=True)
        (work / "tmp").mkdir(exist_ok=True)
        from_the_root = work / script.parent.parent.name
        if from_the_root != work and not from_the_root.exists():  # as its folder is called where it is to be started
            from_the_root.mkdir()
            (from_the_root / script.parent.name).symlink_to(work)
        for above in (work, folder):
            (above / "pretrain_gpt.py").touch()
        text = PLACEHOLDER.sub("filled_in", script.read_text(errors="replace"))
        (work / script.name).write_text(OWN.sub("", text))
        environment = {"PATH": str(stubs), "HOME": name, "WORDS": str(folder / "words"), **JOB}
        arguments = [str(folder / word) if word.startswith("argument") else word for word in words]
        with contextlib.suppress(subprocess.TimeoutExpired):  # such as a script that follows its log
            subprocess.run(
                ["/bin/bash", script.name, *arguments],
                cwd=work, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, timeout=20,
            )  # fmt: skip
        if not (folder / "words").exists():
            return
        for launch in (folder / "words").read_text(errors="replace").split("\n\0"):
            words = launch.split("\0")
            entry = next((i for i, word in enumerate(words) if ENTRY.search(word)), None)
            if entry is not None and "--num-layers" in words:
                yield [*with_config(words[entry + 1 :], work)]


def with_config(words: list[str], work: Path) -> Iterator[str]:
    """The words, with the configuration that the script wrote kept where it outlives the folder."""
    kept = Path(tempfile.gettempdir()) / f"published-{os.getpid()}.json"
    before = ""
    for word in (part for one in words for part in (one.split("=", 1) if one.startswith("--deepspeed") else [one])):
        if before.replace("-", "_") == "__deepspeed_config" and (work / word).is_file():
            shutil.copyfile(work / word, kept)
            yield str(kept)
        elif word:
            yield word
        before = word


def judge_script(words: list[str]) -> list[str]:
    """The problems of a script's flags once data and sizes are small."""
    kept, taken = [], False
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            taken = word.partition("=")[0] in TAKEN_AWAY
        if not taken:
            kept += [word, ARGUMENTS[word]] if word in ARGUMENTS and following.startswith("--") else [word]
    small = [*SMALL.split(), "--micro-batch-size=2"]
    small += ["--load", tempfile.gettempdir()] if "--load" in words else []
    plain: dict[str, Any] = {}
    if "--deepspeed_config" in kept[:-1]:  # a variable that came out empty leaves the flag last
        try:
            plain = without_auto(read_file(kept[kept.index("--deepspeed_config") + 1]))
        except ValueError as error:
            return [str(error)]
    if plain.keys() & {"train_micro_batch_size_per_gpu", "train_batch_size"}:  # the script's own would fit
        small = [word for word in small if word != "--micro-batch-size=2"]
    return verdict([*kept, *small], world_of(plain, 1))


def main() -> None:
    """Judge and count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--verbose", action="store_true", help="also what is said of each file that would not start")
    args = parser.parse_args()
    found: Counter[str] = Counter()
    for folder in args.folders:
        for path in configurations(folder):
            problems = judge_configuration(path)
            tell(found, "configurations", path.relative_to(folder), problems, args.verbose)
        for path in sorted(one for end in ("sh", "slurm", "sbatch") for one in folder.rglob(f"*.{end}")):
            for words in command_lines(path) if ".py" in path.read_text(errors="replace") else ():
                tell(found, "launches", path.relative_to(folder), judge_script(words), args.verbose)
    print(*(f"{name}: {count}" for name, count in sorted(found.items())), sep="\n")


def outcome(problems: list[str]) -> str:
    """What becomes of a file: it starts, it asks for what is absent on purpose, it came out incomplete, or neither."""
    if not problems:
        return "start"
    if any(f"{what} " in problem for what in ON_PURPOSE for problem in problems):
        return "ask for what is absent on purpose"
    return "came out incomplete" if any(INCOMPLETE.search(problem) for problem in problems) else "do not start"


def tell(found: Counter[str], kind: str, path: Path, problems: list[str], verbose: bool) -> None:
    """Count a file."""
    found[f"{kind} that {outcome(problems)}"] += 1
    if verbose and problems:
        print(path, *(f"    {problem[:300]}" for problem in problems), sep="\n")


if __name__ == "__main__":
    main()
