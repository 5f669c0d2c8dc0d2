"""``latest.json``: what a store holds of a run, and which files lead to which version."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Optional

from tensorizer._io.sources import json_content
from tensorizer._load.open_index import file_error

POINTER_NAME = "latest.json"

#: Versions are below it.
END_OF_VERSIONS = 10**12

#: Keys of the metadata of files, which users cannot take.
KEYS = frozenset({"weight_sync", "run", "version", "state", "base", "base_state"})

_FILE_NAME = re.compile(r"(anchor|delta)-([0-9]{12})\.tensors")
_RUN = re.compile(r"[0-9a-f]{32}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_VERSION = re.compile(r"0|[1-9][0-9]{0,11}")


def anchor_name(version: int) -> str:
    return f"anchor-{version:012d}.tensors"


def delta_name(version: int) -> str:
    return f"delta-{version:012d}.tensors"


def version_of(name: str) -> Optional[int]:
    """The version in the name of an anchor or delta; ``None`` for other names."""
    found = _FILE_NAME.fullmatch(name)
    return None if found is None else int(found.group(2))


class Route(NamedTuple):
    """Which files lead to a version: an anchor, or what somebody has already, then deltas."""

    anchor: Optional[int]
    deltas: tuple[int, ...]
    nbytes: int


class Pointer(NamedTuple):
    """The content of ``latest.json``.

    Attributes:
        run: 32 hexadecimal digits, which a run of a trainer keeps.
        version: The newest one.
        anchors: Versions with a file of whole tensors, ascending.
        deltas: Versions with a file of what changed since the version before, ascending.
        nbytes: Of each file, by its name.
        index_digest: Of each file, by its name.
        states: Of each version: the SHA-256 of the sums of its tensors.
    """

    run: str
    version: int
    anchors: tuple[int, ...]
    deltas: tuple[int, ...]
    nbytes: Mapping[str, int]
    index_digest: Mapping[str, str]
    states: Mapping[int, str]

    @property
    def files(self) -> list[str]:
        """Names of all files, the oldest first."""
        return files_of(self.anchors, self.deltas)

    def to_bytes(self) -> bytes:
        content = {
            "weight_sync": 1,
            "run": self.run,
            "version": self.version,
            "state": self.states[self.version],
            "anchors": list(self.anchors),
            "deltas": list(self.deltas),
            "nbytes": dict(self.nbytes),
            "index_digest": dict(self.index_digest),
            "states": {str(version): state for version, state in self.states.items()},
        }
        return json.dumps(content).encode()

    def routes(self, goal: int, start: Optional[int]) -> list[Route]:
        """The ways to a version, the best first: of the deltas from `start` on and those from the newest anchor the one
        with fewer bytes, then older anchors."""
        found = [self._route(goal, anchor) for anchor in reversed(self.anchors) if anchor <= goal]
        routes = [route for route in found if route is not None]
        if start is not None and start in self.states and start < goal:
            onward = self._route(goal, None, start)
            if onward is not None:
                routes.insert(0 if not routes or onward.nbytes <= routes[0].nbytes else 1, onward)
        return routes

    def _route(self, goal: int, anchor: Optional[int], start: Optional[int] = None) -> Optional[Route]:
        begin = anchor if start is None else start
        assert begin is not None
        between = [version for version in sorted({*self.anchors, *self.deltas}) if begin < version <= goal]
        deltas = set(self.deltas)
        if not all(version in deltas for version in between):  # one of another form, or after a failure
            return None
        names = [delta_name(version) for version in between]
        if anchor is not None:
            names.append(anchor_name(anchor))
        return Route(anchor, tuple(between), sum(self.nbytes[name] for name in names))


def files_of(anchors: Iterable[int], deltas: Iterable[int]) -> list[str]:
    """Names of files, the oldest version first."""
    rows = [(version, anchor_name(version)) for version in anchors]
    rows += [(version, delta_name(version)) for version in deltas]
    return [name for _, name in sorted(rows)]


def read_pointer(name: str, content: bytes) -> Pointer:
    """Parses ``latest.json``.

    Raises:
        FormatError: It is damaged, or contradicts itself.
    """
    try:
        values = json_content(POINTER_NAME, content)
        if values.get("weight_sync") != 1:
            raise ValueError(f"expected 'weight_sync' 1, got {values.get('weight_sync')!r:.100}")
        digests = _of_kind(values, "index_digest", dict)
        states = _of_kind(values, "states", dict)
        pointer = Pointer(
            run=_text("run", values["run"], _RUN),
            version=_number("version", values["version"]),
            anchors=_versions(values, "anchors"),
            deltas=_versions(values, "deltas"),
            nbytes={file: _number("nbytes", n, 1 << 63) for file, n in _of_kind(values, "nbytes", dict).items()},
            index_digest={file: _text("index_digest", digest, _DIGEST) for file, digest in digests.items()},
            states={int(_text("states", v, _VERSION)): _text("states", state, _DIGEST) for v, state in states.items()},
        )
        _check(pointer, values)
    except (KeyError, ValueError) as error:
        problem = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise file_error(name, problem) from None
    return pointer


def _check(pointer: Pointer, values: Mapping[str, Any]) -> None:
    versions = {*pointer.anchors, *pointer.deltas}
    if not pointer.anchors or max(versions) != pointer.version:
        raise ValueError(f"expected the newest of its versions to be {pointer.version}, got {sorted(versions)[-1:]}")
    for key, found, wanted in (
        ("nbytes", pointer.nbytes, pointer.files),
        ("index_digest", pointer.index_digest, pointer.files),
        ("states", pointer.states, sorted(versions)),
    ):
        lacking = [one for one in wanted if one not in found]
        if lacking:
            raise ValueError(f"{key!r} lacks {lacking[0]}")
    if values["state"] != pointer.states[pointer.version]:
        raise ValueError(f"'state' is not that of version {pointer.version} in 'states'")


def _of_kind(values: Mapping[str, Any], key: str, kind: type) -> Any:
    if not isinstance(values[key], kind):
        raise ValueError(f"{key!r}: expected a {kind.__name__}, got a {type(values[key]).__name__}")
    return values[key]


def _text(key: str, found: Any, form: re.Pattern[str]) -> str:
    if not isinstance(found, str) or form.fullmatch(found) is None:
        raise ValueError(f"{key!r}: expected {form.pattern}, got {found!r:.100}")
    return found


def _number(key: str, found: Any, end: int = END_OF_VERSIONS) -> int:
    if type(found) is not int or not 0 <= found < end:
        raise ValueError(f"{key!r}: expected a number from 0 to {end - 1}, got {found!r:.100}")
    return found


def _versions(values: Mapping[str, Any], key: str) -> tuple[int, ...]:
    versions = tuple(_number(key, version) for version in _of_kind(values, key, list))
    if any(a >= b for a, b in zip(versions, versions[1:])):
        raise ValueError(f"{key!r}: expected ascending versions")
    return versions
