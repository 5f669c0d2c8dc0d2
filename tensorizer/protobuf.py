"""The old protobuf representation of tensors and modules, kept for files that still have it.

It shares nothing with the ``.tensors`` format: a file is one serialized ``Module`` message of ``tensors.proto``,
without magic, version or hashes, and a message ends at 2 GiB. Use :class:`tensorizer.TensorSerializer` for new files.

``import tensorizer`` does not import this module; it needs the ``protobuf`` package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO, Optional, Union

import numpy as np
import torch
from google.protobuf.message import DecodeError

from tensorizer import tensors_pb2
from tensorizer._format.payloads import dense_nbytes
from tensorizer.errors import FormatError

if TYPE_CHECKING:
    from tensorizer.tensors_pb2 import Attribute, Module, Tensor

#: Maps torch dtypes to ``tensors.Dtype``.
DtypePbs: dict[torch.dtype, int] = {
    torch.float32: tensors_pb2.DT_FLOAT32,
    torch.float64: tensors_pb2.DT_FLOAT64,
    torch.float16: tensors_pb2.DT_FLOAT16,
    torch.bfloat16: tensors_pb2.DT_BFLOAT16,
    torch.complex32: tensors_pb2.DT_COMPLEX32,
    torch.complex64: tensors_pb2.DT_COMPLEX64,
    torch.complex128: tensors_pb2.DT_COMPLEX128,
    torch.uint8: tensors_pb2.DT_UINT8,
    torch.int8: tensors_pb2.DT_INT8,
    torch.int16: tensors_pb2.DT_INT16,
    torch.int32: tensors_pb2.DT_INT32,
    torch.int64: tensors_pb2.DT_INT64,
    torch.bool: tensors_pb2.DT_BOOL,
    torch.quint8: tensors_pb2.DT_QUINT8,
    torch.qint8: tensors_pb2.DT_QINT8,
    torch.qint32: tensors_pb2.DT_QINT32,
    torch.quint4x2: tensors_pb2.DT_QUINT4_2,
}

#: Maps ``tensors.Dtype`` to torch dtypes.
PbDtypes: dict[int, torch.dtype] = {number: dtype for dtype, number in DtypePbs.items()}

_NEAREST: dict[torch.dtype, Any] = {
    torch.bfloat16: np.float16,
    torch.complex32: np.complex64,
    torch.quint8: np.uint8,
    torch.qint8: np.int8,
    torch.qint32: np.int32,
    torch.quint4x2: np.uint8,
}

#: Maps ``tensors.Dtype`` to the numpy dtype for its bytes. Types that numpy lacks get the nearest one.
PbNpyDtypes: dict[int, Any] = {
    number: _NEAREST.get(dtype) or np.dtype(str(dtype).removeprefix("torch.")).type
    for dtype, number in DtypePbs.items()
}

_ATTRIBUTE_TYPES = (tensors_pb2.AT_PARAMETER, tensors_pb2.AT_BUFFER)
_MAX_MESSAGE_BYTES = 2**31 - 1


def serialize_tensor(t: torch.Tensor, attribute: Optional[int] = None) -> Tensor:
    """Make a ``Tensor`` message of a tensor on any device.

    Args:
        t: The tensor; its bytes are copied.
        attribute: ``AT_PARAMETER`` or ``AT_BUFFER``, or ``None`` for a tensor that is neither.

    Raises:
        AssertionError: ``t`` is no tensor, or ``attribute`` no attribute type.
        KeyError: The schema has no number for this dtype.
        TypeError: The dtype has a number but no numpy equivalent (bfloat16, complex32, quantised types).

    Examples:
        >>> from tensorizer import protobuf
        >>> message = protobuf.serialize_tensor(torch.ones(2))
        >>> list(message.shape)
        [2]
    """
    if not isinstance(t, torch.Tensor):
        raise AssertionError(f"serialize_tensor: expected a torch.Tensor, got {type(t).__name__}")
    if attribute is not None and attribute not in _ATTRIBUTE_TYPES:
        raise AssertionError(f"serialize_tensor: expected AT_PARAMETER, AT_BUFFER or None, got {attribute!r}")
    if t.dtype not in DtypePbs:
        raise KeyError(t.dtype)
    if t.dtype in _NEAREST:
        raise TypeError(f"serialize_tensor: {t.dtype} has no numpy equivalent and cannot be written as protobuf")
    array = t.detach().cpu().numpy()
    native = array.astype(array.dtype.newbyteorder("<"), copy=False)
    message = tensors_pb2.Tensor(dtype=DtypePbs[t.dtype], shape=t.shape, data=native.tobytes())
    if attribute is not None:
        message.attr_type = attribute
    return message


def deserialize_tensor(msg: Tensor) -> Union[torch.Tensor, tuple[torch.Tensor, int]]:
    """Make a CPU tensor of a ``Tensor`` message, decoded by :data:`PbNpyDtypes`.

    Returns:
        The tensor, or ``(tensor, attr_type)`` when the message says what kind of attribute it was.

    Raises:
        FormatError: The message has no known dtype, a shape that no tensor has, or other than the bytes its shape
            needs.

    Examples:
        >>> from tensorizer import protobuf
        >>> protobuf.deserialize_tensor(protobuf.serialize_tensor(torch.ones(2)))
        tensor([1., 1.])
    """
    if msg.dtype not in PbNpyDtypes:
        raise FormatError(f"protobuf tensor: expected one of the numbers of tensors.Dtype, got dtype {msg.dtype}")
    shape = tuple(msg.shape)
    dtype = np.dtype(PbNpyDtypes[msg.dtype]).newbyteorder("<")
    wanted = dense_nbytes(shape, dtype.itemsize)
    if wanted is None:
        raise FormatError(f"protobuf tensor: expected a shape, got {len(shape)} dimensions: {list(shape[:8])}")
    if len(msg.data) != wanted:
        raise FormatError(f"protobuf tensor of shape {list(shape)}: expected {wanted} bytes, got {len(msg.data)}")
    array = np.frombuffer(msg.data, dtype=dtype)
    # numpy has fewer dimensions than torch
    tensor = torch.from_numpy(array.astype(dtype.newbyteorder("="), copy=True)).reshape(shape)
    return (tensor, msg.attr_type) if msg.HasField("attr_type") else tensor


def serialize_model(model: torch.nn.Module, file_stream: BinaryIO) -> None:
    """Write all parameters and buffers of a model as one ``Module`` message.

    Args:
        model: The model.
        file_stream: Receives the message in one ``write``.

    Raises:
        KeyError, TypeError: As :func:`serialize_tensor`.
        ValueError: The message would pass protobuf's limit of 2 GiB.

    Examples:
        >>> from tensorizer import protobuf
        >>> with open("model.pb", "wb") as file:
        ...     protobuf.serialize_model(torch.nn.Linear(4, 2), file)
    """
    message = tensors_pb2.Module()
    for module_name, module in model.named_modules():
        entry = message.attributes.add(name=module_name)
        entry.module.SetInParent()
        _add_tensors(entry.module, module._parameters, tensors_pb2.AT_PARAMETER)
        _add_tensors(entry.module, module._buffers, tensors_pb2.AT_BUFFER)
    nbytes = message.ByteSize()
    if nbytes > _MAX_MESSAGE_BYTES:
        raise ValueError(f"a protobuf message holds at most {_MAX_MESSAGE_BYTES} bytes, this model needs {nbytes}")
    file_stream.write(message.SerializeToString())


def _add_tensors(message: Module, tensors: Any, attribute_type: int) -> None:
    for name, tensor in tensors.items():
        if tensor is not None:
            message.attributes.add(name=name).tensor.CopyFrom(serialize_tensor(tensor, attribute_type))


def deserialize_model(model: torch.nn.Module, file_stream: BinaryIO) -> None:
    """Put the tensors of a ``Module`` message into the modules of the same names.

    The tensors go straight into the modules' parameter and buffer tables, as plain tensors on the CPU; nothing is
    copied into what was there before, and shapes are not compared.

    Args:
        model: The model to fill.
        file_stream: Read to its end.

    Raises:
        FormatError: The stream does not hold such a message.
        KeyError: The message names a module that ``model`` does not have.
        ValueError: A tensor is marked as neither parameter nor buffer.

    Examples:
        >>> from tensorizer import protobuf
        >>> with open("model.pb", "wb") as file:
        ...     protobuf.serialize_model(torch.nn.Linear(4, 2), file)
        >>> with open("model.pb", "rb") as file:
        ...     protobuf.deserialize_model(torch.nn.Linear(4, 2), file)
    """
    message = tensors_pb2.Module()
    try:
        message.ParseFromString(file_stream.read())
    except DecodeError as error:
        raise FormatError(f"not a protobuf model: {error}") from error
    modules = dict(model.named_modules())
    for entry in message.attributes:
        if entry.name not in modules:
            raise KeyError(entry.name)
        for attribute in entry.module.attributes:
            _place(modules[entry.name], entry.name, attribute)


def _place(module: torch.nn.Module, module_name: str, attribute: Attribute) -> None:
    result = deserialize_tensor(attribute.tensor)
    tensor, attribute_type = result if isinstance(result, tuple) else (result, None)
    tables: dict[Any, Any] = {tensors_pb2.AT_PARAMETER: module._parameters, tensors_pb2.AT_BUFFER: module._buffers}
    if attribute_type not in tables:
        path = f"{module_name}.{attribute.name}"
        raise ValueError(f"protobuf tensor {path}: expected AT_PARAMETER or AT_BUFFER, got {attribute_type!r}")
    tables[attribute_type][attribute.name] = tensor
