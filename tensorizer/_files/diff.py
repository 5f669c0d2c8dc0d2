"""What differs between two files of tensors."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import torch

from tensorizer._files.checkpoints import reader
from tensorizer._format.entries import FilterFuncType, HashType, flat_name
from tensorizer._format.names import Name, double_name
from tensorizer._format.payloads import same_bits
from tensorizer._io.call_options import CallOptions
from tensorizer._io.model_files import is_checkpoint
from tensorizer._load.open_file import BATCH_NBYTES, OpenFile, open_whole
from tensorizer._system.sizes import runs


class Change(NamedTuple):
    """A tensor that both files have, with other content."""

    name: Name
    what: str
    """``"dtype"``, ``"shape"`` or ``"data"``."""
    a: str
    """Dtype and shape in the first file."""
    b: str
    max_abs: Optional[float]
    """Largest difference of two elements; ``None`` if elements cannot be compared."""
    max_rel: Optional[float]
    """Largest difference of two elements relative to the second."""


@dataclass(frozen=True, repr=False)
class DiffReport:
    """What differs between two files. It is true if nothing does."""

    a: str
    b: str
    added: tuple[Name, ...]
    """Tensors that only the second file has."""
    removed: tuple[Name, ...]
    """Tensors that only the first file has."""
    changed: tuple[Change, ...]
    same: int
    """Tensors that are equal, or within the tolerance."""
    nbytes_read: int
    """Payload bytes that had to be read: equal digests need none."""

    @property
    def ok(self) -> bool:
        return not (self.added or self.removed or self.changed)

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        return f"<DiffReport: {self.a} and {self.b}: {self.counts()}>"

    def counts(self) -> str:
        """How many tensors were removed, added, changed, and are equal, for people."""
        counts = {"removed": self.removed, "added": self.added, "changed": self.changed}
        return ", ".join([*(f"{len(names):,} {what}" for what, names in counts.items()), f"{self.same:,} equal"])


def diff(
    a: Any,
    b: Any,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    ignore_dtype: bool = False,
    filter_func: Optional[FilterFuncType] = None,
    encryption_a: Any = None,
    encryption_b: Any = None,
    stream_options: Optional[Mapping[str, Any]] = None,
) -> DiffReport:
    """Compares names, dtypes, shapes and data. Reads payloads only if the stored digests do not decide.

    Compares names that share one tensor like all others, whether a file stores the tensor once or under each name.

    Args:
        a: The first file: a path, URI, descriptor, open binary file object, a folder of shards or their index; a
            checkpoint folder of ``TensorizerWriter``, whose tensors are compared as wholes, however they are sharded.
        b: The second file.
        rtol: Elements are equal if they differ by at most ``atol + rtol * abs(element of b)``. If both are 0, every bit
            must be equal.
        atol: See `rtol`.
        ignore_dtype: Compares values of different dtypes.
        filter_func: Compares only the tensors whose name it accepts.
        encryption_a: The key of the first file, if it is encrypted.
        encryption_b: The key of the second file, if it is encrypted.
        stream_options: Keywords for opening URIs.

    Raises:
        CryptographyError: A payload of an encrypted file must be read, and the key is missing or wrong.
        FormatError: Not a file of tensors.
        OSError: It cannot be opened or read.

    Examples:
        >>> tensorizer.diff("model.tensors", "model.tensors")
        <DiffReport: model.tensors and model.tensors: 0 removed, 0 added, 0 changed, 2 equal>
    """
    options = CallOptions.to_read(encryption_a, stream_options)
    with (
        _side(a, options, filter_func) as first,
        _side(b, options.reading(encryption_b), filter_func) as second,
    ):
        return _Comparison(first, second, rtol, atol, ignore_dtype).run()


class Side(NamedTuple):
    """One of the two: the tensors to compare, by numbers of its own."""

    source_name: str
    names: Mapping[Name, int]
    """Where the data of each name are, aliases among the names."""
    form: Callable[[int], tuple[str, tuple[int, ...]]]
    """Dtype and shape."""
    loaded_nbytes: Callable[[int], int]
    data_nbytes: Callable[[int], int]
    digests: Optional[Callable[[Sequence[int]], Mapping[int, Optional[Hashable]]]]
    """What is equal only for equal tensors; ``None`` if there are no digests."""
    read: Callable[[Sequence[int]], Sequence[torch.Tensor]]


@contextlib.contextmanager
def _side(source: Any, call: CallOptions, filter_func: Optional[FilterFuncType]) -> Iterator[Side]:
    if is_checkpoint(source, call):
        with reader().side(source, call, filter_func) as found:
            yield found
        return
    with open_whole(source, call) as file:
        names = _chosen(file, filter_func)
        file.read_dtypes(sorted(set(names.values())))

        def digests(entries: Sequence[int]) -> dict[int, Optional[Hashable]]:
            file.read_headers(entries)
            return {i: _sha256(file, i) for i in entries}

        yield Side(
            source_name=file.source_name,
            names=names,
            form=lambda i: (file.dtype_text(i), file.described(i)[1]),
            loaded_nbytes=file.index.loaded_nbytes,
            data_nbytes=file.index.data_nbytes,
            digests=digests if file.index.stores_hashes and file.readable else None,
            read=lambda entries: file.read(entries, verify=False),
        )


_Pair = tuple[int, int]
"""Tensors of both sides that some names stand for."""


class _Comparison:
    def __init__(self, a: Side, b: Side, rtol: float, atol: float, ignore_dtype: bool) -> None:
        self._a, self._b = a, b
        self._rtol, self._atol, self._ignore_dtype = rtol, atol, ignore_dtype
        self._names: dict[_Pair, list[Name]] = {}
        self._changed: list[Change] = []
        self._same = 0
        self._nbytes_read = 0

    def run(self) -> DiffReport:
        of_a, of_b = self._a.names, self._b.names
        for name, i in of_a.items():
            if name in of_b:
                self._names.setdefault((i, of_b[name]), []).append(name)
        comparable = []
        for pair in self._names:
            what = self._difference_of_form(*pair)
            if what is None:
                comparable.append(pair)
            else:
                self._add_change(pair, what, None, None)
        for pairs in runs(self._without_equal_digests(comparable), self._nbytes_of, BATCH_NBYTES):
            self._compare(pairs)
        order = {name: position for position, name in enumerate(of_a)}
        return DiffReport(
            a=self._a.source_name,
            b=self._b.source_name,
            added=tuple(name for name in of_b if name not in of_a),
            removed=tuple(name for name in of_a if name not in of_b),
            changed=tuple(sorted(self._changed, key=lambda change: order[change.name])),
            same=self._same,
            nbytes_read=self._nbytes_read,
        )

    def _difference_of_form(self, i: int, j: int) -> Optional[str]:
        (dtype_a, shape_a), (dtype_b, shape_b) = self._a.form(i), self._b.form(j)
        if shape_a != shape_b:
            return "shape"
        return "dtype" if not self._ignore_dtype and dtype_a != dtype_b else None

    def _without_equal_digests(self, pairs: Sequence[_Pair]) -> list[_Pair]:
        """The pairs that remain; digests cover record headers too, so different ones prove nothing."""
        if self._a.digests is None or self._b.digests is None:
            return list(pairs)
        digests_a = self._a.digests(sorted({i for i, _ in pairs}))
        digests_b = self._b.digests(sorted({j for _, j in pairs}))
        remaining = []
        for pair in pairs:
            digest = digests_a[pair[0]]
            if digest is not None and digest == digests_b[pair[1]]:
                self._same += len(self._names[pair])
            else:
                remaining.append(pair)
        return remaining

    def _compare(self, pairs: Sequence[_Pair]) -> None:
        # Files may hold their tensors in different orders, and are read in their own.
        tensors_a = self._read(self._a, sorted({i for i, _ in pairs}))
        tensors_b = self._read(self._b, sorted({j for _, j in pairs}))
        for pair in pairs:
            x, y = tensors_a[pair[0]], tensors_b[pair[1]]
            if same_bits(x, y):
                self._same += len(self._names[pair])
                continue
            equal, max_abs, max_rel = _distance(x, y, self._rtol, self._atol)
            if equal:
                self._same += len(self._names[pair])
            else:
                self._add_change(pair, "data", max_abs, max_rel)

    def _read(self, side: Side, entries: Sequence[int]) -> dict[int, torch.Tensor]:
        self._nbytes_read += sum(map(side.data_nbytes, entries))
        return dict(zip(entries, side.read(entries)))

    def _nbytes_of(self, pair: _Pair) -> int:
        return self._a.loaded_nbytes(pair[0]) + self._b.loaded_nbytes(pair[1])

    def _add_change(self, pair: _Pair, what: str, max_abs: Optional[float], max_rel: Optional[float]) -> None:
        forms = _form_text(self._a, pair[0]), _form_text(self._b, pair[1])
        self._changed += [Change(name, what, *forms, max_abs, max_rel) for name in self._names[pair]]


def _chosen(file: OpenFile, filter_func: Optional[FilterFuncType]) -> dict[Name, int]:
    """Where the data of each name to compare are, aliases among the names.

    Names of modules are without the dot that stands before those of the root, as in ``.safetensors``.
    """
    chosen = [i for i, name in enumerate(file.names) if filter_func is None or filter_func(name)]
    names = [file.names[i] for i in chosen]
    texts = [flat_name(name, file.type(i)) if isinstance(name, str) else name for name, i in zip(names, chosen)]
    if double_name(zip(names, texts)) is not None:
        texts = names
    return {text: i if file.is_stored(i) else file.aliases[i] for text, i in zip(texts, chosen)}


def _sha256(file: OpenFile, i: int) -> Optional[bytes]:
    """The stored SHA-256 of a tensor whose record header was read."""
    return next((digest.hash for digest in file.hashes(i) if digest.type is HashType.SHA256), None)


def _form_text(side: Side, i: int) -> str:
    dtype, shape = side.form(i)
    return f"{dtype} {list(shape)}"


def _distance(
    x: torch.Tensor, y: torch.Tensor, rtol: float, atol: float
) -> tuple[bool, Optional[float], Optional[float]]:
    """Whether two tensors of one shape are equal within the tolerance; the largest differences."""
    try:
        wide_x, wide_y = _widened(x), _widened(y)
    except (RuntimeError, TypeError):  # packed types, which torch cannot convert
        return False, None, None
    both_nan = wide_x.isnan() & wide_y.isnan()
    delta = (wide_x - wide_y).abs()
    delta = torch.where(both_nan | (wide_x == wide_y), torch.zeros_like(delta), delta)
    max_abs = float(delta.max()) if delta.numel() else 0.0
    relative = torch.where(delta == 0, torch.zeros_like(delta), delta / wide_y.abs())
    max_rel = float(relative.max()) if relative.numel() else 0.0
    exact = rtol == 0 and atol == 0 and x.dtype == y.dtype
    equal = not exact and bool(((delta == 0) | (delta <= atol + rtol * wide_y.abs())).all())
    return equal, None if math.isnan(max_abs) else max_abs, None if math.isnan(max_rel) else max_rel


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
