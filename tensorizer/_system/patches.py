"""Replaces attributes of other libraries while a block of the program needs it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
from collections.abc import Callable, Generator, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, Optional, TypeVar, cast

from tensorizer._system import locks

_Value = TypeVar("_Value")
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
