"""Stores the extra state of modules (``get_extra_state``) as text in a file's metadata (docs/format.md, "Extra state").

One JSON object, from the path of each module to its state: ``{"t": [dtype, shape, base64]}`` is a tensor,
``{"d": {key: state}}`` a dictionary.
"""

from __future__ import annotations

import base64
import ctypes
import json
from collections.abc import Mapping
from typing import Any

import torch

from tensorizer._format import dtypes
from tensorizer._format.payloads import contiguous, dense_nbytes, stored_dtype
from tensorizer._system.devices import empty
from tensorizer.errors import FormatError

#: The key of the text in the metadata.
KEY = "tensorizer.extra_state"

#: States by module path, as they are stored.
Nodes = dict[str, dict[str, Any]]

# Metadata may have 100 MB, and base64 is a third larger than the bytes it encodes.
_MAX_NBYTES = 64 << 20
# The deepest nesting that is accepted in a file; Python's own limit is far higher.
_MAX_DEPTH = 100


def check_module(module: object, for_mappings: str = "") -> None:
    """Refuses objects that are not modules; an object whose ``named_modules()`` returns modules counts as one.

    Args:
        module: The caller's argument.
        for_mappings: The function to use for a state dict, as the end of a sentence.

    Raises:
        TypeError: Another type.
    """
    if isinstance(module, type) and issubclass(module, torch.nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got the class {module.__name__} itself: pass an instance")
    if isinstance(module, torch.nn.Module) or callable(getattr(module, "named_modules", None)):
        return
    hint = for_mappings if isinstance(module, Mapping) else ""
    if isinstance(module, torch.Tensor):
        hint = "write_tensor writes single tensors"
    raise TypeError(f"expected a torch.nn.Module, got {type(module).__name__}" + (hint and f"; {hint}"))


def modules_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """All modules by path, each under every path on which ``state_dict`` visits it."""
    try:
        return dict(model.named_modules(remove_duplicate=False))
    except TypeError:  # a class that overrides the method with fewer arguments
        return dict(model.named_modules())


def state_name(path: str) -> str:
    """The name of the extra state of the module at `path` in a state dict."""
    return f"{path}._extra_state" if path else "_extra_state"


def gives_state(module: torch.nn.Module) -> bool:
    """Whether the class of a module overrides ``get_extra_state``."""
    plain = torch.nn.Module.get_extra_state
    return getattr(type(module), "get_extra_state", plain) is not plain


def takes_state(module: torch.nn.Module) -> bool:
    """Whether the class of a module overrides ``set_extra_state``."""
    plain = torch.nn.Module.set_extra_state
    return getattr(type(module), "set_extra_state", plain) is not plain


def saved_beside(root: torch.nn.Module) -> list[str]:
    """Names in the state dict of objects that modules save beside tensors and extra state, as quantized layers do.

    Classes that save their tensors under other names are left out.
    """
    found: list[str] = []
    for path, module in modules_of(root).items():
        plain = torch.nn.Module._save_to_state_dict
        if getattr(type(module), "_save_to_state_dict", plain) is plain:
            continue
        saved: dict[str, Any] = {}
        try:
            module._save_to_state_dict(saved, "", False)
        except Exception:  # its state cannot be had yet
            continue
        tensors = {**module._parameters, **module._buffers}
        own = {name for name in tensors if tensors[name] is not None} - module._non_persistent_buffers_set
        if own <= saved.keys():
            more = [name for name, value in saved.items() if value is not None and name not in tensors]
            found += [f"{path}.{name}" if path else name for name in more if name != state_name("")]
    return found


def is_without_state(module: torch.nn.Module) -> bool:
    """Whether the extra state of a module is ``None``, which is not stored."""
    try:
        return module.get_extra_state() is None
    except Exception:  # its state cannot be had yet, or it only overrides set_extra_state
        return False


def to_text(nodes: Nodes) -> str:
    """The text to store; ``""`` if there is nothing to store."""
    if not nodes:
        return ""
    return json.dumps(nodes, separators=(",", ":"), ensure_ascii=False)


def pack(states: Mapping[str, Any]) -> Nodes:
    """Encodes the states of modules, by module path, for the file.

    Raises:
        TypeError: A state that is neither a tensor nor a dictionary, with ``str`` keys, of such; all are checked.
        ValueError: They are larger than 64 MiB together, or nested too deeply.
        NotImplementedError: A tensor that the format cannot hold.
    """
    nbytes = 0

    def node(state: Any, name: str, depth: int) -> dict[str, Any]:
        nonlocal nbytes
        if depth > _MAX_DEPTH:
            raise ValueError(f"{name}: more than {_MAX_DEPTH} dictionaries inside each other cannot be stored")
        if isinstance(state, Mapping):
            wrong = [key for key in state if not isinstance(key, str)]
            if wrong:
                raise TypeError(f"{name}: expected str keys, got {type(wrong[0]).__name__}")
            return {"d": {key: node(value, f"{name}[{key!r}]", depth + 1) for key, value in state.items()}}
        if not isinstance(state, torch.Tensor) or state.is_meta:
            found = "a tensor on the meta device" if isinstance(state, torch.Tensor) else type(state).__name__
            raise TypeError(f"{name}: expected a tensor or nested dictionaries of tensors, got {found}")
        dtype = stored_dtype(name, state)
        data = contiguous(state, on_device=False)
        size = data.numel() * data.element_size()
        nbytes += size
        if nbytes > _MAX_NBYTES:
            raise ValueError(f"{name}: extra states of more than {_MAX_NBYTES} bytes in all cannot be stored")
        raw = ctypes.string_at(data.data_ptr(), size) if size else b""
        return {"t": [dtype, list(state.shape), base64.b64encode(raw).decode("ascii")]}

    return {path: node(state, state_name(path), 0) for path, state in states.items()}


def unpack(text: str) -> dict[str, Any]:
    """The states by module path, tensors on the CPU.

    Raises:
        FormatError: Not what :func:`pack` writes.
    """
    try:
        nodes = json.loads(text)
        return {path: _state(node, 0) for path, node in nodes.items()}
    except FormatError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, RuntimeError, OverflowError) as error:
        raise FormatError(f"the extra state in the file is damaged: {error}") from None


def _state(node: dict[str, Any], depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise FormatError("the extra state in the file is nested too deeply")
    if "d" in node:
        return {key: _state(value, depth + 1) for key, value in node["d"].items()}
    stored, shape, encoded = node["t"]
    dtype = dtypes.torch_dtype(stored)
    raw = bytearray(base64.b64decode(encoded, validate=True))
    wanted = dense_nbytes(shape, dtype.itemsize) if isinstance(shape, list) else None
    if wanted is None:
        raise FormatError(f"the extra state in the file is damaged: expected a shape, got {shape!r:.80}")
    if len(raw) != wanted:
        raise FormatError(f"the extra state in the file is damaged: expected {wanted} bytes, got {len(raw)}")
    if not raw:
        return empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).view(shape)
