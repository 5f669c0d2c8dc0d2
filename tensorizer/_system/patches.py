"""Replaces attributes of other libraries while a block of the program needs it, so that models take no memory."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import threading
import types
from collections.abc import Callable, Generator, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, Optional, TypeVar, cast, overload

import torch
from torch.overrides import TorchFunctionMode

from tensorizer._system import locks

_Value = TypeVar("_Value")
_Model = TypeVar("_Model")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Make = Callable[[], contextlib.AbstractContextManager[Any]]


class CountedPatch(contextlib.AbstractContextManager[None]):
    """Replaces attributes while at least one block that needs it is active, anywhere in the process.

    Args:
        replacements: Called when the first block begins. Returns owners, the names of their attributes and new values.
    """

    def __init__(self, replacements: Callable[[], Iterable[tuple[Any, str, Any]]]) -> None:
        self._replacements = replacements
        self._undo = contextlib.ExitStack()
        self._blocks = 0
        self._lock = threading.RLock()
        locks.makers[self] = threading.RLock

    def __enter__(self) -> None:
        with self._lock:
            if self._blocks == 0:
                with contextlib.ExitStack() as undo:
                    for owner, name, value in self._replacements():
                        undo.callback(setattr, owner, name, getattr(owner, name))
                        setattr(owner, name, value)
                    self._undo = undo.pop_all()
            self._blocks += 1

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._blocks -= 1
            if self._blocks == 0:
                self._undo.close()


@contextlib.contextmanager
def in_this_task(variable: ContextVar[_Value], value: _Value) -> Iterator[None]:
    """A block in which `variable`, which each thread and task has for itself, has this value."""
    outer = variable.get()
    variable.set(value)
    try:
        yield
    finally:
        variable.set(outer)


class Activity(NamedTuple):
    """The context managers of one block, or of one call of a decorated function. Each call makes a new one."""

    # Active from the first line to the last, also while a coroutine waits; a generator leaves it after every step.
    whole: _Make
    # Active only while code of the block runs, in the task that runs it.
    step: _Make


class Block(contextlib.AbstractContextManager[None]):
    """A block that a program enters once with ``with``, and a decorator of functions, coroutines and generators.

    It is active whenever the code of a decorated coroutine or generator runs, in any thread. Code that runs between the
    steps of a generator is outside the block.

    Args:
        begin: Called when the block is entered, and at each call of a decorated function.
    """

    def __init__(self, begin: Callable[[], Activity]) -> None:
        self._begin = begin
        self._active: Optional[contextlib.ExitStack] = None
        self._is_new = True

    def __enter__(self) -> None:
        if not self._is_new:
            raise RuntimeError("this block was entered before: make a new one for each with statement")
        self._is_new = False
        self._active = _entered(self._begin())

    def __exit__(self, *exc: Any) -> None:
        active, self._active = self._active, None
        if active is not None:
            active.__exit__(*exc)

    def __call__(self, function: _Function) -> _Function:
        """Returns a function that runs each call within its own block."""
        return cast(_Function, _decorated(function, self._begin))


def _entered(activity: Activity) -> contextlib.ExitStack:
    with contextlib.ExitStack() as stack:
        stack.enter_context(activity.whole())
        stack.enter_context(activity.step())
        return stack.pop_all()


def _decorated(function: Any, begin: Callable[[], Activity]) -> Any:
    if inspect.iscoroutinefunction(function):
        return _coroutine(function, begin)
    if inspect.isasyncgenfunction(function):
        return _async_generator(function, begin)
    if inspect.isgeneratorfunction(function):
        return _generator(function, begin)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        activity = begin()
        with _entered(activity):
            result = function(*args, **kwargs)
        # A partial or another decorator may hide what kind of function it is.
        kinds = (
            (inspect.iscoroutine, _coroutine),
            (inspect.isasyncgen, _async_generator),
            (inspect.isgenerator, _generator),
        )
        for is_kind, decorated in kinds:
            if is_kind(result):
                return decorated(lambda: result, lambda: activity)()
        return result

    return call


def _coroutine(function: Any, begin: Callable[[], Activity]) -> Any:
    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        activity = begin()
        with activity.whole():
            return await _awaitable_steps(function(*args, **kwargs), activity.step)

    return call


def _generator(function: Any, begin: Callable[[], Activity]) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        activity = begin()
        return (yield from _steps(function(*args, **kwargs), lambda: _entered(activity)))

    return call


def _async_generator(function: Any, begin: Callable[[], Activity]) -> Any:
    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        activity = begin()
        inner = function(*args, **kwargs)
        try:
            step = inner.asend(None)
            while True:
                try:
                    with activity.whole():
                        value = await _awaitable_steps(step, activity.step)
                except StopAsyncIteration:
                    return
                try:
                    step = inner.asend((yield value))
                except GeneratorExit:
                    raise
                except BaseException as error:
                    step = inner.athrow(error)
        finally:
            with activity.whole():
                await _awaitable_steps(inner.aclose(), activity.step)

    return call


def _steps(inner: Any, active: _Make) -> Generator[Any, Any, Any]:
    """Runs a generator, or the generator of an awaitable, with each step in a new `active()`."""
    step, argument = inner.send, None
    while True:
        with active():
            try:
                value = step(argument)
            except StopIteration as end:
                return end.value
        try:
            argument = yield value
            step = inner.send
        except GeneratorExit:
            with active():
                inner.close()
            raise
        except BaseException as error:
            step, argument = inner.throw, error


_awaitable_steps = types.coroutine(_steps)


# --- models without allocation and initialisation -----------------------------------------------------------------

_skipping_init: ContextVar[bool] = ContextVar("tensorizer_skipping_init", default=False)

_torch_empty: Callable[..., torch.Tensor] = torch.empty
_QUIET_MODULES: tuple[Any, ...] = (torch.nn.Linear, torch.nn.Embedding, torch.nn.LayerNorm)


@functools.wraps(_torch_empty)
def _empty_on_meta(*args: Any, **kwargs: Any) -> torch.Tensor:
    if _skipping_init.get() and kwargs.get("out") is None:
        kwargs["device"] = "meta"
        kwargs.pop("pin_memory", None)  # only host memory can be pinned
    return _torch_empty(*args, **kwargs)


def _quiet(reset_parameters: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(reset_parameters)
    def reset_unless_skipping(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if not _skipping_init.get():
            reset_parameters(self, *args, **kwargs)

    return reset_unless_skipping


@functools.cache
def _let_torch_note_its_functions() -> None:
    """Uses a ``torch.device(...)`` context once, since its first use records which functions make tensors.

    These should be torch's own functions, not replacements.
    """
    with torch.device("cpu"):
        _torch_empty(0)


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    _let_torch_note_its_functions()
    yield torch, "empty", _empty_on_meta
    for module in _QUIET_MODULES:
        yield module, "reset_parameters", _quiet(module.reset_parameters)


_without_values = CountedPatch(_replacements)


@overload
def no_init_or_tensor(loading_code: None = None) -> contextlib.AbstractContextManager[None]: ...


@overload
def no_init_or_tensor(loading_code: Callable[[], _Model]) -> _Model: ...


def no_init_or_tensor(loading_code: Optional[Callable[[], Any]] = None) -> Any:
    """Build a model without spending time or memory on parameters that a file is about to supply.

    Two forms:

        >>> from tensorizer.utils import no_init_or_tensor
        >>> with no_init_or_tensor():
        ...     model = torch.nn.Linear(4, 2)
        >>> model = no_init_or_tensor(lambda: torch.nn.Linear(4, 2))

    While it is active, ``torch.empty`` makes tensors on the meta device (an explicit ``device=`` is overridden) and
    ``reset_parameters`` of ``Linear``, ``Embedding`` and ``LayerNorm`` does nothing. Everything else works as always:
    buffers made by ``torch.zeros``, ``torch.arange`` and the like are real and on the ambient device. To have them
    where the model will run, also wrap the code in ``torch.device(device)``.

    The effect is limited to the current thread and coroutine. A nested use changes nothing. The original functions are
    restored when the last active context ends.

    Args:
        loading_code: Called without arguments inside the context; ``None`` returns the context manager itself.

    Returns:
        The result of ``loading_code()``, or the context manager.

    Raises:
        TypeError: ``loading_code`` is neither ``None`` nor callable.
    """
    block = Block(lambda: Activity(lambda: _without_values, lambda: in_this_task(_skipping_init, True)))
    if loading_code is None:
        return block
    if not callable(loading_code):
        raise TypeError(
            "no_init_or_tensor: expected a callable without arguments or nothing (as a context manager), "
            f"got {type(loading_code).__name__}"
        )
    with block:
        return loading_code()


# Methods of tensors and functions of torch.nn.init that set the values of existing tensors.
_FILLING = re.compile(
    "(normal|uniform|trunc_normal|xavier_normal|xavier_uniform|kaiming_normal|kaiming_uniform|orthogonal|eye|dirac|sparse|"
    "zero|zeros|ones|fill|constant|copy|add|sub|mul|div|clamp|erfinv|exponential|log)_"
)


class NothingToInitialise(TorchFunctionMode):
    """A block in which initialising a tensor without memory does nothing, since torch takes milliseconds for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _FILLING.fullmatch(getattr(func, "__name__", "")):
            target = args[0] if args else (kwargs or {}).get("tensor")
            if isinstance(target, torch.Tensor) and target.is_meta:
                return target
        return func(*args, **(kwargs or {}))
