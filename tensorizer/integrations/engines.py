"""The weights of any model, from anywhere, for inference engines: :func:`load_stream`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Optional, Union

import torch

from tensorizer._format.entries import FilterFuncType
from tensorizer._io.call_options import CallOptions, Trust
from tensorizer._io.uri import scheme_of
from tensorizer._load.digests import verification
from tensorizer._load.stream import TensorStream, check_memory_ahead
from tensorizer._progress import ProgressArgument
from tensorizer._signing import PublicKeyArgument
from tensorizer._system.config import suggestion
from tensorizer._system.devices import DeviceArgument
from tensorizer.integrations._hf.folders import LoadOptions, find_weights, is_repo_id, open_folder

_KEYWORDS = (
    *("device", "dtype", "filter_func", "verify", "encryption", "public_key", "stream_options", "memory", "progress"),
)


def load_stream(
    source: Union[str, os.PathLike[str]],
    *,
    device: DeviceArgument = "cpu",
    dtype: Optional[torch.dtype] = None,
    filter_func: Optional[FilterFuncType] = None,
    verify: Any = "auto",
    encryption: Any = None,
    public_key: PublicKeyArgument = None,
    stream_options: Optional[Mapping[str, Any]] = None,
    memory: Union[int, str, None] = None,
    progress: ProgressArgument = False,
    **unknown: Any,
) -> TensorStream:
    """Yields the names and tensors of a model one after the other, while threads read the next ones ahead.

    Files come in the order of their names, and tensors in the order of the data in their file. You may keep and change
    each tensor: it owns its memory, or is a view of memory that nothing else uses. On the CPU, tensors of a file on a
    local disk are copy-on-write views of the file, unless they are converted or compared.

    Args:
        source: A folder, a file, the id of a hub repository, or a URI: ``hf://org/name@revision``, ``s3://``,
            ``https://``, or any other that fsspec opens. The weights are ``.safetensors`` or ``.tensors``, in one file
            or in shards with their index, and may be encrypted or signed.
        device: Where the tensors go; the CPU by default.
        dtype: Converts ``float16``, ``bfloat16``, ``float32`` and ``float64`` tensors to this dtype.
        filter_func: Yields only the tensors whose name it accepts.
        verify: The digests that the data are compared with. ``"auto"``, the default: digests in ``.tensors`` files;
            ``.safetensors`` files are not compared. ``"hub"``: the SHA-256 that the hub states for its files. A path or
            URI: that ``SHA256SUMS`` file, or the digests in that OpenSSF signature of the model; names in it are
            relative to the folder of the model. ``{"signature": PATH, "public_key": PATH}``, or with ``"identity"`` and
            ``"identity_provider"`` instead of the key: the digests in that signature, which this key or identity must
            have made; the package ``model_signing`` checks this. ``True``: digests in the files, which must have them.
            ``False``: none.
            Whole files are hashed while they are read. **Tensors are yielded before their file has been compared: do
            not use them before the loop has ended** (docs/security.md).
        encryption: The key of encrypted files (:class:`tensorizer.DecryptionParams`).
        public_key: Keys, one of which must have signed the files, as for :class:`tensorizer.TensorDeserializer`.
        stream_options: Keywords for :func:`tensorizer.stream_io.open_stream`, such as ``s3_endpoint`` or ``cache``.
        memory: Bytes, or a text like ``"4GB"``, that may be loaded and not yielded yet (or one larger tensor). The
            default is a tenth of the memory that the control group has left, at least 1 GiB; for a CUDA device, at most
            a tenth of its free memory, at least 256 MiB.
        progress: ``True`` shows a bar; a callable is told about bytes done.

    Returns:
        An iterator of ``(name, tensor)``. Names that stand for one tensor get the same tensor, one after the other.
        ``close()``, the end of a ``with``, or dropping it ends running loads, and frees the tensors that were not
        yielded.

    Raises:
        FileNotFoundError: The folder, repository or file does not exist, or has no weights.
        FormatError: The files are not files of tensors, or damaged; or the folder has several sets of weights.
        HashMismatchError: At the end of a file, its digest differs from the one that `verify` names.
        MissingHashError: `verify` has no digest for a loaded file.
        CryptographyError: A key is missing or wrong, or was given for a file that is not encrypted.
        AuthenticationError: The files do not match their key or signature, or somebody else signed the model.
        ImportError: `verify` names who must have signed the model, and ``model_signing`` is not installed.
        OSError: A file cannot be opened or read.
        TypeError: A keyword is unknown, or an argument has a wrong type.
        ValueError: An argument has a wrong value, such as ``verify="hub"`` for files that are not from the hub.

    Examples:
        >>> import tensorizer
        >>> tensorizer.save_file({"a": torch.ones(2), "b": torch.zeros(3)}, "model.safetensors")
        >>> for name, tensor in tensorizer.load_stream("model.safetensors"):
        ...     print(name, tensor.sum())
        a tensor(2.)
        b tensor(0.)
    """
    for name in unknown:
        raise TypeError(f"load_stream() has no argument {name}=; {suggestion(name, _KEYWORDS)}")
    nbytes = check_memory_ahead(memory)
    call = CallOptions.to_read(encryption, stream_options, None, progress, Trust.of(public_key, None))
    options = LoadOptions(mmap=None, verify=verification(verify, call), call=call)
    with open_folder(source, options) as folder:
        weights = find_weights(folder, "model", options, any_name=True)
        return TensorStream(weights.open(device, dtype, filter_func), nbytes)


def is_hub_id(source: Any) -> bool:
    """Whether a source is the id of a repository of the hub, as no local file or folder has that name."""
    return isinstance(source, str) and "://" not in source and is_repo_id(source) and not os.path.exists(source)


def fetch(source: Any) -> None:
    """Brings the weights of a hub repository into its cache; does nothing for other sources. Raises as open_folder."""
    if not (is_hub_id(source) or scheme_of(source) == "hf"):
        return
    options = LoadOptions()
    with open_folder(source, options) as folder:
        find_weights(folder, "model", options, any_name=True)
