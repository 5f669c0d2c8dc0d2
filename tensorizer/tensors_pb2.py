"""The messages of ``tensors.proto``, which :mod:`tensorizer.protobuf` reads and writes.

The schema is described here by its names and numbers, and protobuf makes the classes from it when this module is
imported, so that every release of protobuf since 3.19.5 works and no output of a certain protoc is needed.
"""

from __future__ import annotations

from google.protobuf import descriptor_pb2, descriptor_pool, message, reflection
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

_DTYPES = (
    "INVALID FLOAT32 FLOAT64 FLOAT16 BFLOAT16 COMPLEX32 COMPLEX64 COMPLEX128 "
    "UINT8 INT8 INT16 INT32 INT64 BOOL QUINT8 QINT8 QINT32 QUINT4_2"
)
# The first value of an enumeration is 0.
_ENUMS = {
    "Dtype": [f"DT_{name}" for name in _DTYPES.split()],
    "AttributeType": ["AT_PARAMETER", "AT_BUFFER"],
}
# Maps names of fields to number, label and type. The fields labelled "oneof" form one group, "value": a message has one
# of them.
_MESSAGES = {
    "Tensor": {
        "dtype": (1, "", "Dtype"),
        "shape": (2, "repeated", "int64"),
        "data": (3, "", "bytes"),
        "attr_type": (4, "optional", "AttributeType"),
    },
    "Attribute": {
        "name": (1, "", "string"),
        "module": (3, "oneof", "Module"),
        "tensor": (4, "oneof", "Tensor"),
        "string": (5, "oneof", "string"),
        "int64": (6, "oneof", "int64"),
        "float": (7, "oneof", "float"),
        "bool": (8, "oneof", "bool"),
    },
    "Module": {
        "name": (1, "", "string"),
        "names": (2, "repeated", "string"),
        "attributes": (3, "repeated", "Attribute"),
    },
}


def _add_field(described: descriptor_pb2.DescriptorProto, name: str, number: int, label: str, kind: str) -> None:
    Field = descriptor_pb2.FieldDescriptorProto
    field = described.field.add(name=name, number=number)
    field.label = Field.LABEL_REPEATED if label == "repeated" else Field.LABEL_OPTIONAL
    if kind in _ENUMS or kind in _MESSAGES:
        field.type = Field.TYPE_ENUM if kind in _ENUMS else Field.TYPE_MESSAGE
        field.type_name = f".tensors.{kind}"
    else:
        field.type = Field.Type.Value(f"TYPE_{kind.upper()}")
    if label == "optional":  # in protobuf, an optional field is the only member of an unnamed oneof
        field.proto3_optional = True
        field.oneof_index = len(described.oneof_decl)
        described.oneof_decl.add(name=f"_{name}")
    elif label == "oneof":
        field.oneof_index = 0


def _describe() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="tensorizer/tensors.proto", package="tensors", syntax="proto3")
    for name, fields in _MESSAGES.items():
        described = file.message_type.add(name=name)
        if any(label == "oneof" for _, label, _ in fields.values()):
            described.oneof_decl.add(name="value")
        for field, (number, label, kind) in fields.items():
            _add_field(described, field, number, label, kind)
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    return file


def _message_class(name: str) -> type:
    members = {"DESCRIPTOR": DESCRIPTOR.message_types_by_name[name], "__module__": __name__}
    return reflection.GeneratedProtocolMessageType(name, (message.Message,), members)


DESCRIPTOR = descriptor_pool.Default().AddSerializedFile(_describe().SerializeToString())
Dtype = EnumTypeWrapper(DESCRIPTOR.enum_types_by_name["Dtype"])
AttributeType = EnumTypeWrapper(DESCRIPTOR.enum_types_by_name["AttributeType"])
globals().update([*Dtype.items(), *AttributeType.items()])  # DT_INVALID and so on
Tensor = _message_class("Tensor")
Attribute = _message_class("Attribute")
Module = _message_class("Module")
