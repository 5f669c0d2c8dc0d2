"""What authenticates a file when it is opened: the tag under its key, signatures in it or beside it, and the policy."""

from __future__ import annotations

import logging
from typing import Optional

from tensorizer import _C
from tensorizer._io.call_options import CallOptions
from tensorizer._io.sources import OpenedSource, read_checked
from tensorizer._io.uri import signature_place
from tensorizer._system.redaction import shown_location
from tensorizer.errors import MAY_BE_FORBIDDEN, AuthenticationError, is_absent, is_denied, named

logger = logging.getLogger("tensorizer.serialization")

MAX_SIGNATURE_NBYTES = 100_000_000


def authenticate(opened: OpenedSource, index: _C.Index, keys: Optional[_C.KeyRing], call: CallOptions) -> None:
    """Checks the index of an opened file; its record headers are held against it from then on, as they are read.

    Raises:
        AuthenticationError: The tag or signature does not fit, none by a wanted key is there, or the file has to be
            authenticated and neither a key nor a public key was given.
        CryptographyError: No key can be had for the tag.
        FormatError: A damaged detached signature.
        ValueError: A public key for a ``.safetensors`` file.
        OSError: The detached signature cannot be read.
    """
    trust = call.trust
    if keys is not None:
        named(opened.name, _C.check_tag, index, keys)
    if trust.public_keys:
        if index.format == "safetensors":
            raise ValueError(
                f"public_key: {opened.name} is a .safetensors file, which holds no signatures: sign its folder instead "
                "(docs/signing.md)"
            )
        _check_signatures(opened, index, call)
    by_key, signers = _C.authenticated_by(index)
    if by_key or signers:
        return
    if keys is not None:
        named(opened.name, _C.check_marks, opened.source, index, keys)
    if trust.required:
        raise AuthenticationError(f"{opened.name}: {_why_not(index, keys is not None)}")
    if index.encrypted and keys is not None:
        logger.info("%s: encrypted by an earlier release: its tensors are authentic, its index is not", opened.name)


def _why_not(index: _C.Index, has_key: bool) -> str:
    if index.encrypted and has_key:
        return (
            "not authenticated: written by an earlier release, or its annex was removed; write it anew with "
            "`tensorizer encrypt --in-key-file`"
        )
    if index.format == "safetensors":
        return "not authenticated: .safetensors files hold nothing that a key could be held against"
    return "not authenticated: nothing was given that authenticates it (public_key=, or the key of an encrypted file)"


def _check_signatures(opened: OpenedSource, index: _C.Index, call: CallOptions) -> None:
    """Looks in the file, then for the one of its name with ``.sig`` behind it, which is opened as the file was."""
    wanted = list(call.trust.public_keys)
    embedded: Optional[bool] = named(opened.name, _C.check_signatures, index, wanted)
    if embedded:
        return None
    place = signature_place(opened.location)
    shown = str(shown_location(place))

    def check(content: bytes) -> None:
        if named(f"{opened.name}: {shown}", _C.check_signatures, index, wanted, content):
            return
        signers = _C.signers_of_detached(index, content)
        if not signers:  # of another file, or of another content
            raise AuthenticationError(f"{opened.name}: {shown}: the signature does not match: it is of another content")
        raise _signed_by_others(opened.name, signers)

    denied = ""
    if place is not None:
        try:
            return read_checked(place, opened.options, check, MAX_SIGNATURE_NBYTES)
        except OSError as error:
            if not is_absent(error):
                raise
            denied = f": {MAY_BE_FORBIDDEN}" if is_denied(error) else ""
    if embedded is False:
        raise _signed_by_others(opened.name, _C.embedded_signers(index))
    nothing = "an open file has no name to look for a .sig file by" if place is None else f"none at {shown}"
    raise AuthenticationError(f"{opened.name}: not signed: no signature in it, and {nothing}{denied}")


def _signed_by_others(name: str, signers: list[bytes]) -> AuthenticationError:
    return AuthenticationError(f"{name}: signed by other keys: {', '.join(signer.hex() for signer in signers)}")
