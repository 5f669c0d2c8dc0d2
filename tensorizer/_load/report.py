"""What of a file fits a module: decided from index and module, before a payload is read or a tensor replaced."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Optional, Union

import torch

from tensorizer._system.sizes import counted, size_text
from tensorizer.errors import LoadError

_MAX_LINES = 100  # of a cell in a notebook


class Misfit(NamedTuple):
    """A tensor of the file whose shape or kind differs from what the module has under its name."""

    name: str  # as in the module's state dict
    what: str  # "shape" or "kind"
    file: Union[torch.Size, torch.dtype]
    model: Union[torch.Size, torch.dtype]

    def __str__(self) -> str:
        if self.what == "shape":  # torch's own words
            return (
                f"size mismatch for {self.name}: copying a param with shape {self.file} from checkpoint, "
                f"the shape in current model is {self.model}."
            )
        return f"{self.what} mismatch for {self.name}: the file holds {self.file}, the model {self.model}."


@dataclasses.dataclass(frozen=True, repr=False)
class LoadReport:
    """What a load puts into a module and what it does not. Names are those of the module's state dict.

    Attributes:
        module: Class of the module.
        source: The file, without secrets.
        loaded: Tensors of the file that are placed in the module.
        nbytes: Their bytes.
        seconds: Time of reading and placing them; 0 if nothing was read.
        missing: Parameters, persistent buffers and extra states of the module that neither the file nor a tie supplies;
            after ``load_into_module`` also what its classes save beside these.
        unexpected: Tensors of the file that the module has no parameter or buffer for.
        mismatched: Tensors of another shape or kind (floating point, complex, integer, bool) than the module's.
        cast: Tensors that the load converts to another dtype.
        tied: Names that the file lacks, but that the module ties to a name of the file; from alias to that name.
        conflicting: Names that the module ties and the file holds with different contents.
    """

    module: str
    source: str
    loaded: tuple[str, ...] = ()
    nbytes: int = 0
    seconds: float = 0.0
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[Misfit, ...] = ()
    cast: tuple[str, ...] = ()
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    conflicting: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether file and module have the same names, shapes and kinds."""
        return not (self.missing or self.unexpected or self.mismatched or self.conflicting)

    @property
    def missing_keys(self) -> list[str]:
        """``missing``, by the name that ``load_state_dict`` has for it."""
        return list(self.missing)

    @property
    def unexpected_keys(self) -> list[str]:
        """``unexpected``, by the name that ``load_state_dict`` has for it."""
        return list(self.unexpected)

    def __iter__(self) -> Iterator[list[str]]:
        """``missing, unexpected = report``, as with what ``load_state_dict`` returns."""
        return iter((self.missing_keys, self.unexpected_keys))

    def __repr__(self) -> str:
        module = f" into {self.module}" if self.module else ""
        loaded = f"{counted(len(self.loaded), 'tensor')}, {size_text(self.nbytes)}, of {self.source}{module}"
        if self.ok:
            return f"<LoadReport: {loaded}: all names match>"
        rows = [
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("mismatched", [row.name for row in self.mismatched]),
            ("conflicting", self.conflicting),
        ]
        lines = [f"{title:12} {name}" for title, names in rows for name in joined_runs(names)]
        return "\n".join([f"<LoadReport: {loaded}", *lines, ">"])

    def _repr_html_(self) -> str:
        """A table for Jupyter: how much was loaded, and the names of what did not fit."""
        from html import escape  # its table of entities takes time to import

        rows = [
            ("loaded", [f"{counted(len(self.loaded), 'tensor')}, {size_text(self.nbytes)} in {self.seconds:.3f} s"]),
            ("missing", joined_runs(self.missing)),
            ("unexpected", joined_runs(self.unexpected)),
            ("mismatched", [str(row) for row in self.mismatched]),
            ("conflicting", joined_runs(self.conflicting)),
            ("cast", joined_runs(self.cast)),
            ("tied", [f"{alias} = {name}" for alias, name in self.tied.items()]),
        ]
        body = "".join(f"<tr><td>{title}</td><td>{_listed(lines)}</td></tr>" for title, lines in rows if lines)
        title = escape(f"{self.module} from {self.source}")
        return f"<div><p><code>{title}</code></p><table><tbody>{body}</tbody></table></div>"

    def error(self, mismatched: Sequence[Misfit], strict: bool) -> LoadError:
        """The error for a load that does not go on, in the words of ``load_state_dict``.

        Args:
            mismatched: Which of the mismatches are errors.
            strict: Whether missing, unexpected and conflicting names are errors, too.
        """
        problems = [str(row) for row in mismatched]
        if strict:
            problems += [f"conflicting values for {name}, which the model ties." for name in self.conflicting]
            for title, names in (("Unexpected", self.unexpected), ("Missing", self.missing)):
                quoted = ", ".join(f'"{name}"' for name in names)
                if quoted:
                    problems.insert(0, f"{title} key(s) in state_dict: {quoted}. ")
        return self.refusal("\n\t".join([f"Error(s) in loading state_dict for {self.module}:", *problems]))

    def refusal(self, text: str) -> LoadError:
        """The error for a load that does not go on, in other words."""
        error = LoadError(text)
        error.report, error.source = self, self.source
        return error


def misplaced(stored: Iterable[str], lacking: Collection[str]) -> str:
    """Where tensors are that a module lacks, if the file or the module has them one or more levels deeper; or nothing.

    Args:
        stored: Names of the file that have no place in the module.
        lacking: Names of the module that the file lacks.
    """
    stored = list(stored)
    found = _beginning(stored, lacking)
    if found is not None:
        prefix, name = found
        return f"; the file has {prefix + name!r}, the module {name!r}: load_into_module(..., prefix={prefix!r})?"
    found = _beginning(lacking, set(stored))
    if found is not None:
        prefix, name = found
        return f"; the file has {name!r}, the module {prefix + name!r}: load into its submodule {prefix[:-1]!r}?"
    return ""


def _beginning(longer: Iterable[str], shorter: Collection[str]) -> Optional[tuple[str, str]]:
    """What stands in front of most of the `shorter` names among the `longer` ones, and the first of these names."""
    found: dict[str, list[str]] = {}
    for name in longer:
        at = name.find(".")
        while at >= 0:
            if name[at + 1 :] in shorter:
                found.setdefault(name[: at + 1], []).append(name[at + 1 :])
            at = name.find(".", at + 1)
    if not found:
        return None
    prefix = max(found, key=lambda key: len(found[key]))
    return prefix, found[prefix][0]


def _listed(lines: Sequence[str]) -> str:
    """Lines of a cell; those beyond what a notebook should keep are counted."""
    from html import escape

    shown = [escape(line) for line in lines[:_MAX_LINES]]
    left_out = len(lines) - len(shown)
    return "<br>".join([*shown, f"… and {left_out:,} more"] if left_out else shown)


def kind_of(dtype: torch.dtype) -> str:
    """What numbers of a dtype are: those of one kind can stand for each other, if with other precision."""
    if dtype == torch.bool:
        return "bool"
    if dtype.is_complex:
        return "complex"
    return "floating point" if dtype.is_floating_point else "integer"


def joined_runs(names: Iterable[str]) -> list[str]:
    """Names for a table; those that differ in one number alone are one line: ``layers.{0...31}.weight``."""
    shapes: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    for name in names:
        parts = re.split(r"(?<![^.])(\d+)(?![^.])", name)  # whole components
        shapes.setdefault(tuple(parts[::2]), []).append(tuple(map(int, parts[1::2])))
    return [line for texts, numbers in shapes.items() for line in _lines(texts, numbers)]


def _lines(texts: tuple[str, ...], numbers: list[tuple[int, ...]]) -> Iterator[str]:
    columns = [sorted(set(column)) for column in zip(*numbers)]
    varying = [i for i, column in enumerate(columns) if len(column) > 1]
    if len(varying) != 1:
        yield from ("".join(_woven(texts, map(str, row))) for row in numbers)
        return
    (position,) = varying
    runs = itertools.groupby(enumerate(columns[position]), key=lambda pair: pair[1] - pair[0])
    for _, run in runs:
        values = [value for _, value in run]
        shown = str(values[0]) if len(values) == 1 else f"{{{values[0]}...{values[-1]}}}"
        row = [shown if i == position else str(column[0]) for i, column in enumerate(columns)]
        yield "".join(_woven(texts, row))


def _woven(texts: Sequence[str], between: Iterable[str]) -> Iterator[str]:
    for text, number in itertools.zip_longest(texts, between, fillvalue=""):
        yield text
        yield number
