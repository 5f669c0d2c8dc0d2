"""Filling a module from a file, as :mod:`.compare` decided; comparing one with the digests of a file."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import torch

from tensorizer._format.entries import FilterFuncType, TensorType
from tensorizer._format.extra_state import is_without_state, state_name
from tensorizer._format.names import Name, double_name, listed
from tensorizer._format.payloads import same_bits
from tensorizer._load.compare import (
    LoadReport,
    Misfit,
    ModuleView,
    Slot,
    decide,
    is_dtensor,
    misplaced,
    shown,
    unfit_in_place,
)
from tensorizer._load.open_file import OpenFile
from tensorizer._load.open_index import file_error
from tensorizer._system.devices import ordinary_tensors
from tensorizer._system.sizes import counted

logger = logging.getLogger("tensorizer.serialization")

# What nearly all tensors of modules are: they are told by their type, since a call for each takes longer.
_PLAIN = (torch.nn.Parameter, torch.Tensor)


class FillOptions(NamedTuple):
    """What the ways of filling a module differ in."""

    assign: Union[bool, str] = True
    """``True`` replaces tensors, ``False`` copies into them, ``"auto"`` replaces those on the meta device."""
    ties: str = "kept"
    """What becomes of names that the module ties, where the file has several tensors for them: one tensor, the first
    (``"kept"``); each what the file has for it (``"stored"``); those that are equal one tensor (``"equal"``)."""
    by_modules: bool = False
    """Whether the file lists what modules hold, as ``load_into_module`` takes it, and not a state dict."""
    ignores_sizes: bool = False
    """Whether tensors of another shape or kind stay as they are."""
    in_place: bool = False
    """Whether every tensor must be of the shape and dtype of the file's, and is written over."""
    tells_unfilled: bool = False
    """Whether a warning names parameters that stay as they were; without, the report does alone."""


class Fill:
    """One load into a module: decided as a whole when this is made, then read, then placed.

    Attributes:
        report: What the file has and lacks for the module; complete after :meth:`run`.
        hands_over: Whether modules do more with a state dict than put tensors in their places, so that they get one.
        left_on_meta: Names that have no data afterwards either.
    """

    def __init__(
        self,
        view: ModuleView,
        file: OpenFile,
        stored: Mapping[str, int],
        how: FillOptions,
        strict: bool,
        filter_func: Optional[FilterFuncType] = None,
        prefix: str = "",
    ) -> None:
        self._view, self._file, self._stored = view, file, stored
        self._how, self._strict, self._assign = how, strict, how.assign
        self._expects = self._expects_of(filter_func, prefix)
        self._slots = view.slots  # and those that the module gets
        states = {state_name(path): state for path, state in file.extra_states().items()}
        self._states = {
            name[len(prefix) :]: state
            for name, state in states.items()
            if name.startswith(prefix) and (filter_func is None or filter_func(name))
        }
        self.hands_over = not how.by_modules and view.takes_state_dict
        if self.hands_over:
            there = [slot.tensor for slot in view.slots.values() if slot.tensor is not None and slot.in_state_dict]
            if any(map(self._replaces, there)):
                self._assign = True  # load_state_dict replaces all or none
        expects = self._expects
        self.report = decide(
            view,
            file,
            stored,
            self._states,
            by_modules=how.by_modules,
            expects=expects,
            may_lack=None if how.by_modules else view.may_lack,
            refuses=None if how.by_modules else self._matters,
            replaces=None if self._assign is True else self._replaces,
        )
        left = {
            name: slot
            for name, slot in view.slots.items()
            if slot.tensor is not None
            and slot.tensor.is_meta
            and name not in stored
            and name not in self.report.tied
            and (how.by_modules or not slot.counts_batches)
            and (expects is None or expects(name))
        }
        # Of a module that is there twice, the file lists one path.
        filled = {(slot.module, slot.attribute) for name, slot in view.slots.items() if name in stored} if left else ()
        self.left_on_meta = [name for name, slot in left.items() if (slot.module, slot.attribute) not in filled]

    # ---- what was decided -------------------------------------------------------------------------------------------

    def _expects_of(self, filter_func: Optional[FilterFuncType], prefix: str) -> Optional[Callable[[str], bool]]:
        """Whether the file should have a name that it lacks: not where a filter keeps the file from giving it.

        Strict loads are narrowed on both sides: what the filter refuses need not be in the file.
        """
        if filter_func is None:
            return None
        in_file = set(self._file.names)

        def expects(name: str) -> bool:
            of_root = not prefix and "." not in name and name not in self._view.extra_state_modules
            stored_name = f".{name}" if of_root else prefix + name
            return stored_name not in in_file and (not self._strict or bool(filter_func(stored_name)))

        return expects

    def _replaces(self, target: torch.Tensor) -> bool:
        return self._assign is True or (self._assign == "auto" and target.is_meta)

    def _matters(self, row: Misfit) -> bool:
        """Of a place on the meta device nothing is kept, so that its kind does not matter."""
        if self._view.may_change(row.name) and not self._how.ignores_sizes:
            return False
        return row.what == "shape" or not self._is_meta(row.name)

    def _is_meta(self, name: str) -> bool:
        target = self._slots[name].tensor
        return target is not None and target.is_meta

    # ---- what is done -----------------------------------------------------------------------------------------------

    def run(self, verify_hash: Optional[bool] = None) -> LoadReport:
        """Refuses what does not fit, reads and places the rest; after an error of reading the module is as it was.

        Warns (on behalf of the caller's caller) of meta tensors that are replaced by others of another shape or kind,
        and of parameters that are left as they were, unless a filter chose what is loaded.

        Raises:
            KeyError: The module has no such submodule, or something else of the name.
            LoadError: Tensors have another shape or kind; with `strict`, all that load_state_dict refuses.
            NotImplementedError: The module has a DTensor for a tensor of the file.
        """
        begin = time.perf_counter()
        self.check()
        loaded = self.report.loaded
        if self.hands_over:
            skipped = {row.name for row in self.report.mismatched}
            loaded = tuple(name for name in self._stored if name not in skipped)
        states = () if self.hands_over else self._view.states_stored(self._file, self._stored, self._how.by_modules)
        names = [*loaded, *states]
        tensors = dict(zip(names, self._file.load([self._stored[name] for name in names], verify_hash)))
        self._states.update({name: tensors.pop(name).detach() for name in states})
        self._file.check_files()
        self._note_conflicts(tensors)
        if self.hands_over:
            self._hand_over(tensors)
            self._warn()
        else:
            self._warn()
            self.put(tensors)
        self.report = dataclasses.replace(self.report, seconds=time.perf_counter() - begin)
        return self.report

    def check(self) -> None:
        """Refuses what does not fit, and finds the places of tensors that the module has no place for yet."""
        unusual = [name for name, slot in self._slots.items() if type(slot.tensor) not in _PLAIN]
        sharded = [name for name in unusual if name in self._stored and is_dtensor(self._slots[name].tensor)]
        if sharded:
            raise NotImplementedError(
                f"{self.report.source}: {sharded[0]!r} is a DTensor in {self.report.module}, and a whole tensor cannot "
                "take its place: pass get_model_state_dict(model) to dcp.load, with a TensorizerReader of the file"
            )
        report, refused = self.report, [] if self._how.ignores_sizes else list(self.report.mismatched)
        if self._how.by_modules and not self._strict:
            refused = [row for row in refused if not self._is_meta(row.name)]
        if self._strict and (report.missing or report.unexpected or refused):
            raise report.error(refused, strict=True)
        new: dict[str, Slot] = {}
        for name in report.loaded if self._how.by_modules else ():
            slot, kind = self._slots.get(name), self._file.index.type(self._stored[name])
            is_buffer = kind == TensorType.BUFFER
            if slot is None or (is_buffer is not slot.is_buffer and kind != TensorType.STATE_DICT):
                try:
                    new[name] = _new_slot(self._view.modules, name, is_buffer)
                except KeyError as error:
                    raise KeyError(f"{error.args[0]}{misplaced(report.unexpected, set(report.missing))}") from None
        if refused:
            raise report.error(refused, strict=False)
        copied = [] if self._assign is True or self.hands_over else report.loaded
        expanded = [name for name in copied if _is_expanded(self._slots[name].tensor) and not self._is_meta(name)]
        if expanded:
            raise report.refusal(
                f"{report.source}: tensors of the model that are expanded have several elements in one place, which no "
                f"copy can fill: {listed(expanded)}; clone() them before, or use assign=True"
            )
        if self._how.in_place:
            self._check_in_place()
        self._slots = {**self._slots, **new} if new else self._slots

    def _check_in_place(self) -> None:
        problems = []
        for name in self.report.loaded:
            i, target = self._stored[name], self._slots[name].tensor
            stored = self._file.stored_dtype(i)
            dtype = self._file.options.dtype if self._file.casts(stored) else stored
            if target is not None and dtype is not None:
                shape = () if target.dim() == 0 and self._file.may_be_scalar(i) else self._file.index.shape(i)
                problem = unfit_in_place(target, dtype, shape)
                problems += [f"{name!r:.200}: {problem}"] if problem else []
        if problems:
            raise self.report.refusal(
                f"{self.report.source}: not written over {self.report.module}: {'; '.join(problems)}"
            )

    @functools.cached_property
    def _groups(self) -> list[list[str]]:
        """Names that are to be one tensor; the first of them that the file has counts."""
        if self._how.ties != "stored":
            return self._view.groups
        groups: dict[tuple[int, str], list[str]] = {}  # each name of its own, but a place can have one tensor alone
        for name in self._slots:
            slot = self._slots[self.report.tied.get(name, name)]
            groups.setdefault((id(slot.module), slot.attribute), []).append(name)
        return list(groups.values())

    def _note_conflicts(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Finds names of one tensor that the file has other contents for than under the first of them.

        Raises:
            LoadError: There are some, and the load is strict.
        """
        groups = self._groups if self._how.ties != "equal" else []
        found = [name for group in groups if len(group) > 1 for name in _differing(group, tensors)]
        self.report = dataclasses.replace(self.report, conflicting=tuple(found))
        if self._strict and found:
            raise self.report.error((), strict=True)

    def put(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Puts tensors in their places, and gives modules their extra states."""
        self._place(tensors, self._groups)
        for name, state in self._states.items():
            if name in self._view.extra_state_modules:
                self._view.extra_state_modules[name].set_extra_state(state)

    def _place(self, tensors: Mapping[str, torch.Tensor], groups: Iterable[list[str]]) -> None:
        shared: list[tuple[list[str], torch.Tensor]] = []
        for group in groups:
            sources = [tensors[name] for name in group if name in tensors]
            if len(sources) > 1 and self._how.ties == "equal":
                shared += self._parted(group, tensors, sources[0])
            elif sources:
                shared.append((group, sources[0]))
            elif not self._how.by_modules and self._is_meta(group[0]) and self._slots[group[0]].counts_batches:
                device = self._file.device_of(group[0])
                with ordinary_tensors():
                    shared.append((group, torch.zeros((), dtype=torch.long, device=device)))
        if self._how.in_place:
            there = ((self._slots[names[0]].tensor, source) for names, source in shared)
            write_over((target, source) for target, source in there if target is not None)
            return
        replaces = None if self._assign is True else self._replaces
        place(self._slots, shared, replaces, keep_ties_of_file=self._how.ties == "stored")

    def _parted(
        self, group: list[str], tensors: Mapping[str, torch.Tensor], first: torch.Tensor
    ) -> list[tuple[list[str], torch.Tensor]]:
        """Names that the module ties, by what the file has: those that it holds with equal contents stay one tensor."""
        parts: dict[int, tuple[list[str], torch.Tensor]] = {}
        for name in group:
            tensor = tensors.get(name, first)
            on_one_device = tensor.device == first.device  # else a device map parts them
            if tensor is not first and on_one_device:
                if same_bits(first, tensor):
                    tensor = first
                else:
                    logger.warning(
                        "%s: %s and %s are tied in the model and differ in the file: they stay apart",
                        self.report.module,
                        group[0],
                        name,
                    )
            parts.setdefault(id(tensor), ([], tensor))[0].append(name)
        return list(parts.values())

    def _hand_over(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Hands a state dict to the model, which decides what becomes of it."""
        slots, extra_state_modules, assign = self._slots, self._view.extra_state_modules, self._assign is True
        # Buffers that state dicts leave out are no business of load_state_dict.
        hidden = {n: t for n, t in tensors.items() if n in slots and not slots[n].in_state_dict}
        state: dict[str, Any] = {name: tensor.detach() for name, tensor in tensors.items() if name not in hidden}
        given = self._view.states_given(self._states, self._stored)
        # As with the state dict of such a model: what is None there is handed back.
        empty = [name for name, module in extra_state_modules.items() if is_without_state(module)]
        state.update({name: None for name in empty if name not in given})
        state.update(self._states)
        state.update({name: state[other] for name, other in given.items() if other != name})
        left = {row.name for row in self.report.mismatched}
        made: dict[int, torch.Tensor] = {}
        for group in self._groups:
            target = slots[group[0]].tensor
            first = next((tensors[name] for name in group if name in tensors), None)
            if first is None or target is None:
                continue
            # One object under all names, so that what is assigned stays tied.
            one = made.get(id(first)) if self._how.ties == "stored" else None
            if one is None:
                as_parameter = assign and isinstance(target, torch.nn.Parameter)
                one = made[id(first)] = as_trainable_as(target, first) if as_parameter else first.detach()
            state.update({name: one for name in group if slots[name].in_state_dict and name not in left})
        options: dict[str, Any] = {"assign": True} if assign else {}
        try:
            # A method of another class may answer nothing: then it has to be the judge.
            result = self._view.module.load_state_dict(
                state, strict=self._strict and self._view.loads_itself, **options
            )
        except RuntimeError as error:
            raise self.report.refusal(str(error)) from None
        groups = [group for group in self._groups if not hidden.keys().isdisjoint(group)]
        self._place(hidden, groups)
        missing, unexpected = (tuple(getattr(result, f"{kind}_keys", ())) for kind in ("missing", "unexpected"))
        loaded = tuple(name for name in tensors if name not in unexpected and name not in extra_state_modules)
        self.report = dataclasses.replace(
            self.report,
            loaded=loaded,
            nbytes=sum(self._file.index.loaded_nbytes(self._stored[name]) for name in loaded),
            missing=tuple(
                name for name in missing if name not in left and (self._expects is None or self._expects(name))
            ),
            unexpected=unexpected,
        )
        if self._strict and (self.report.missing or self.report.unexpected):
            raise self.report.error((), strict=True)

    def _warn(self) -> None:
        report = self.report
        texts = [self._unfilled() if self._how.tells_unfilled else ""]
        if self._how.by_modules and report.mismatched:
            rows = [f"{row.name} (file {row.file}, module {row.model})" for row in report.mismatched]
            texts.append(
                f"{counted(len(rows), 'tensor')} of {report.module} on the meta device: replaced by "
                f"tensors of another shape or kind: {'; '.join(rows)}"
            )
        if any(texts):
            warnings.warn(f"{report.source}: {'. '.join(filter(None, texts))}", stacklevel=4)
        if self._how.by_modules and self.left_on_meta:
            names, more = self.left_on_meta[:20], len(self.left_on_meta) > 20
            logger.warning(
                "%s has no data for %d tensors of %s, which stay on the meta device: %s",
                report.source,
                len(self.left_on_meta),
                report.module,
                ", ".join(names) + (", …" if more else ""),
            )

    def _unfilled(self) -> str:
        """What to say if parameters of the module, or all of it, stay as they were; nothing if none do."""
        report, slots, extra_state_modules = self.report, self._view.slots, self._view.extra_state_modules
        lacking = [name for name in report.missing if name in slots]
        if report.loaded or not extra_state_modules.keys().isdisjoint((*self._states, *self._stored)):
            lacking = [name for name in lacking if self._expects is None and not slots[name].is_buffer]
            if not lacking:
                return ""
            many = len(lacking) > 1
            text = f"{len(lacking)} {'parameters' if many else 'parameter'} of {report.module} "
            text += "stay as they are" if many else "stays as it is"
        elif self._stored or slots:
            text = f"nothing is loaded into {report.module}"
        else:
            return ""
        if lacking:
            text += f": the file has no {', '.join(map(repr, lacking[:3]))}{', …' if len(lacking) > 3 else ''}"
        loaded = set(report.loaded)
        return f"{text}{misplaced([n for n in self._stored if n not in loaded], set(lacking))}"


def module_names(file: OpenFile, entries: Sequence[int], prefix: str = "") -> dict[str, int]:
    """Entries by the state-dict name of a tensor of a module.

    Args:
        file: The file.
        entries: Of what may be loaded.
        prefix: Selects the names that begin with it, and is no part of them in the module.

    Raises:
        FormatError: Two tensors have one name.
        NotImplementedError: The file holds nested containers, and no `prefix` is given.
        ValueError: No name begins with `prefix`.
    """
    if prefix:
        return _names_behind(prefix, file, entries)
    found: dict[str, int] = {}
    for i in entries:
        name = file.names[i]
        if not isinstance(name, str):
            raise NotImplementedError(
                f"tensor {name!r} was written from nested containers, which have no modules to load into; "
                "deserializer.tree() gives the containers, and module.load_state_dict() takes one of them"
            )
        if name.rfind(".") == 0:
            name = name[1:]
        if name in found:
            names = file.names[found[name]], file.names[i]
            raise file_error(file.source_name, double_name((stored, name) for stored in names))
        found[name] = i
    return found


def _names_behind(prefix: str, file: OpenFile, entries: Sequence[int]) -> dict[str, int]:
    names = [file.names[i] for i in entries]
    texts = [name if isinstance(name, str) else ".".join(map(str, name)) for name in names]
    chosen = [(text[len(prefix) :], i) for text, i in zip(texts, entries) if text.startswith(prefix) and text != prefix]
    if not chosen:
        beginnings = list(dict.fromkeys(text[: text.find(".") + 1] or text for text in texts))
        raise ValueError(
            f"prefix: no tensor of {file.source_name} has a name that begins with {prefix!r:.200}; they begin with "
            f"{listed(beginnings) or 'nothing: there are none'}"
        )
    found = dict(chosen)
    if len(found) < len(chosen):
        raise file_error(file.source_name, double_name((file.names[i], text) for text, i in chosen))
    return found


def is_state_dict(file: OpenFile, entries: Iterable[int]) -> bool:
    """Whether all of some entries were written from a state dict, and not as tensors of a module."""
    kind = file.index.type
    return all(kind(i) == TensorType.STATE_DICT for i in entries)


def place(
    slots: Mapping[str, Slot],
    places: Iterable[tuple[list[str], torch.Tensor]],
    replaces: Optional[Callable[[torch.Tensor], bool]],
    keep_ties_of_file: bool = False,
) -> None:
    """Puts tensors into a module.

    What is replaced needs gradients where what was there did; what is copied keeps dtype, device and identity.

    Args:
        slots: Places by name.
        places: Names that are to be one tensor, and that tensor.
        replaces: Whether a tensor of the module is replaced, and not copied into; ``None``: all are.
        keep_ties_of_file: One tensor of the file is one parameter, wherever it goes.
    """
    copied: list[tuple[torch.Tensor, torch.Tensor]] = []
    made: dict[int, torch.Tensor] = {}
    with ordinary_tensors():
        for names, source in places:
            target = slots[names[0]].tensor
            if target is not None and replaces is not None and not replaces(target):
                copied.append((target, source))
                continue
            one = source
            if isinstance(target, torch.nn.Parameter):  # register_buffer makes plain tensors itself
                known = made.get(id(source)) if keep_ties_of_file else None
                one = as_trainable_as(target, source, keep_ties_of_file) if known is None else known
                made[id(source)] = one
            for name in names:
                slot = slots[name]
                _register(slot.module, slot.attribute, slot.is_buffer, one)
    with torch.no_grad():
        for target, source in copied:
            target.copy_(source)


def write_over(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies tensors over others of their shape and dtype, which stay where they are; autograd does not notice it."""
    with torch.inference_mode():  # inference tensors can be written to, and other ones stay what they are
        for target, source in pairs:
            target.data.copy_(source)


def _is_expanded(tensor: Optional[torch.Tensor]) -> bool:
    if tensor is None or tensor.layout is not torch.strided or tensor.numel() == 0:
        return False
    return any(step == 0 and n > 1 for step, n in zip(tensor.stride(), tensor.shape))


def as_trainable_as(target: torch.Tensor, source: torch.Tensor, may_be_itself: bool = False) -> torch.Tensor:
    """A parameter over the memory of `source`, with the ``requires_grad`` of `target`."""
    wanted = target.requires_grad and (source.is_floating_point() or source.is_complex())
    if may_be_itself and wanted == source.requires_grad:
        return source
    return torch.nn.Parameter(source.detach(), requires_grad=wanted)


def _differing(names: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Of the names of one tensor of a model those that a file holds with other contents than the first that it has."""
    supplied = [name for name in names if name in tensors]
    if len(supplied) < 2:
        return []
    first = tensors[supplied[0]]
    return [name for name in supplied[1:] if tensors[name] is not first and not same_bits(first, tensors[name])]


def _new_slot(modules: Mapping[str, torch.nn.Module], name: str, is_buffer: bool) -> Slot:
    """A place for a tensor that the module has none for.

    Raises:
        KeyError: The module has no such submodule, or something else of the name.
    """
    path, _, attribute = name.rpartition(".")
    module = modules.get(path)
    if module is None:
        raise KeyError(f"{name}: the module has no submodule {path!r}")
    if not attribute:
        raise KeyError(f"empty tensor name in {name!r}")
    registered = module._buffers if is_buffer else module._parameters
    if attribute not in registered and hasattr(module, attribute):
        wanted = "buffer" if is_buffer else "parameter"
        raise KeyError(f"{name}: expected a {wanted} or nothing of that name in the module, got something else")
    return Slot(module, attribute, is_buffer, None)


def insert_into_module(
    modules: Mapping[str, torch.nn.Module], name: str, is_buffer: bool, tensor: torch.Tensor
) -> None:
    """Registers `tensor` under its stored name; what was registered there before is replaced.

    Buffers become plain tensors and keep their persistence; a buffer that did not exist becomes persistent.

    Raises:
        KeyError: No module of that path, or the attribute exists as the other kind.
    """
    slot = _new_slot(modules, name, is_buffer)
    with ordinary_tensors():
        _register(slot.module, slot.attribute, is_buffer, tensor)


def _register(module: torch.nn.Module, attribute: str, is_buffer: bool, tensor: torch.Tensor) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        # Traced modules refuse to register: Module.__init__ was never called for them.
        setattr(module, attribute, tensor.detach() if is_buffer else _parameter(tensor))
    elif is_buffer:
        # Persistence is named only where it is not the default: subclasses may have a register_buffer without it.
        options = {"persistent": False} if attribute in module._non_persistent_buffers_set else {}
        module.register_buffer(attribute, tensor.detach(), **options)
    else:
        module.register_parameter(attribute, _parameter(tensor))


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    if isinstance(tensor, torch.nn.Parameter):
        return tensor
    return torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point() or tensor.is_complex())


def live_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a module by state-dict name: its state dict plus every named buffer, and every tied name."""
    tensors = _with_ties(module.named_buffers)
    tensors.update(_with_ties(module.named_parameters))
    tensors.update((name, value) for name, value in module.state_dict().items() if isinstance(value, torch.Tensor))
    return tensors


def _with_ties(listing: Callable[..., Iterator[tuple[str, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """What a module lists; every tied name too, unless its class overrides the method with fewer arguments."""
    try:
        return dict(listing(remove_duplicate=False))
    except TypeError:
        return dict(listing())


def verify_module(file: OpenFile, module: torch.nn.Module) -> list[tuple[Name, bool]]:
    """Whether each stored tensor is the one in the module, as ``TensorDeserializer.verify_module`` says.

    Raises:
        RuntimeError: A tensor of the file was not read yet, so that its digests are unknown.
        NotImplementedError: A tensor of the module is on the meta device.
    """
    unread = [file.names[i] for i in file.selection if not file.has_header(i)]
    if unread:
        raise RuntimeError(
            f"the hashes of {counted(len(unread), 'tensor')} (first: {unread[0]!r}) are known only after they were "
            "loaded; load the file before verifying"
        )
    live = live_tensors(module)
    return [(file.names[i], _matches(file, i, live)) for i in file.selection]


def _matches(file: OpenFile, i: int, live: Mapping[str, torch.Tensor]) -> bool:
    name = file.names[i]
    if not isinstance(name, str):
        return False
    tensor = live.get(shown(name))
    if tensor is None:
        return False
    if tensor.is_meta:
        raise NotImplementedError(f"tensor {name!r} of the module is on the meta device: it has no data to compare")
    return file.holds(i, tensor) is True
