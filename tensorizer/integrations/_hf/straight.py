"""P2: an empty model is filled straight from the file, on its device, where names and shapes are the same."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Optional

import torch
from torch.overrides import TorchFunctionMode

from tensorizer._files.fill_model import ModelFill, fill_model
from tensorizer._format.payloads import same_bits
from tensorizer._load.fit import Fact, Slot, shown, slots_in
from tensorizer._load.modules import insert_into_module
from tensorizer._load.report import LoadReport
from tensorizer._system.devices import ordinary_tensors
from tensorizer.deserializer import TensorDeserializer
from tensorizer.integrations._hf.weights import Weights
from tensorizer.utils import no_init_or_tensor

__all__ = ["empty_on", "fill_straight", "meta_names"]

logger = logging.getLogger("tensorizer.integrations.huggingface")

# Methods of tensors and functions of torch.nn.init that give values to what is there.
_FILLING = frozenset(
    [
        "normal_",
        "uniform_",
        "trunc_normal_",
        "xavier_normal_",
        "xavier_uniform_",
        "kaiming_normal_",
        "kaiming_uniform_",
        "orthogonal_",
        "eye_",
        "dirac_",
        "sparse_",
        "zero_",
        "zeros_",
        "ones_",
        "fill_",
        "constant_",
        "copy_",
        "add_",
        "sub_",
        "mul_",
        "div_",
        "clamp_",
        "erfinv_",
        "exponential_",
        "log_",
    ]
)
_HALVES = (torch.float16, torch.bfloat16)
_CONVERTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # what the engine's dtype= concerns


@contextlib.contextmanager
def empty_on(device: torch.device) -> Iterator[None]:
    """Models built here have their computed buffers on `device` and parameters without memory."""
    with torch.device(device), no_init_or_tensor(), _NothingToInitialise():
        yield


class _NothingToInitialise(TorchFunctionMode):
    """Filling a tensor without memory is nothing, and costs nothing: on the meta device torch takes milliseconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _FILLING:
            target = args[0] if args else (kwargs or {}).get("tensor")
            if isinstance(target, torch.Tensor) and target.is_meta:
                return target
        return func(*args, **(kwargs or {}))


def meta_names(model: torch.nn.Module) -> list[str]:
    """Parameters and buffers that have no data."""
    return [
        shown(name)
        for name, slot in slots_in(dict(model.named_modules())).items()
        if slot.tensor is not None and slot.tensor.is_meta
    ]


def fill_straight(model: torch.nn.Module, weights: Weights, device: Any) -> Optional[LoadReport]:
    """Fills an empty model where the file has exactly its tensors.

    Args:
        model: Its tensors are replaced. Untouched where the answer is ``None``.
        weights: The file.
        device: A device, or a mapping from prefixes of names to devices.

    Returns:
        The report; ``None`` where names, shapes or kinds differ, or modules do more with a state dict than keep it.

    Raises:
        FormatError, HashMismatchError, CryptographyError, OSError: The file.
    """
    if weights.pickled:
        return None
    slots = {
        shown(name): slot for name, slot in slots_in(dict(model.named_modules())).items() if slot.tensor is not None
    }
    wanted = _wanted_dtypes(model, slots)
    main = _most_common(wanted.values())
    with weights.open(device, main) as file:
        fill = ModelFill(model, file, True, False)
        if fill.takes_itself or not fill.report.ok or not _kinds_fit(fill.facts, wanted):
            return None
        report = fill.report
        others = {name for name, dtype in wanted.items() if dtype in _CONVERTED and dtype != main}
        apart = _untie_what_is_stored_apart(model, slots, file)
        if not others.intersection(report.loaded):
            if apart:  # the model has further tensors now
                fill = ModelFill(model, file, True, False)
            report = fill.run(strict=True)
            _tie_again(model, slots, apart)
            return report
    for dtype in dict.fromkeys(wanted.values()):
        chosen = {name for name, other in wanted.items() if other == dtype}
        accepts = functools.partial(_is_among, chosen)
        with weights.open(device, dtype if dtype in _CONVERTED else None, accepts) as part:
            fill_model(model, part, False, True, False)
    _tie_again(model, slots, apart)
    return report


def _is_among(chosen: Collection[str], stored_name: Any) -> bool:
    return shown(str(stored_name)) in chosen


def _wanted_dtypes(model: torch.nn.Module, slots: Mapping[str, Slot]) -> dict[str, torch.dtype]:
    """The dtype of each tensor: that of the empty model, or float32 where the class says that halves will not do."""
    plain = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    strict = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    found = {}
    for name, slot in slots.items():
        assert slot.tensor is not None
        dtype = slot.tensor.dtype
        patterns = (plain | strict) if dtype == torch.float16 else strict
        keep = dtype in _HALVES and any(_is_part(pattern, name) for pattern in patterns)
        found[name] = torch.float32 if keep else dtype
    return found


def _is_part(pattern: str, name: str) -> bool:
    return re.search(rf"(^|\.){re.escape(pattern)}($|\.)", name) is not None


def _most_common(dtypes: Iterable[torch.dtype]) -> Optional[torch.dtype]:
    counted = collections.Counter(dtype for dtype in dtypes if dtype in _CONVERTED)
    return counted.most_common(1)[0][0] if counted else None


def _kinds_fit(facts: Mapping[str, Fact], wanted: Mapping[str, torch.dtype]) -> bool:
    """Whether what is stored is what the model wants, or can be converted to it by the engine."""
    for name, fact in facts.items():
        stored, target = fact.dtype, wanted.get(name)
        if target is None or stored == target:
            continue
        if stored not in _CONVERTED or target not in _CONVERTED:  # numbers of one kind, all of them floating point
            return False
    return True


def _untie_what_is_stored_apart(
    model: torch.nn.Module, slots: Mapping[str, Slot], file: TensorDeserializer
) -> list[list[str]]:
    """Gives names that the model ties tensors of their own where the file stores several of them.

    Returns:
        The names of each group that was taken apart: what they hold decides afterwards.
    """
    groups: dict[int, list[str]] = {}
    for name, slot in slots.items():
        groups.setdefault(id(slot.tensor), []).append(name)
    aliases = {shown(str(alias)) for alias in file.ties}
    stored = {shown(str(name)) for name in file} - aliases
    modules = dict(model.named_modules())
    found = []
    for group in groups.values():
        apart = [name for name in group if name in stored]
        if len(apart) < 2:
            continue
        for name in apart[1:]:
            slot = slots[name]
            assert slot.tensor is not None
            with ordinary_tensors():
                own = torch.nn.Parameter(slot.tensor.detach().to("meta"), requires_grad=slot.tensor.requires_grad)
            insert_into_module(modules, name if "." in name else f".{name}", slot.is_buffer, own)
        found.append(apart)
    return found


def _tie_again(model: torch.nn.Module, slots: Mapping[str, Slot], groups: list[list[str]]) -> None:
    """Ties names whose tensors turned out to be equal, on one device; others stay apart, with a line if they differ."""
    modules = dict(model.named_modules())
    for first, *others in groups:
        kept = _tensor_at(slots[first])
        for name in others:
            if _tensor_at(slots[name]).device != kept.device:
                continue  # a device map parts them
            if same_bits(kept, _tensor_at(slots[name])):
                insert_into_module(modules, name if "." in name else f".{name}", slots[name].is_buffer, kept)
            else:
                logger.warning(
                    "%s: %s and %s are tied in the model and differ in the file: they stay apart",
                    type(model).__name__,
                    first,
                    name,
                )


def _tensor_at(slot: Slot) -> torch.Tensor:
    tensor = getattr(slot.module, slot.attribute)
    assert isinstance(tensor, torch.Tensor)
    return tensor
