"""``gptpar launch`` with DeepSpeed's flags: its hostfile and selections, started through ssh, or on this machine.

A line of a hostfile is ``HOST slots=N``; ``#`` begins a comment. A selection is ``HOST@HOST:0,2``: whole hosts, or some
of their slots. Source of the format: deepspeed/launcher/runner.py.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from gptpar.cli.ssh import remote_command, run_on_hosts, ssh_words
from gptpar.errors import ConfigError

_CHOOSING = ("--hostfile", "--include", "--exclude", "--num-nodes", "--num-gpus")
_PROGRAM = ("--module", "--no-python")
_WITHOUT_EFFECT = ("--force-multi", "--no-ssh-check", "--bind-cores-to-rank", "--save-pid", "--quiet")
_SWITCHES = ("--dry-run", "--no-local-rank", *_PROGRAM, *_WITHOUT_EFFECT)
_TORCHRUNS = ("--master-addr", "--master-port", *_PROGRAM)
_FLAGS = (*_CHOOSING, "--ssh-port", "--log-level", *_SWITCHES, *_TORCHRUNS)
_SHORT = {"-H": "--hostfile", "-i": "--include", "-e": "--exclude", "-m": "--module", "-q": "--quiet"}
_HERE = "localhost"
"""DeepSpeed's name of this machine, where there is no hostfile."""

_LINE = re.compile(r"\s*([A-Za-z0-9_][A-Za-z0-9_.:@-]*)\s+slots=([1-9]\d*)\s*")


def read_hostfile(path: Path) -> dict[str, list[int]]:
    """Host -> its slots, in the file's order.

    Raises:
        ConfigError: lines are wrong; it names all of them.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError([f"the hostfile {path} cannot be read ({error.strerror})."]) from None
    except UnicodeDecodeError:
        raise ConfigError([f"the hostfile {path} is no text."]) from None
    hosts: dict[str, list[int]] = {}
    problems = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0]
        if not text.strip():
            continue
        found = _LINE.fullmatch(text)
        if found is None:
            problems.append(f"{path}, line {number}: HOST slots=NUMBER is needed, not {line.strip()!r}.")
        elif found[1] in hosts:
            problems.append(f"{path}, line {number}: {found[1]} is named again.")
        else:
            hosts[found[1]] = list(range(int(found[2])))
    if not hosts and not problems:
        problems.append(f"the hostfile {path} names no host.")
    if problems:
        raise ConfigError(problems)
    return hosts


def selected(
    hosts: Mapping[str, Sequence[int]],
    *,
    include: str = "",
    exclude: str = "",
    num_nodes: int | None = None,
    num_gpus: int | None = None,
) -> dict[str, list[int]]:
    """The hosts and slots that are to be used.

    Args:
        include, exclude: selections; at most one of them.
        num_nodes: take only this many hosts, the first ones.
        num_gpus: take only this many slots of each host, the first ones.

    Raises:
        ConfigError: a selection is wrong, or hosts have unequal numbers of slots, which torchrun cannot start; it names
            all problems.
    """
    if include and exclude:
        raise ConfigError(["--include and --exclude cannot be combined: name the hosts to use, or those not to use."])
    chosen = _parsed(include or exclude, hosts)
    named = {host: list(slots or hosts[host]) for host, slots in chosen.items()}
    left = {host: [slot for slot in slots if slot not in named.get(host, ())] for host, slots in hosts.items()}
    found = named if include else {host: slots for host, slots in left.items() if slots}
    found = {host: slots[:num_gpus] for host, slots in list(found.items())[:num_nodes]}
    if problems := list(_shortages(found, num_nodes, num_gpus)):
        raise ConfigError(problems)
    return found


def _shortages(found: Mapping[str, Sequence[int]], num_nodes: int | None, num_gpus: int | None) -> Iterator[str]:
    """The reasons why these slots cannot be used."""
    if num_nodes is not None and len(found) < num_nodes:
        yield f"--num_nodes {num_nodes}, but {len(found)} host(s) are there."
    if num_gpus is not None and any(len(slots) < num_gpus for slots in found.values()):
        yield f"--num_gpus {num_gpus}, but a host has fewer slots."
    if not found:
        yield "no slot is left: change --include or --exclude."
    elif len({len(slots) for slots in found.values()}) > 1:
        counts = ", ".join(f"{host} {len(slots)}" for host, slots in found.items())
        yield f"every host must have the same number of slots ({counts}): see --include and --num_gpus."


def _parsed(selection: str, hosts: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Host -> the slots of a selection; empty: all slots of that host."""
    found: dict[str, list[int]] = {}
    problems = []
    names = "|".join(map(re.escape, sorted(hosts, key=len, reverse=True)))  # names may have "@" and ":", too
    for match in re.finditer(rf"({names}|[^@:]*)(?::([^@]*))?(?:@|\Z)", selection):
        part, host, words = match[0].removesuffix("@"), match[1], match[2]
        if not part:
            continue
        slots = [int(word) if word.isdecimal() else -1 for word in words.split(",")] if words else []
        if host not in hosts:
            problems.append(f"{host} is not in the hostfile, which names {', '.join(hosts)}.")
        elif not set(slots) <= set(hosts[host]):
            problems.append(f"{part}: {host} has the slots {', '.join(map(str, hosts[host]))}.")
        if host in found or len(set(slots)) < len(slots):
            problems.append(f"{part}: {host} or a slot of it is named twice.")
        found[host] = slots
    if problems:
        raise ConfigError(problems)
    return found


def commands(
    hosts: Mapping[str, Sequence[int]],
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    address: str = "",
    port: int = 29500,
) -> dict[str, str]:
    """The command that ssh runs on each host: torchrun numbers the workers, and only the chosen GPUs are visible.

    Args:
        words: the program that each host runs, and its words.
        environment: this machine's variables.
        address: of the first host, if the other hosts know it by another name.
    """
    first = address or next(iter(hosts)).rpartition("@")[2]
    shared = ["--nnodes", str(len(hosts)), "--master-addr", first, "--master-port", str(port)]
    found = {}
    for rank, (host, slots) in enumerate(hosts.items()):
        own = ["--nproc-per-node", str(len(slots)), "--node-rank", str(rank)]
        visible = ",".join(map(str, slots))
        found[host] = remote_command([*shared, *own, *words], visible, environment, os.getcwd())
    return found


def is_asked_for(argv: Sequence[str]) -> bool:
    """Whether ``gptpar launch`` was called with a flag that DeepSpeed's launcher has and torchrun has not."""
    return bool(_flags_first(argv)[0].keys() - {*_TORCHRUNS})


def _name(word: str) -> str:
    """Returns the flag's spelling in ``_FLAGS``. For other words the result has no meaning."""
    name = word.partition("=")[0]
    return _SHORT.get(name, name.replace("_", "-"))


def main(argv: Sequence[str], run_here: Callable[[Sequence[str]], int]) -> int:
    """``gptpar launch`` with DeepSpeed's flags: start the program on each host of a hostfile, or on this machine.

    The program gets ``--local_rank=N`` as its first word, unless there is ``--no_local_rank``.

    Args:
        argv: DeepSpeed's flags, and the program with its words.
        run_here: runs ``gptpar launch`` on this machine.

    Raises:
        ConfigError: with all problems.
        GptparError: ssh cannot be started.
    """
    values, words = _flags_first(argv)
    if not words:
        raise ConfigError(
            [f"gptpar launch needs a program, for example train.py, behind DeepSpeed's flags ({', '.join(_FLAGS)})."]
        )
    words = [flag for flag in _PROGRAM if flag in values] + words
    words = words if "--no-local-rank" in values else ["--pass-local-rank", *words]
    num_gpus = _count(values, "--num-gpus")
    hosts = selected(
        read_hostfile(Path(values["--hostfile"])) if "--hostfile" in values else {_HERE: _slots_here(num_gpus)},
        include=values.get("--include", ""),
        exclude=values.get("--exclude", ""),
        num_nodes=_count(values, "--num-nodes"),
        num_gpus=num_gpus,
    )
    port = _count(values, "--master-port")
    if "--hostfile" not in values:
        visible = _visible(hosts[_HERE], os.environ.get("CUDA_VISIBLE_DEVICES"))
        chosen = ["--master-addr", values["--master-addr"]] if "--master-addr" in values else []
        chosen += [] if port is None else ["--master-port", str(port)]
        words = [*chosen, "--nproc-per-node", str(len(hosts[_HERE])), *words]
        if "--dry-run" in values:
            print(f"CUDA_VISIBLE_DEVICES={visible} {shlex.join(['gptpar', 'launch', *words])}")
            return 0
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
        return run_here(words)
    found = commands(hosts, words, os.environ, address=values.get("--master-addr", ""), port=port or 29500)
    ssh = ssh_words(os.environ, _count(values, "--ssh-port"))
    if "--dry-run" not in values:
        return run_on_hosts(ssh, found)
    for host, command in found.items():
        print(shlex.join([*ssh, host, command]))
    return 0


def _slots_here(num_gpus: int | None) -> list[int]:
    """This machine's GPUs; without any, as many slots as are asked for."""
    import torch  # a second, which a hostfile's machine should not pay for

    return list(range(torch.cuda.device_count() or num_gpus or 1))


def _visible(slots: Sequence[int], before: str | None) -> str:
    """CUDA_VISIBLE_DEVICES for some of the devices that were visible before; hidden ones stay hidden."""
    if before is None:
        return ",".join(map(str, slots))
    devices = [word for word in before.split(",") if word]
    return ",".join(devices[slot] for slot in slots if slot < len(devices))


def _flags_first(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """(values of DeepSpeed's launcher's flags, the program and its words)"""
    values, words = {}, list(argv)
    while words and (name := _name(words[0])) in _FLAGS:
        typed, glued, value = words.pop(0).partition("=")
        is_switch = name in _SWITCHES
        if not is_switch and not glued and not words:
            raise ConfigError([f"{typed} needs a value."])
        values[name] = value if glued or is_switch else words.pop(0)
    return values, words


def _count(values: Mapping[str, str], name: str) -> int | None:
    text = values.get(name)
    if text is None or text == "-1":  # DeepSpeed's value for all
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError([f"{name} {text}: a whole number of at least 1 is needed."])
    return int(text)
