"""Types of the module generated from tensors.proto by protoc 3.19.4, whose output works with protobuf 3.19.5 and later.

Command: ``protoc --python_out=. tensorizer/tensors.proto`` in the repository root.
"""

import builtins
from collections.abc import Iterable, Iterator, MutableSequence
from typing import Any, Optional, Protocol

from typing_extensions import Self

DESCRIPTOR: Any

class _Enum:
    def Name(self, number: int) -> str: ...
    def Value(self, name: str) -> int: ...
    def keys(self) -> list[str]: ...
    def values(self) -> list[int]: ...
    def items(self) -> list[tuple[str, int]]: ...

Dtype: _Enum
AttributeType: _Enum

DT_INVALID: int
DT_FLOAT32: int
DT_FLOAT64: int
DT_FLOAT16: int
DT_BFLOAT16: int
DT_COMPLEX32: int
DT_COMPLEX64: int
DT_COMPLEX128: int
DT_UINT8: int
DT_INT8: int
DT_INT16: int
DT_INT32: int
DT_INT64: int
DT_BOOL: int
DT_QUINT8: int
DT_QINT8: int
DT_QINT32: int
DT_QUINT4_2: int
AT_PARAMETER: int
AT_BUFFER: int

class _Message:
    def ByteSize(self) -> int: ...
    def CopyFrom(self, other_msg: Self) -> None: ...
    def HasField(self, field_name: str) -> bool: ...
    def ParseFromString(self, serialized: bytes) -> int: ...
    def SerializeToString(self) -> bytes: ...
    def SetInParent(self) -> None: ...
    def WhichOneof(self, oneof_group: str) -> Optional[str]: ...
    @classmethod
    def FromString(cls, s: bytes) -> Self: ...

class Tensor(_Message):
    dtype: int
    data: bytes
    attr_type: int
    @property
    def shape(self) -> MutableSequence[int]: ...
    def __init__(
        self, *, dtype: int = ..., shape: Iterable[int] = ..., data: bytes = ..., attr_type: Optional[int] = ...
    ) -> None: ...

class Attribute(_Message):
    name: str
    string: str
    int64: builtins.int
    float: builtins.float
    bool: builtins.bool
    @property
    def module(self) -> Module: ...
    @property
    def tensor(self) -> Tensor: ...
    def __init__(self, *, name: str = ..., module: Module = ..., tensor: Tensor = ..., string: str = ...) -> None: ...

class _Attributes(Protocol):
    def add(self, *, name: str = ...) -> Attribute: ...
    def __iter__(self) -> Iterator[Attribute]: ...
    def __getitem__(self, key: int) -> Attribute: ...
    def __len__(self) -> int: ...

class Module(_Message):
    name: str
    @property
    def names(self) -> MutableSequence[str]: ...
    @property
    def attributes(self) -> _Attributes: ...
    def __init__(
        self, *, name: str = ..., names: Iterable[str] = ..., attributes: Iterable[Attribute] = ...
    ) -> None: ...
