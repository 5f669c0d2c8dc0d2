"""What a file is that was taken for one of ours; for the messages of errors, so it is imported when one is raised."""

from __future__ import annotations

import json
import re
from typing import NamedTuple, Optional

from tensorizer._system.redaction import without_secrets

#: What :func:`foreign_kind` looks at, from the beginning of a file.
HEAD_NBYTES = 1024

# What configurations of models have, of transformers and of diffusers.
_CONFIGURATION = re.compile(r'"(model_type|architectures|_class_name)"')
_PICKLED = ": read it with torch.load and write it with TensorSerializer"
# What binary files begin with, what they are, and what to do about them.
_BINARY = (
    (
        b"GGUF",
        "a GGUF file",
        ", the format of llama.cpp, which is not read here: take the .safetensors files of the model",
    ),
    (b"PK\x03\x04", "a zip archive, as torch.save writes it", _PICKLED),
    # Before torch.save wrote archives, its files began with a pickled magic number.
    (b"\x80\x02\x8a\x0al\xfc\x9cF", "a file of an old torch.save", _PICKLED),
    (b"\x1f\x8b", "compressed with gzip", ": unpack it first; a server must send it as it is"),
)

# Whole messages of servers are shown up to this length.
_MESSAGE_LENGTH = 200


class ForeignKind(NamedTuple):
    """A kind of file, and what its reader can do."""

    name: str
    advice: str

    def __str__(self) -> str:
        return f"it is {self.name}{self.advice}"


def foreign_kind(head: bytes) -> Optional[ForeignKind]:
    """What a file begins as, where that is known and no format of ours. Quotes of it an error message only."""
    for begin, name, advice in _BINARY:
        if head.startswith(begin):
            return ForeignKind(name, advice)
    try:
        text = head.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if len(head) < HEAD_NBYTES or error.start < len(head) - 3:  # the last character may be cut
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
    """Adds to an error about a file what the file is, unless it says so already, or the file is of the kind `wanted`.

    Of the text of the file, the beginning is looked at.
    """
    kind = foreign_kind(text[:HEAD_NBYTES])
    if kind is not None and kind.name != wanted and kind.name not in str(error):
        error.args = (f"{error}; {kind}",)


def _is_xet_json(text: str) -> bool:
    return text.startswith("{") and '"hash"' in text and '"file_size"' in text


def _message_in(text: str) -> Optional[str]:
    """What a short answer in JSON says of an error, in the places where servers put that; ``None`` if it does not."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):  # or it goes on behind the head
        return None
    for name in ("error", "message", "detail"):
        content = content.get(name, content) if isinstance(content, dict) else content
    return content if isinstance(content, str) else None
