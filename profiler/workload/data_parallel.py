"""Modules under ``fully_shard`` (FSDP2) and DistributedDataParallel: gathered parameters, hooks, and buckets.

Torch has no public way to ask for most of it; what is used of its insides stands here and nowhere else.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from profiler.workload.compiled_forwards import leave_uncompiled
from profiler.workload.tensor_parts import distinct_bytes, storage_key

leave_uncompiled(__name__)

# Whether what runs now is the sharding's own: no op of the model.
SHARDING: ContextVar[bool] = ContextVar("SHARDING", default=False)
_GATHERED: ContextVar[Callable[[nn.Module], None] | None] = ContextVar("_GATHERED", default=None)
_HOOKS_OF = "torch.distributed.fsdp._fully_shard"


def states_in(model: nn.Module) -> list[Any]:
    """The state of each unit in a model, in the order of its modules; several modules may share one."""
    return _states_of(model.modules()) if _is_used() else []


def steps_can_end(model: nn.Module) -> bool:
    """Whether a step of a model can be left in the middle: torch puts units of ``fully_shard`` back from 2.13 on."""
    return all(hasattr(state, "_reset_iter_state") for state in states_in(model))


def end_of_step(model: nn.Module) -> None:
    """A step was left in the middle: parameters are sharded again, and nothing is in flight."""
    for state in states_in(model):
        if state._is_root:
            state._reset_iter_state()


def unsharded_tensors(model: nn.Module) -> list[Tensor]:
    """Returns the tensors that hold gathered parameters: the same storages in every step, without memory in between."""
    return [tensor for group in _groups(states_in(model)) for param in group.fsdp_params for tensor in _gathers(param)]


def given_back_bytes(module: nn.Module) -> int:
    """Bytes of the parameters that a unit gathers for its forward and gives back after it; 0 where it keeps them.

    Only of a unit of one module that shards over all ranks again can be said that it gathers once more in backward.
    """
    state = _state_of(module) if _is_used() else None
    if state is None or state._modules != (module,) or not all(map(_gives_back, _groups_of(state))):
        return 0
    gathers = [tensor for group in _groups([state]) for param in group.fsdp_params for tensor in _gathers(param)]
    return sum(tensor.numel() * tensor.element_size() for tensor in gathers)


def gathered_sizes(model: nn.Module) -> tuple[int, int]:
    """Bytes of parameters while they are gathered, of a model that has run a forward.

    Returns:
        Of the units that keep them until backward, together; and of the largest unit that gives them back after
        forward, the buffer that they are gathered in included.
    """
    kept_bytes = given_back = 0
    for group in _groups(states_in(model)):
        gathers = [tensor for param in group.fsdp_params for tensor in _gathers(param)]
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in gathers)
        if _gives_back(group):
            given_back = max(given_back, 2 * size_bytes)
        else:
            kept_bytes += size_bytes
    return kept_bytes, given_back


def keep_gathered(module: nn.Module) -> Callable[[], None]:
    """Have a unit keep its parameters from forward to backward; the returned function undoes it.

    Raises:
        ValueError: it is no unit that gives them back.
    """
    state = _state_of(module) if _is_used() else None
    if state is None or state._modules != (module,) or not all(map(_gives_back, _groups_of(state))):
        raise ValueError("expected a module under fully_shard that reshards after forward")
    return _keep_gathered(state)


def keep_parameters_of(module: nn.Module) -> list[Callable[[], None]]:
    """Have units that give back parameters of a module keep them from forward to backward; what undoes it."""
    used = _used_by(set(module.modules()), _states_of([*_mapping()])) if _is_used() else []
    return [_keep_gathered(s) for s in used if any(group.post_forward_mesh_info is not None for group in _groups([s]))]


def _keep_gathered(state: Any) -> Callable[[], None]:
    groups = [(weakref.ref(group), group.post_forward_mesh_info) for group in _groups([state])]
    of_root, reference = state._auto_reshard_after_forward, weakref.ref(state)
    state._modules[0].set_reshard_after_forward(False, recurse=False)

    def undo() -> None:
        if (owner := reference()) is not None:
            owner._auto_reshard_after_forward = of_root
        for group, mesh_info in groups:
            if (alive := group()) is not None:
                alive.post_forward_mesh_info = mesh_info

    return undo


def mesh_tensors(model: nn.Module) -> list[Tensor]:
    """The few numbers in which each unit holds the ranks of its process group."""
    meshes = [mesh for group in _groups(states_in(model)) for mesh in (group.mesh_info, group.post_forward_mesh_info)]
    return [mesh.mesh._rank_map for mesh in meshes if mesh is not None]


def in_flight_bytes(states: Iterable[Any]) -> int:
    """Bytes of gathers that are under way, or over and not yet given back: the next unit's forward does that."""
    results = {id(group._all_gather_result): group._all_gather_result for group in _groups(states)}
    for state in states:
        if (held := state._comm_ctx.__dict__.get("all_gather_state")) is not None:
            results[id(held.all_gather_result)] = held.all_gather_result
    outputs = [result.all_gather_output for result in results.values() if result is not None]
    storages = {storage_key(output): output.untyped_storage() for output in outputs}
    return sum(storage.nbytes() for storage in storages.values())


def latest_reduction(states: Iterable[Any]) -> Tensor | None:
    """Returns the buffer from which the gradients of the last unit were reduced, as long as it is held."""
    for state in states:
        held = state._comm_ctx.__dict__.get("reduce_scatter_states")
        return held[-1].reduce_scatter_input if held else None
    return None


class CopiesOfThreads:
    """Copies of reduced gradients that gloo's threads may still hold: each lets go of its own in its next run.

    Where parameters are gathered in between, one of the threads has run since. Where none are, both may hold theirs.

    Args:
        states: the states of the units.
    """

    _THREADS = 2  # of a process group

    def __init__(self, states: Sequence[Any]) -> None:
        self._states = states
        self._latest: weakref.ref[Tensor] | None = None
        self._sizes: deque[int] = deque(maxlen=self._THREADS)

    def size_now(self) -> int:
        """Bytes of all of them; to be asked whenever a unit may have gone backward."""
        reduced, gathers = latest_reduction(self._states), in_flight_bytes(self._states) > 0
        is_new = reduced is not None and (self._latest is None or self._latest() is not reduced)
        if reduced is None or gathers:
            self._sizes.clear()
        if is_new and reduced is not None and reduced.device.type == "cpu":
            self._latest = weakref.ref(reduced)
            self._sizes.append(reduced.untyped_storage().nbytes())
        return sum(self._sizes)


def ends_unit(node: Any) -> bool:
    """Whether an autograd node is the one at which a unit's gradients are reduced."""
    return node.name() == "RegisterPostBackwardFunctionBackward"


# Its hooks -------------------------------------------------------------------


class _MovedHook:
    """Stands among a module's hooks for one that runs inside of its wrapped forward."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def __call__(self, *args: Any) -> None:
        return None


def move_hooks_inside(module: nn.Module) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """Take the sharding's hooks from a module's call; what runs them around a forward. None where it has none.

    A wrapper around that runs what a call of the unit runs: gathering, casts, and giving back.
    """
    moved = 0
    for table in (module._forward_pre_hooks, module._forward_hooks):
        found = {n: hook for n, hook in table.items() if getattr(hook, "__module__", "").startswith(_HOOKS_OF)}
        table.update({number: _MovedHook(hook) for number, hook in found.items()})
        moved += len(found)
    if not moved:
        return None
    owner = weakref.ref(module)

    def around(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            called = owner()
            assert called is not None
            return called_as_unit(called, forward, args, kwargs)

        run.plain = forward  # type: ignore[attr-defined]
        return run

    return around


def called_as_unit(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call something in the place of a module's own forward, with the sharding's hooks that were moved inside."""
    before = [hook.hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _MovedHook)]
    after = [hook.hook for hook in module._forward_hooks.values() if isinstance(hook, _MovedHook)]
    if not before and not after:
        return forward(*args, **kwargs)
    with running_sharding():
        for hook in before:
            args, kwargs = hook(module, args, kwargs) or (args, kwargs)
    if (told := _GATHERED.get()) is not None:
        told(module)
    output = forward(*args, **kwargs)
    with running_sharding():
        for hook in after:
            changed = hook(module, args, output)
            output = output if changed is None else changed
    return output


def move_hooks_back(module: nn.Module) -> None:
    """Undo ``move_hooks_inside``."""
    for table in (module._forward_pre_hooks, module._forward_hooks):
        for number, hook in table.items():
            if isinstance(hook, _MovedHook):
                table[number] = hook.hook


def casts_as_unit(module: nn.Module, arguments: Iterable[Tensor]) -> bool:
    """Whether a module's call as a unit casts any of these arguments, or what it returns."""
    state = _state_of(module) if _is_used() else None
    if state is None:
        return False
    policy = state._mp_policy
    casts = policy.cast_forward_inputs and policy.param_dtype is not None
    if casts and any(t.is_floating_point() and t.dtype != policy.param_dtype for t in arguments):
        return True
    return policy.output_dtype not in (None, policy.param_dtype)


@contextmanager
def running_sharding() -> Iterator[None]:
    """Marks ops inside as the sharding's own."""
    before = SHARDING.get()
    try:
        SHARDING.set(True)
        yield
    finally:
        SHARDING.set(before)


@contextmanager
def told_when_gathered(told: Callable[[nn.Module], None]) -> Iterator[None]:
    """Calls a function with each patched unit whose parameters have come inside, before its forward."""
    before = _GATHERED.get()
    try:
        _GATHERED.set(told)
        yield
    finally:
        _GATHERED.set(before)


# Recomputation ---------------------------------------------------------------


class StageUnits:
    """The units whose parameters a stage uses.

    Args:
        module: the stage.
        states: the states of all units.

    Attributes:
        inside: whether there are units inside the stage besides itself.
    """

    def __init__(self, module: nn.Module, states: Iterable[Any]) -> None:
        modules = set(module.modules())
        self._managed = {id(owner) for group in _groups(states) for p in group.fsdp_params for owner in _owners(p)}
        used = _used_by(modules, states)
        within = {s for s in used if s._modules != (module,) and all(each in modules for each in s._modules)}
        self.inside = bool(within)
        # One for several modules is gathered from the first to the last of them.
        alone = {s for s in within if len(s._modules) == 1}
        self._outer = [weakref.ref(state) for state in used if state not in alone]
        self._inner = [weakref.ref(state) for state in used if state in alone]

    def manage(self, module: nn.Module) -> bool:
        """Whether a module's registered parameters are put there by the sharding."""
        return id(module) in self._managed

    def gathered(self) -> AbstractContextManager[Any]:
        """Has a recomputation inside find its parameters; on leaving, all is as it was on entering.

        Units inside are gathered as they are called, and given back, as in forward. The hooks do as they do for
        torch's own checkpoints: they neither prefetch nor expect a backward of this run. What is gathered already, or
        on the way for the backward that comes next, stays.
        """
        return self._gathered() if self._outer or self._inner else nullcontext()

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        outer, inner = _alive(self._outer), _alive(self._inner)
        to_return = [group for group in _groups([*outer, *inner]) if not _comes_anyway(group)]
        with ExitStack() as on_exit:
            for state in (*outer, *inner):
                on_exit.enter_context(_as_in_backward(state))
            for state in inner:
                give_back = functools.partial(_give_back, [g for g in _groups([state]) if g in to_return])
                on_exit.callback(state._modules[0].register_forward_hook(give_back).remove)
            on_exit.callback(_give_back, to_return)
            with running_sharding():
                for group in _groups(outer):
                    _gather(group)
            yield


_KNOWN: weakref.WeakKeyDictionary[nn.Module, tuple[int, StageUnits]] = weakref.WeakKeyDictionary()


def units_of(stage: nn.Module) -> StageUnits:
    """The units whose parameters a stage uses."""
    if not _is_used():
        return _no_units()
    count = len(_mapping())
    known = _KNOWN.get(stage)
    if known is None or known[0] != count:
        known = _KNOWN[stage] = count, StageUnits(stage, _states_of([*_mapping()]))
    return known[1]


@functools.cache
def _no_units() -> StageUnits:
    return StageUnits(nn.Module(), ())


@contextmanager
def _as_in_backward(state: Any) -> Iterator[None]:
    """Have a unit's hooks take a call for a checkpoint's, whose parameters the backward gathers and gives back."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    before, to_run = state._training_state, set(state._modules_to_run_forward)
    try:
        state._training_state = TrainingState.PRE_BACKWARD
        yield
    finally:
        state._training_state = before
        state._modules_to_run_forward.clear()
        state._modules_to_run_forward.update(to_run)


def _comes_anyway(group: Any) -> bool:
    return group.is_unsharded or group._all_gather_result is not None


def _gather(group: Any) -> None:
    with group.use_training_state(type(group._training_state).IDLE):
        group.unshard()
        group.wait_for_unshard()


def _give_back(groups: Iterable[Any], *_: Any) -> None:
    with running_sharding():
        for group in groups:
            with group.use_training_state(type(group._training_state).IDLE):
                group.reshard()


def shows_order_of_gradients(parameters: Iterable[Tensor]) -> bool:
    """Whether the order in which gradients of parameters come makes a difference.

    It does where more than two ranks add them up, by the place of each in what is added up, and where hooks of the
    parameters see it: one that fails leaves those updated in backward that came before.
    """
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 2:
        return True
    return any(each._backward_hooks or getattr(each, "_post_accumulate_grad_hooks", None) for each in parameters)


# Torch's insides -------------------------------------------------------------


def _mapping() -> Any:
    from torch.distributed._composable_state import _module_state_mapping

    return _module_state_mapping


@functools.cache
def _is_available() -> bool:
    return distributed.is_available()


def _is_used() -> bool:
    """Whether there may be units in this process."""
    return _is_available() and len(_mapping()) > 0


def _state_of(module: nn.Module) -> Any:
    from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

    return _get_module_fsdp_state(module)


def _states_of(modules: Iterable[nn.Module]) -> list[Any]:
    """The state of each unit that one of the modules is in, once."""
    return [*dict.fromkeys(state for module in modules if (state := _state_of(module)) is not None)]


def _used_by(modules: Collection[nn.Module], states: Iterable[Any]) -> list[Any]:
    """The states of units that have parameters of these modules."""
    return [s for s in states if any(o in modules for g in _groups([s]) for p in g.fsdp_params for o in _owners(p))]


def _groups(states: Iterable[Any]) -> list[Any]:
    return [group for state in states for group in _groups_of(state)]


def _groups_of(state: Any) -> list[Any]:
    """The groups of parameters of a state; before torch 2.12 it has one or none."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _gives_back(group: Any) -> bool:
    """Whether it shards over all ranks again after forward."""
    return group.post_forward_mesh_info is not None and group.post_forward_mesh_info == group.mesh_info


def _owners(param: Any) -> tuple[nn.Module, ...]:
    """The modules that a parameter is registered in."""
    return (param._module_info.module, *param._module_info.shared_modules)


def _gathers(param: Any) -> list[Tensor]:
    return [*param.all_gather_outputs, *getattr(param, "_unsharded_inner_tensors", ())]


def _alive(references: Iterable[weakref.ref[Any]]) -> list[Any]:
    return [state for reference in references if (state := reference()) is not None]


def bucket_bytes(model: nn.Module) -> int:
    """Bytes of the buckets in a model from step to step, apart from gradients that lie in them.

    A bucket is as large as the gradients of its parameters. Buckets are made with the wrapper, and made anew as the
    second forward begins, in the order in which gradients came.
    """
    total_bytes = 0
    for wrapper in _wrappers(model):
        dense = _reduced(wrapper)
        size_bytes = sum(parameter.numel() * parameter.element_size() for parameter in dense)
        if wrapper.gradient_as_bucket_view:
            size_bytes -= distinct_bytes(parameter.grad for parameter in dense if parameter.grad is not None)
        total_bytes += max(0, size_bytes) + _used_map_bytes(wrapper, len(dense))
    return total_bytes


def _used_map_bytes(wrapper: Any, parameters: int) -> int:
    """Returns the bytes of the flags of used parameters: a table in host memory, and another one on the device."""
    if not (wrapper.static_graph or wrapper.find_unused_parameters):
        return 0
    return 4 * parameters * (2 if wrapper.device.type == "cpu" else 1)


def buckets_change(model: nn.Module) -> bool:
    """Whether the next forward makes buckets anew: the first of all backwards has shown in which order gradients come.

    With ``find_unused_parameters`` it never does.
    """
    return any(
        not wrapper._has_rebuilt_buckets and (wrapper.static_graph or not wrapper.find_unused_parameters)
        for wrapper in _wrappers(model)
    )


def buckets_restored(module: nn.Module) -> Callable[[], None] | None:
    """A way back to the buckets of before the first step, where they are those now; None where there is nothing to do.

    In which bucket a gradient lies decides in which order ranks are summed, and so may change its last bits.
    """
    if not isinstance(module, DistributedDataParallel) or module._has_rebuilt_buckets:
        return None
    if module._comm_hooks or module.mixed_precision is not None or module._use_python_reducer:
        return None  # What was registered with the buckets cannot be read from there.
    return lambda: _made_anew(module)


def _made_anew(wrapper: Any) -> None:
    """Makes the buckets as the wrapper does it where it is made, and where it is unpickled."""
    wrapper.reducer._remove_autograd_hooks()
    parameters, expect_sparse_gradient = wrapper._build_params_for_reducer()
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    wrapper._ddp_init_helper(parameters, expect_sparse_gradient, names, wrapper.static_graph)
    wrapper._has_rebuilt_buckets = False
    if wrapper.static_graph:
        wrapper.reducer._set_static_graph()
        wrapper.logger._set_static_graph()


def _wrappers(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, DistributedDataParallel))


def _reduced(wrapper: Any) -> list[Tensor]:
    """The parameters whose gradients have a place in a bucket: sparse ones have none."""
    parameters, sparse = wrapper._build_params_for_reducer()
    return [parameter for parameter, is_sparse in zip(parameters, sparse, strict=True) if not is_sparse]
