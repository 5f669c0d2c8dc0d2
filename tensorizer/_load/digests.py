"""What the files of a model have to be: SHA-256 digests of whole files, from a list, a signature or the hub.

``verify=`` of loads turns into a :class:`Verification` here; ``FileReader`` compares.
"""

from __future__ import annotations

import base64
import hashlib
import os
import posixpath
import re
import tempfile
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional, Protocol, Union

from tensorizer import _C
from tensorizer._format.foreign import tell_foreign
from tensorizer._io import hub_cache
from tensorizer._io.call_options import PLAIN, CallOptions
from tensorizer._io.sources import OpenedSource, is_path, json_content, read_checked
from tensorizer._io.uri import split_query
from tensorizer._system.config import suggestion
from tensorizer._system.redaction import shown_location
from tensorizer._system.sizes import counted
from tensorizer.errors import AuthenticationError, FormatError, HashMismatchError, MissingHashError

_LIST_NBYTES = 100_000_000  # of a list of digests, or a signature
_SHA256 = r"[0-9a-fA-F]{64}"
_LINE = re.compile(rf"\\?({_SHA256})[ \t][ \t*]?(.+)")  # as sha256sum writes it, or with one space
_BSD_LINE = re.compile(rf"\\?SHA256 \((.+)\) = ({_SHA256})")
_OF_TREE = re.compile(r"https://model_signing/(signature|Digests)/v[\d.]+\Z", re.IGNORECASE)


class Digests(Protocol):
    """The SHA-256 of files, as something outside of them states it."""

    origin: str
    """Where they are from, for messages."""

    def of(self, name: str, opened: OpenedSource) -> str:
        """The digest of an open file, whose name in the folder of the model is `name`, in hexadecimal digits.

        Raises:
            MissingHashError: There is none.
            ValueError: The file cannot have one.
        """


class Verification(NamedTuple):
    """What ``verify=`` means.

    Attributes:
        stored: Whether data are compared with digests in the files: ``True``: all of them, which have to be there;
            ``None``: where they are what binds data to a signature.
        where_stored: Whether they are compared where there are some.
        files: What whole files are compared with.
    """

    stored: Optional[bool] = None
    where_stored: bool = False
    files: Optional[Digests] = None

    @property
    def reads(self) -> bool:
        """Whether something is compared in any case: then data are read, since a mapping may change afterwards."""
        return bool(self.stored) or self.files is not None

    def inside(self, folder: str) -> Verification:
        """The same for a folder in that of the model, ``"vae/"``, whose files a list may name with or without it."""
        if not folder or not isinstance(self.files, ListedDigests):
            return self
        return self._replace(files=ListedDigests(self.files.origin, self.files.digests, folder))


#: As ``verify="auto"``.
AUTO = Verification(where_stored=True)


def verification(verify: Any, options: CallOptions = PLAIN) -> Verification:
    """What an argument ``verify=`` means; a list or a signature is read, and its signer checked, now.

    Raises:
        TypeError: A value of another type.
        ValueError: A mapping without a signature, or with unknown keys.
        FormatError: The file is neither a list of digests nor a signature of a model.
        AuthenticationError: Somebody else has signed the model.
        ImportError: A signer is named, and the package ``model_signing`` is not installed.
        OSError: It cannot be read.
    """
    if verify is None or verify is False:
        return Verification()
    if verify is True:
        return Verification(stored=True)
    if isinstance(verify, str) and verify == "auto":
        return AUTO
    if isinstance(verify, str) and verify == "hub":
        return Verification(files=_OfTheHub())
    if isinstance(verify, (str, os.PathLike)):
        return Verification(files=read_digests(verify, options))
    if isinstance(verify, Mapping):
        signed = ModelSignature.of(verify)
        return Verification(files=read_digests(signed.signature, options, signed))
    raise TypeError(
        "verify: expected 'auto', 'hub', the path or URI of a SHA256SUMS file or of a model's signature, a mapping "
        f"with 'signature' and who has to have signed, True or False, got {type(verify).__name__}"
    )


# --- lists ------------------------------------------------------------------------------------------------------------


class ListedDigests:
    """Those of a list, by names relative to the folder of the model."""

    def __init__(self, origin: str, digests: Mapping[str, str], folder: str = "") -> None:
        self.origin, self.digests, self._folder = origin, digests, folder

    def of(self, name: str, opened: OpenedSource) -> str:
        found = self.digests.get(_plain(self._folder + name)) or self.digests.get(_plain(name))
        if found is None:
            listed = ", ".join(list(self.digests)[:3])
            raise missing_digest(
                opened.name,
                f"expected a line for {name!r:.200} in {self.origin}, got {counted(len(self.digests), 'other')} "
                f"({listed:.200}); names are relative to the folder of the model",
            )
        return found


def read_digests(location: Any, options: CallOptions = PLAIN, signed: Optional[ModelSignature] = None) -> ListedDigests:
    """Reads a ``SHA256SUMS`` file, or the digests in a signature of a model (a sigstore bundle, or its envelope).

    If `signed` names a signer, the signature is checked, too.
    """
    shown = str(shown_location(location))

    def parsed(content: bytes) -> Mapping[str, str]:
        if content.lstrip()[:1] != b"{" and signed is None:
            return parse_sha256sums(shown, content)
        digests = parse_model_signature(shown, content)
        if signed is not None:
            signed.check(shown, content, digests)
        return digests

    found = read_checked(location, options, parsed, _LIST_NBYTES)
    return ListedDigests(shown if signed is None else f"{shown}, signed by {signed.signer}", found)


def parse_sha256sums(shown: str, content: bytes) -> dict[str, str]:
    """The digests by name of what ``sha256sum`` writes, also with ``--tag``.

    Raises:
        FormatError: A line of another form, a name with two digests, or no line at all.
    """
    digests: dict[str, str] = {}
    for number, line in enumerate(content.decode("utf-8", "surrogateescape").split("\n"), 1):
        if not line.strip() or line.startswith("#"):
            continue
        found, tagged = _LINE.fullmatch(line.rstrip("\r")), _BSD_LINE.fullmatch(line.rstrip("\r"))
        if found:
            digest, name = found[1], found[2]
        elif tagged:
            name, digest = tagged[1], tagged[2]
        else:
            error = FormatError(f"{shown}: line {number}: expected a SHA-256 and a name, got {line!r:.100}")
            if not digests:
                tell_foreign(error, content[:1024], "a SHA256SUMS file")
            raise error
        if line.startswith("\\"):  # a name with a line feed or a backslash
            name = re.sub(r"\\([\\nr])", lambda match: {"n": "\n", "r": "\r"}.get(match[1], "\\"), name)
        _add(digests, shown, name, digest)
    if not digests:
        raise FormatError(f"{shown}: expected lines of a SHA-256 and a name, got none")
    return digests


def parse_model_signature(shown: str, content: bytes) -> dict[str, str]:
    """The digests that the payload of a model's signature lists, by name. Who has signed it is not checked.

    Raises:
        FormatError: It is no such signature, or lists other digests than SHA-256 of whole files.
    """

    def expect(condition: bool, what: str) -> None:
        if not condition:
            raise FormatError(f"{shown}: expected a signature of a model (OpenSSF), {what}")

    try:
        bundle = json_content(shown, content)
        envelope = bundle.get("dsseEnvelope", bundle)
        expect(isinstance(envelope, dict) and isinstance(envelope.get("payload"), str), "got JSON without an envelope")
        statement = json_content(f"{shown}: payload", base64.b64decode(envelope["payload"], validate=True))
    except FormatError:
        raise
    except ValueError as error:  # of JSON, and of base64
        text = str(error)
        raise FormatError(text if text.startswith(shown) else f"{shown}: {text}") from None
    kind, predicate = statement.get("predicateType"), statement.get("predicate")
    expect(isinstance(kind, str) and bool(_OF_TREE.match(kind)), f"got predicateType {kind!r:.100}")
    predicate = predicate if isinstance(predicate, dict) else {}
    resources, subjects = predicate.get("resources"), statement.get("subject")
    digests: dict[str, str] = {}
    if isinstance(resources, list):
        for entry in resources:
            expect(isinstance(entry, dict), "got a resource that is no object")
            name, algorithm, digest = (entry.get(key) for key in ("name", "algorithm", "digest"))
            expect(algorithm == "sha256", f"with SHA-256 digests, got {algorithm!r:.50} for {name!r:.100}")
            _add(digests, shown, name, digest)
        _check_root(shown, resources, subjects)
    else:  # its first version
        for entry in subjects if isinstance(subjects, list) else ():
            expect(isinstance(entry, dict) and isinstance(entry.get("digest"), dict), "got a subject without digests")
            _add(digests, shown, entry.get("name"), entry["digest"].get("sha256"))
    expect(bool(digests), "got one that lists no files")
    return digests


class ModelSignature(NamedTuple):
    """The mapping that ``verify=`` takes: a model's signature, and its signer.

    Attributes:
        signature: Path or URI of the signature (OpenSSF).
        public_key: Path of the public key, as ``model_signing verify key --public_key`` takes it.
        identity: The identity of a keyless signature (Sigstore), such as an address of mail.
        identity_provider: The URL of the provider that issued the identity.
    """

    signature: Any = None
    public_key: Union[str, os.PathLike[str], None] = None
    identity: Optional[str] = None
    identity_provider: Optional[str] = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> ModelSignature:
        """Raises ``ValueError`` for keys that are unknown, or missing."""
        for name in given:
            if name not in cls._fields:
                raise ValueError(f"verify: unknown key {name!r}; {suggestion(str(name), cls._fields)}")
        found = cls(**given)
        signer = [found.public_key is not None, found.identity is not None, found.identity_provider is not None]
        if found.signature is None or signer not in ([True, False, False], [False, True, True]):
            raise ValueError(
                "verify: expected 'signature' with 'public_key', or with 'identity' and 'identity_provider', got "
                f"{', '.join(map(repr, given)) or 'no keys'}"
            )
        return found

    @property
    def signer(self) -> str:
        """For messages."""
        if self.public_key is not None:
            return f"the key {os.fspath(self.public_key)}"
        return f"{self.identity} ({self.identity_provider})"

    def check(self, shown: str, content: bytes, digests: Mapping[str, str]) -> None:
        """Has the package ``model_signing`` check the bytes of a signature, from which `digests` were parsed.

        Raises:
            ImportError: It is not installed.
            OSError, ValueError: The public key cannot be read, or is none.
            AuthenticationError: The signature is damaged, or another signer made it.
        """
        try:
            from model_signing import verifying
        except ImportError as error:
            raise ImportError(
                f"verify: to check who has signed {shown}, install the package model_signing ({error})"
            ) from None
        config = verifying.Config()
        if self.public_key is not None:
            config.use_elliptic_key_verifier(public_key=self.public_key)
        else:
            config.use_sigstore_verifier(identity=self.identity, oidc_issuer=self.identity_provider)
        listed = _AsHashed(digests)
        config.set_hashing_config(listed)
        with tempfile.TemporaryDirectory(prefix="tensorizer-") as folder:
            path = os.path.join(folder, "model.sig")  # the package wants a path; these bytes are those that count
            with open(path, "wb") as file:
                file.write(content)
            try:
                config.verify(folder, path)
            except Exception as error:
                what = str(error) or type(error).__name__
                raise AuthenticationError(f"{shown}: expected a signature by {self.signer}: {what}") from error
        if not listed.compared:
            raise AuthenticationError(f"{shown}: model_signing did not compare the digests that it lists")


class _AsHashed:
    """Stands for a model that ``model_signing`` hashes. We compare the files, so it only compares our list with its."""

    def __init__(self, digests: Mapping[str, str]) -> None:
        self._digests, self.compared = digests, False

    def add_ignored_paths(self, **_: Any) -> None:
        """What the signer left out is not in the list."""

    def hash(self, *_: Any, **__: Any) -> _AsHashed:
        return self

    def __eq__(self, manifest: object) -> bool:
        signed: Any = manifest
        entries = {_plain(entry.identifier): entry.digest.digest_hex for entry in signed.resource_descriptors()}
        if entries != self._digests:
            raise ValueError("the signed list of files is another one")
        self.compared = True
        return True

    __hash__ = None  # type: ignore[assignment]


def _check_root(shown: str, resources: list[Any], subjects: Any) -> None:
    """The subject is the digest of all digests, in their order."""
    root = hashlib.sha256(b"".join(bytes.fromhex(entry["digest"]) for entry in resources)).hexdigest()
    stated = [entry.get("digest", {}).get("sha256") for entry in subjects or () if isinstance(entry, dict)]
    if root not in stated:
        raise FormatError(f"{shown}: its digest of all files is not that of the files that it lists")


def _add(digests: dict[str, str], shown: str, name: Any, digest: Any) -> None:
    if not (isinstance(name, str) and isinstance(digest, str) and re.fullmatch(_SHA256, digest)):
        raise FormatError(f"{shown}: expected a name and its SHA-256, got {name!r:.100} and {digest!r:.100}")
    if digests.setdefault(_plain(name), digest.lower()) != digest.lower():
        raise FormatError(f"{shown}: two different digests for {name!r:.200}")


def _plain(name: str) -> str:
    return posixpath.normpath(name.replace("\\", "/"))


class GivenDigest:
    """One that the caller knows, of the only file."""

    origin = "the caller"

    def __init__(self, sha256: str) -> None:
        self._sha256 = sha256

    def of(self, name: str, opened: OpenedSource) -> str:
        return self._sha256


# --- the hub ----------------------------------------------------------------------------------------------------------


class _OfTheHub:
    """Those that the hub states for its large files. Of what is in its cache they are the names of the files there."""

    origin = "the hub"

    def of(self, name: str, opened: OpenedSource) -> str:
        digest = hub_cache.stated_sha256(opened.location)
        if digest is None:
            raise missing_digest(opened.name, "the hub states no SHA-256 for it, as for small files")
        return digest


# --- one file ---------------------------------------------------------------------------------------------------------


def check_digest(source: _C.RangeSource, expected: str, found: str, origin: str) -> None:
    """Raises :class:`HashMismatchError` for a file that has another SHA-256 than `origin` says."""
    if found == expected:
        return
    copy = "; the cached copy was removed; try again" if source.drop_copy() else ""
    error = HashMismatchError(f"{source.name}: expected SHA-256 {expected} by {origin}, got {found}{copy}")
    error.source = source.name
    raise error


def missing_digest(source_name: str, why: str) -> MissingHashError:
    """The error for a file whose digest nothing states."""
    error = MissingHashError(f"{source_name}: {why}")
    error.source = source_name
    return error


def name_of(opened: OpenedSource) -> str:
    """The name of an open file in its folder."""
    location = opened.location
    if not is_path(location) or isinstance(location, int):
        return os.path.basename(opened.name)
    text = os.fsdecode(location)
    return os.path.basename(text if "://" not in text else split_query(text)[0])
