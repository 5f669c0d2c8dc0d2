"""tensorizer.protobuf: the old representation, checked field by field and against every dtype it knows."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import samples
import torch

pytest.importorskip("google.protobuf", reason="the protobuf package is not installed")

from tensorizer import protobuf, tensors_pb2
from tensorizer.errors import FormatError
from tensorizer.protobuf import (
    DtypePbs,
    PbDtypes,
    PbNpyDtypes,
    deserialize_model,
    deserialize_tensor,
    serialize_model,
    serialize_tensor,
)

PLAIN_DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.complex64,
    torch.complex128,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(3))
        self.inner = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        self.register_parameter("absent", None)


def test_the_enumerations_have_the_published_numbers():
    names = "INVALID FLOAT32 FLOAT64 FLOAT16 BFLOAT16 COMPLEX32 COMPLEX64 COMPLEX128 UINT8 INT8 INT16 INT32 INT64 BOOL"
    names += " QUINT8 QINT8 QINT32 QUINT4_2"
    assert dict(tensors_pb2.Dtype.items()) == {f"DT_{name}": number for number, name in enumerate(names.split())}
    assert dict(tensors_pb2.AttributeType.items()) == {"AT_PARAMETER": 0, "AT_BUFFER": 1}
    assert PbDtypes == {number: dtype for dtype, number in DtypePbs.items()}
    assert DtypePbs[torch.quint4x2] == 17
    assert len(PbDtypes) == 17
    assert np.dtype(PbNpyDtypes[tensors_pb2.DT_BFLOAT16]) == np.float16
    assert np.dtype(PbNpyDtypes[tensors_pb2.DT_COMPLEX32]) == np.complex64
    assert np.dtype(PbNpyDtypes[tensors_pb2.DT_QINT32]) == np.int32


def test_a_tensor_message_has_exactly_the_published_bytes():
    message = serialize_tensor(torch.tensor([[1, 2, 3]], dtype=torch.int16), tensors_pb2.AT_BUFFER)
    assert message.SerializeToString() == (
        b"\x08\x0a"  # dtype = DT_INT16
        b"\x12\x02\x01\x03"  # shape, packed: 1, 3
        b"\x1a\x06\x01\x00\x02\x00\x03\x00"  # data
        b"\x20\x01"  # attr_type = AT_BUFFER
    )
    without = serialize_tensor(torch.tensor(True))
    assert without.SerializeToString() == b"\x08\x0d\x1a\x01\x01"


@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3)], ids=str)
def test_every_plain_dtype_and_shape_survives(dtype, shape):
    tensor = torch.randn(shape).mul(50).to(dtype)
    back = deserialize_tensor(tensors_pb2.Tensor.FromString(serialize_tensor(tensor).SerializeToString()))
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert torch.equal(back, tensor)


def test_a_strided_tensor_that_requires_grad_is_written_in_c_order_and_owns_writable_memory_when_it_is_loaded():
    tensor = torch.randn(3, 4, requires_grad=True).t()
    loaded = deserialize_tensor(serialize_tensor(tensor))
    assert torch.equal(loaded, tensor)
    loaded += 1
    assert torch.equal(loaded, tensor + 1)


def test_the_attribute_type_comes_back_only_where_it_was_set():
    tensor, attribute_type = deserialize_tensor(serialize_tensor(torch.ones(1), tensors_pb2.AT_PARAMETER))
    assert attribute_type == tensors_pb2.AT_PARAMETER
    assert torch.equal(tensor, torch.ones(1))
    assert isinstance(deserialize_tensor(serialize_tensor(torch.ones(1))), torch.Tensor)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_what_cannot_be_written_is_refused_by_kind():
    with pytest.raises(AssertionError, match="ndarray"):
        serialize_tensor(np.zeros(3))
    with pytest.raises(AssertionError, match="AT_PARAMETER"):
        serialize_tensor(torch.zeros(1), 7)
    if hasattr(torch, "uint16"):  # since torch 2.3
        with pytest.raises(KeyError):
            serialize_tensor(torch.zeros(1, dtype=torch.uint16))
    for dtype in (torch.bfloat16, torch.complex32):
        with pytest.raises(TypeError, match="numpy"):
            serialize_tensor(torch.zeros(1, dtype=dtype))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"dtype": 0, "data": b""}, "dtype 0"),
        ({"dtype": 99, "data": b""}, "dtype 99"),
        ({"dtype": 1, "shape": [2], "data": b"1234"}, "expected 8 bytes, got 4"),
        ({"dtype": 8, "shape": [-1, -4], "data": b"1234"}, r"expected a shape, got 2 dimensions: \[-1, -4\]"),
        ({"dtype": 8, "shape": [2**40, 2**40], "data": b"1234"}, "expected a shape"),
        ({"dtype": 8, "shape": [0, 2**62, 2**62], "data": b""}, "expected a shape"),
        ({"dtype": 8, "shape": [1] * 256, "data": b"1"}, "expected a shape, got 256 dimensions"),
        ({"dtype": 8, "shape": [2**62 + 12345] * 80_000, "data": b"1234"}, "expected a shape, got 80000 dimensions"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_message_that_contradicts_itself_is_refused(fields, problem):
    with pytest.raises(FormatError, match=problem):
        deserialize_tensor(tensors_pb2.Tensor(**fields))


def test_more_dimensions_than_numpy_has_are_read():
    tensor = deserialize_tensor(tensors_pb2.Tensor(dtype=8, shape=[1] * 99 + [4], data=b"1234"))
    assert tensor.shape == (*[1] * 99, 4)


def test_a_model_survives_and_nothing_is_printed(capsys):
    source, target, file = Net(), Net(), io.BytesIO()
    serialize_model(source, file)
    file.seek(0)
    deserialize_model(target, file)
    samples.assert_same(target.state_dict(), source.state_dict())
    assert capsys.readouterr() == ("", "")


def test_a_model_message_lists_the_modules_in_order_with_parameters_before_buffers():
    file = io.BytesIO()
    serialize_model(Net(), file)
    message = tensors_pb2.Module.FromString(file.getvalue())
    assert message.name == ""
    assert [entry.name for entry in message.attributes] == ["", "inner", "inner.0", "inner.1"]
    assert all(entry.WhichOneof("value") == "module" for entry in message.attributes)
    norm = message.attributes[3].module
    assert [a.name for a in norm.attributes] == ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    assert [a.tensor.attr_type for a in norm.attributes] == [0, 0, 1, 1, 1]
    assert [a.name for a in message.attributes[0].module.attributes] == ["scale"]


def test_an_unknown_module_or_attribute_type_is_named():
    message = tensors_pb2.Module()
    message.attributes.add(name="nowhere").module.SetInParent()
    with pytest.raises(KeyError, match="nowhere"):
        deserialize_model(Net(), io.BytesIO(message.SerializeToString()))
    message = tensors_pb2.Module()
    entry = message.attributes.add(name="inner.0")
    entry.module.attributes.add(name="weight").tensor.CopyFrom(serialize_tensor(torch.ones(1)))
    with pytest.raises(ValueError, match=r"inner\.0\.weight"):
        deserialize_model(Net(), io.BytesIO(message.SerializeToString()))
    entry.module.attributes[0].tensor.attr_type = 5
    with pytest.raises(ValueError, match="got 5"):
        deserialize_model(Net(), io.BytesIO(message.SerializeToString()))


def test_bytes_that_are_no_message_are_a_format_error():
    with pytest.raises(FormatError, match="not a protobuf model"):
        deserialize_model(Net(), io.BytesIO(b"\xff\xff\xff\xff garbage"))


def test_the_schema_file_says_what_the_messages_are_made_from():
    text = Path(protobuf.__file__).with_name("tensors.proto").read_text(encoding="utf-8")
    for name, number in [*tensors_pb2.Dtype.items(), *tensors_pb2.AttributeType.items()]:
        assert f"  {name} = {number};" in text
    for message in tensors_pb2.DESCRIPTOR.message_types_by_name.values():
        for field in message.fields:
            assert f" {field.name} = {field.number};" in text
