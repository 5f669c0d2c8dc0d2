"""Recognises other kinds of files, for error messages. It is imported when such an error is raised."""

from __future__ import annotations

import json
import re
from typing import NamedTuple, Optional

from tensorizer._system.redaction import without_secrets

#: How many bytes of the beginning of a file :func:`foreign_kind` looks at.
HEAD_NBYTES = 1024

# Keys in the configurations of models, of transformers and of diffusers.
_CONFIGURATION = re.compile(r'"(model_type|architectures|_class_name)"')
_PICKLED = ": read it with torch.load and write it with TensorSerializer"
# The first bytes of binary files, what the files are, and what to do with them.
_BINARY = (
    (
        b"GGUF",
        "a GGUF file",
        ", the format of llama.cpp, which is not read here: take the .safetensors files of the model",
    ),
    (b"PK\x03\x04", "a zip archive, as torch.save writes it", _PICKLED),
    # Before torch.save wrote zip archives, its files began with a pickled magic number.
    (b"\x80\x02\x8a\x0al\xfc\x9cF", "a file of an old torch.save", _PICKLED),
    (b"\x1f\x8b", "compressed with gzip", ": unpack it first; a server must send it as it is"),
)

# Whole messages of servers are shown up to this length.
_MESSAGE_LENGTH = 200


class ForeignKind(NamedTuple):
    """A kind of file, and what the user can do with it."""

    name: str
    advice: str

    def __str__(self) -> str:
        return f"it is {self.name}{self.advice}"


def foreign_kind(head: bytes) -> Optional[ForeignKind]:
    """The kind of a file from its beginning; ``None`` for our formats and unknown ones.

    It quotes nothing from the file except the error message of a server.
    """
    for begin, name, advice in _BINARY:
        if head.startswith(begin):
            return ForeignKind(name, advice)
    try:
        text = head.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if len(head) < HEAD_NBYTES or error.start < len(head) - 3:  # the last character may be incomplete
            return None
        text = head[: error.start].decode("utf-8-sig")
    text = text.lstrip()
    if not text or re.search(r"[^\s\x20-\x7e\x80-\U0010ffff]", text):
        return None
    if text.startswith("version https://git-lfs"):
        oid, size = (re.search(rf"^{key} (\S+)", text, re.MULTILINE) for key in ("oid", "size"))
        of = f": it stands for {oid[1]} of {size[1]} bytes" if oid and size else ""
        return ForeignKind("a git-lfs pointer", f", not the file{of} (git lfs pull fetches it)")
    if text.startswith("# xet version") or _is_xet_json(text):
        return ForeignKind("a Xet pointer", ", not the file: download it with huggingface_hub or git xet")
    if re.match(r"<!doctype html|<html", text, re.IGNORECASE):
        return ForeignKind("an HTML page", ", perhaps of a login or an error: check the address and the permissions")
    if text.startswith("<?xml"):
        return ForeignKind("an XML document", ", perhaps the error message of an object store")
    if re.match(r'\{\s*["}]|\[\s*["{\[\]]', text):
        message = _message_in(text)
        if message is None:
            if _CONFIGURATION.search(text):
                return ForeignKind("JSON", "; did you mean the folder?")
            return ForeignKind("JSON", ", perhaps the error message of a server")
        return ForeignKind("an error message in JSON", f": {without_secrets(message)[:_MESSAGE_LENGTH]!r}")
    return ForeignKind("a text", ", perhaps the error message of a server")


def tell_foreign(error: Exception, text: bytes, wanted: Optional[str] = None) -> None:
    """Adds the kind of the file to an error, unless its text names the kind already or the kind is `wanted`.

    `text` is the file's content, of which only the beginning is looked at.
    """
    kind = foreign_kind(text[:HEAD_NBYTES])
    if kind is not None and kind.name != wanted and kind.name not in str(error):
        error.args = (f"{error}; {kind}",)


def _is_xet_json(text: str) -> bool:
    return text.startswith("{") and '"hash"' in text and '"file_size"' in text


def _message_in(text: str) -> Optional[str]:
    """The error message in a short JSON answer of a server, from the usual keys; ``None`` if there is no such key."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):  # or the JSON continues behind the head
        return None
    for name in ("error", "message", "detail"):
        content = content.get(name, content) if isinstance(content, dict) else content
    return content if isinstance(content, str) else None
