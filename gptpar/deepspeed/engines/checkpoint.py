"""An engine's checkpoints: DeepSpeed's ``save_checkpoint`` and ``load_checkpoint`` in gptpar's own format.

:mod:`gptpar.deepspeed.engines.tags` finds the checkpoint that a tag names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from gptpar.checkpoint import DamagedCheckpoint, Manifest, read_manifest
from gptpar.checkpoint import load_checkpoint as load_tensors
from gptpar.checkpoint import save_checkpoint as save_tensors
from gptpar.checkpoint.folders import checkpoint_path
from gptpar.checkpoint.ranks import Ranks
from gptpar.checkpoint.save import print_report
from gptpar.checkpoint.save_request import Save
from gptpar.checkpoint.saver import Saver
from gptpar.checkpoint.verify import report_all
from gptpar.deepspeed.engines.engine_state import EngineState
from gptpar.deepspeed.engines.engine_tensors import (
    buffers_of,
    is_frozen,
    is_in_reach,
    kept_buffers,
    like,
    tensors_of,
    with_extra_state,
    without_moments,
)
from gptpar.deepspeed.engines.former_names import layers_in_order, present_state, stored_names
from gptpar.deepspeed.engines.plain_values import from_json, to_json
from gptpar.deepspeed.engines.stored_state import (
    ENGINE_COUNTS,
    Chosen,
    StoredState,
    UsersPart,
    alias_problems,
    group_differences,
    groups_to_json,
    load_groups,
    read_state,
    room_for_client,
    scheduler_problems,
    scheduler_to_json,
)
from gptpar.deepspeed.engines.tags import LATEST, agreed_tag, candidates, link_tag, place_for
from gptpar.errors import CheckpointError, numbered
from gptpar.system.files import replace_synced
from gptpar.topology.mesh import DATA
from gptpar.topology.tensor_parts import TensorParts, as_parts, kind_of

AMID_A_STEP = (
    "engine.save_checkpoint in the middle of a step, {} of its {} micro-batches being complete: the checkpoint has the "
    "weights, moments and counts before this step, without their gradients, and the buffers of now. To lose none, save "
    "after the engine.step() that ends the step."
)

_LAST_SAVERS: WeakValueDictionary[Path, Saver] = WeakValueDictionary()
"""Folder -> what saved into it last: engines of one program may share a folder."""


def save(engine: EngineState, saver: Saver, save_dir: str | os.PathLike[str], tag: str | None, kept: UsersPart) -> str:
    """Save master weights, moments, buffers and numbers of the last step; every process calls it.

    Where the configuration says ``async_save`` it goes on behind the training. Then a failure is told on stderr and
    forgiven once or twice (:class:`~gptpar.checkpoint.saver.Saver`): the next save tries again.

    Args:
        saver: finishes the save before, which decides this one's number, as another engine's into this folder does.
        save_dir: a folder that all processes share.
        tag: the checkpoint's name; default: ``global_step`` and the number of steps. It replaces one of that name.
        kept: what is saved beside the engine's state.

    Returns:
        The checkpoint's path.

    Raises:
        CheckpointError: on every process. Its causes are those of ``gptpar.checkpoint.save_checkpoint``, values that
            cannot be stored (the error names all of them), and a folder of another program. Earlier checkpoints stay.
    """
    ranks, folder, behind = Ranks(None), Path(save_dir), engine.options.async_save
    for one in (_LAST_SAVERS.get(folder.resolve(), saver), saver):
        one.finish()
    _LAST_SAVERS[folder.resolve()] = saver
    given = f"global_step{engine.global_steps}" if tag is None else tag
    tag = agreed_tag(ranks, given, engine.options.tag_validation)
    engine.weights.settle()
    number, replaced = ranks.lead(lambda: place_for(folder, tag, engine.global_steps))
    held = _named_on_all_stages(ranks, engine, partial(_named, engine, with_extra=True))
    tensors, client = tensors_of(engine, with_moments=True), dict[str, torch.Tensor]()
    meta = ranks.lead(lambda: _state_of(engine, tag, held, kept.client, client).to_meta())
    if engine.topology.position(DATA) == 0:
        tensors |= buffers_of(engine)
    if not kept.frozen:
        tensors = {name: one for name, one in tensors.items() if not is_frozen(engine, name)}
    tensors |= client
    parts = {name: as_parts(tensor) for name, tensor in tensors.items()}
    in_reach = {id(part) for name, one in parts.items() if is_in_reach(engine, name) for _, part in one.parts}
    write = partial(_write, folder, number, meta=meta, replaces=replaced, tag=tag, latest=kept.latest)
    saver.begin(
        Save(folder, number, parts, write, unguarded=lambda part: id(part) in in_reach), behind=behind, required=True
    )
    return str(checkpoint_path(folder, number))


def _write(
    folder: Path,
    number: int,
    tensors: Mapping[str, TensorParts],
    meta: dict[str, Any],
    *,
    tag: str,
    latest: bool,
    process_group: dist.ProcessGroup | None,
    **more: Any,
) -> Path:
    """Save, and name the checkpoint as the latest one."""
    path = save_tensors(folder, number, tensors, meta, process_group=process_group, **more)
    Ranks(process_group).lead(lambda: link_tag(folder, tag, path))
    if latest:
        Ranks(process_group).lead(lambda: replace_synced(folder / LATEST, tag))
    return path


def load(
    engine: EngineState, load_dir: str | os.PathLike[str], tag: str | None, chosen: Chosen
) -> tuple[str | None, Any]:
    """Load a checkpoint into an engine; world size, ZeRO stage, ratio and number format may differ from the saved ones.

    Every byte is verified before the first one is used: after an error the engine is unchanged.

    Args:
        load_dir: the folder of checkpoints.
        tag: of the checkpoint; ``None``: the one that ``latest`` names, or else the newest; if that is damaged, the
            newest undamaged one before it.
        chosen: which parts are loaded.

    Returns:
        (path, client_state); (``None``, {}) if the folder has no checkpoint and no tag is given.

    Raises:
        CheckpointError: on every process: there is no such tag, or no undamaged checkpoint; or the folder is another
            program's; or the checkpoint does not fit, with all differences.
    """
    ranks, folder = Ranks(None), Path(load_dir)
    engine.weights.settle()
    found = ranks.lead(lambda: candidates(folder, tag))
    if not found:
        ranks.lead(lambda: print_report(f"there is no checkpoint in {folder}: nothing was loaded"))
        return None, {}
    damaged = []
    for number, path in found:
        try:
            manifest = ranks.lead(partial(read_manifest, path))
            client = room_for_client(manifest)
            state = present_state(read_state(path, manifest.meta, client), layers_in_order(engine.module))
            _require_fit(ranks, engine, path, state, chosen)
            _fill(engine, folder, number, manifest, chosen, client)
        except DamagedCheckpoint as error:
            damaged.append(str(error))
            ranks.lead(partial(print_report, f"skipped a damaged checkpoint: {error}"))
        else:
            fresh = set().union(*ranks.each(partial(without_moments, engine, manifest))) if chosen.moments else set()
            _take_over(engine, state, chosen, fresh)
            return str(path), from_json(state.client, client)
    raise CheckpointError(f"nothing was loaded: no whole checkpoint in {folder}:\n" + "\n".join(damaged))


# The contents of a checkpoint.


@dataclass(frozen=True)
class _Named:
    """What an engine has by name: of one process, or of all stages of a pipeline together.

    Attributes:
        members: names of the parameters of each group.
        aliases: each further name of a parameter or buffer -> its first one.
        extra: path of a module with extra state -> that state as JSON, or ``None`` where it is not asked for.
        problems: values of extra states that JSON cannot hold.
        frozen: names of the weights that are not trained.
        missed: name -> steps that the parameter missed while it was frozen.
        complex_buffers: names of the buffers that are stored as pairs of numbers.
    """

    members: list[list[str]]
    aliases: dict[str, str]
    extra: dict[str, Any]
    problems: list[str]
    frozen: list[str]
    missed: Mapping[str, int]
    complex_buffers: list[str]


def _named(engine: EngineState, *, with_extra: bool = False) -> _Named:
    """Of this process."""
    weights, problems = engine.weights, list[str]()
    extra = {
        path: to_json(module.get_extra_state(), f"the extra state of {path or 'the model'}", problems)
        if with_extra
        else None
        for path, module in with_extra_state(engine)
    }
    members = [[weights.names[parameter] for parameter in group["params"]] for group in engine.optimizer.param_groups]
    pairs = [name for buffer, name in kept_buffers(engine).items() if buffer.is_complex()]
    return _Named(members, weights.aliases, extra, problems, sorted(weights.frozen), engine._frozen.missed, pairs)


def _named_on_all_stages(ranks: Ranks, engine: EngineState, of_process: Callable[[], _Named]) -> _Named:
    """What all processes have; one stands for all where each has the whole model."""
    each = [of_process()] if engine.topology.mesh.pipeline == 1 else ranks.each(of_process)
    members = [list(dict.fromkeys(chain(*group))) for group in zip(*(one.members for one in each), strict=True)]
    aliases: dict[str, str] = {}
    extra: dict[str, Any] = {}
    missed: dict[str, int] = {}
    for one in reversed(each):  # the first process counts
        aliases |= one.aliases
        extra |= one.extra
        missed |= one.missed
    lists = zip(*((one.problems, one.frozen, one.complex_buffers) for one in each), strict=True)
    problems, frozen, pairs = ([*chain(*every)] for every in lists)
    return _Named(members, aliases, extra, problems, sorted(set(frozen)), missed, sorted(set(pairs)))


def _state_of(
    engine: EngineState, tag: str, held: _Named, client_state: Any, tensors: dict[str, torch.Tensor]
) -> StoredState:
    """All numbers of the engine's present state; ``tensors`` receives those of the user's state."""
    problems = list(held.problems)
    counts = {name: getattr(engine, name) for name in ENGINE_COUNTS}
    counts["micro_steps"] -= engine._count  # a step that has begun is begun again
    state = StoredState(
        tag=tag,
        counts=counts | {"optimizer_steps": engine.engine.optimizer.steps_taken},
        loss_scale=engine.loss_scaler.state(),
        groups=groups_to_json(engine.optimizer.param_groups, held.members, problems),
        scheduler=scheduler_to_json(engine.lr_scheduler, problems),
        aliases=held.aliases,
        frozen=held.frozen,
        missed=dict(held.missed),
        complex_buffers=held.complex_buffers,
        extra=held.extra,
        skip_step=None if engine.skip_step is None else engine.skip_step.state(),
        client=to_json({} if client_state is None else client_state, "client_state", problems, tensors),
    )
    if problems:
        raise CheckpointError(
            f"nothing was saved: {'; '.join(problems)}. client_state may hold numbers, texts, tensors, arrays, bytes, "
            "and lists, tuples, sets, dictionaries and namespaces of these; the engine's other state may hold no "
            "tensors. Keep what does not fit in a file of your own, or as numbers (.tolist())."
        )
    return state


# Loading one.


def _require_fit(ranks: Ranks, engine: EngineState, path: Path, state: StoredState, chosen: Chosen) -> None:
    """Check, before any tensor is read, that names and groups of the checkpoint are those of the engine."""
    held = _named_on_all_stages(ranks, engine, partial(_named, engine))
    differences = list(alias_problems(state.aliases, held.aliases))
    extra = state.extra.keys() ^ held.extra.keys()
    differences += [f"the module {name or '(root)'} has extra state on one side only" for name in sorted(extra)]
    problems = list(scheduler_problems(state.scheduler, engine.lr_scheduler)) if chosen.schedule else []
    before, now = len(state.groups), len(held.members)
    if chosen.moments and before != now:
        problems.append(f"the checkpoint has {before} parameter group(s), and the engine has {now}")
    elif chosen.moments:
        differences += group_differences(state.groups, held.members)
    if chosen.strict:
        problems += differences
    else:
        ranks.lead(lambda: report_all(print_report, [f"{one}; left alone" for one in differences]))
    if problems:
        said = f"{path} does not fit this engine, and nothing was loaded"
        raise CheckpointError(f"{said}:\n{numbered(problems)}\n{_REMEDY}")


_REMEDY = (
    "load_module_strict=False leaves alone what one side does not have, load_optimizer_states=False leaves moments and "
    "groups, load_module_only=True everything but parameters and buffers."
)


def _fill(
    engine: EngineState,
    folder: Path,
    number: int,
    manifest: Manifest,
    chosen: Chosen,
    client: dict[str, torch.Tensor],
) -> None:
    """Read all tensors, after they have been verified."""
    names = stored_names(manifest.tensors, layers_in_order(engine.module))
    targets = {
        names.get(name, name): target
        for name, target in (tensors_of(engine, with_moments=chosen.moments) | buffers_of(engine) | client).items()
    }
    rounded = {
        name: like(target, entry.dtype)
        for name, target in targets.items()
        if name.startswith("weights/") and (entry := manifest.tensors.get(name)) and entry.dtype != target.dtype
    }
    kinds = {"weights", "buffers"}
    asked: Callable[[str], bool] = lambda name: chosen.moments or kind_of(name) in kinds  # noqa: E731
    load_tensors(
        folder,
        targets | rounded,
        iteration=number,
        strict=chosen.strict,
        may_stay=lambda name: not asked(name),
        prove_first=True,
        remedy=_REMEDY,
    )
    for name, values in rounded.items():
        for (_, target), (_, value) in zip(as_parts(targets[name]).parts, values.parts, strict=True):
            target.copy_(value)


def _take_over(engine: EngineState, state: StoredState, chosen: Chosen, fresh: Collection[str]) -> None:
    """Load everything but the tensors, which are loaded already.

    Args:
        fresh: parameters that keep their own moments, and with these their own number of steps.
    """
    engine.engine.publish()
    for path, module in with_extra_state(engine):
        if path in state.extra:
            module.set_extra_state(from_json(state.extra[path]))
    if chosen.moments:
        before, missed = engine.engine.optimizer.steps_taken, engine._frozen.missed
        taken = state.counts["optimizer_steps"]
        engine.engine.optimizer.steps_taken = taken
        load_groups(state.groups, engine.optimizer.param_groups)
        engine._frozen.load({**state.missed, **{name: taken - before + missed.get(name, 0) for name in fresh}})
    if chosen.schedule and engine.lr_scheduler is not None and state.scheduler is not None:
        engine.lr_scheduler.load_state_dict(from_json(state.scheduler["state"]))
    if not chosen.module_only:
        if engine.skip_step is not None:
            engine.skip_step.load(state.skip_step)
        engine.loss_scaler.load(state.loss_scale)
        samples = state.counts["global_steps"] * engine.train_batch_size()
        for name in ENGINE_COUNTS:
            setattr(engine, name, state.counts.get(name, samples))
