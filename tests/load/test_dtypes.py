"""dtypes: how each is stored, that each comes back to the bit, and what spellings of other writers are understood."""

from __future__ import annotations

import io

import pytest
import reference_format as fmt
import samples
import torch
from samples import ALL_DTYPES, NUMPY_DTYPES, OPAQUE_DTYPES, assert_same, load, state_dict_bytes, tensor

from tensorizer import TensorDeserializer, errors

STORED = {
    torch.float16: "<f2", torch.float32: "<f4", torch.float64: "<f8", torch.complex64: "<c8", torch.complex128: "<c16",
    torch.int8: "|i1", torch.int16: "<i2", torch.int32: "<i4", torch.int64: "<i8", torch.uint8: "|u1",
    torch.bool: "|b1",
    torch.bfloat16: "<V2\0torch.bfloat16", torch.complex32: "<V4\0torch.complex32",
}  # fmt: skip
for name in ("uint16", "uint32", "uint64"):
    if hasattr(torch, name):
        STORED[getattr(torch, name)] = f"<u{int(name[4:]) // 8}"
for dtype in OPAQUE_DTYPES:
    width = torch.empty((), dtype=dtype).element_size()
    STORED.setdefault(dtype, f"{'|' if width == 1 else '<'}V{width}\0{dtype}")


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 0), (1, 1, 1, 7), (257,)], ids=str)
def test_a_tensor_of_any_dtype_and_shape_comes_back_to_the_bit(dtype, shape):
    value = tensor(shape, dtype)
    data = state_dict_bytes({"a": value})
    for options in ({}, {"lazy_load": True}, {"verify_hash": True}):
        found = load(io.BytesIO(data), **options)
        assert_same(found, {"a": value})
        assert found["a"].requires_grad == (dtype.is_floating_point or dtype.is_complex)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_a_dtype_is_stored_as_the_format_document_says(dtype):
    (record,) = fmt.read_file(state_dict_bytes({"a": tensor((2,), dtype)})).records
    assert record.header.dtype == STORED[dtype]
    assert record.entry.dtype == STORED[dtype]
    assert record.payload == samples.raw(tensor((2,), dtype))


MANY = [(*[1] * (ndim - 1), 3) for ndim in (5, 25, 64)]
LONG = [(1 << 32, 0), (0, 1 << 33), ((1 << 32) - 1, 0), (0, 1 << 40, 2)]


@pytest.mark.parametrize("shape", [*MANY, *LONG], ids=lambda shape: str(shape[:3]) + f" of {len(shape)}")
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16], ids=str)
def test_many_and_long_dimensions_come_back(shape, dtype):
    values = {"odd": tensor(shape, dtype), "short": tensor()}
    assert_same(load(io.BytesIO(state_dict_bytes(values)), verify_hash=True), values)


def one_tensor(dtype: str, shape=(2,), data=bytes(range(1, 17)), **options) -> io.BytesIO:
    item = fmt.itemsize(dtype)
    count = 1
    for dimension in shape:
        count *= dimension
    return io.BytesIO(fmt.write_file([fmt.Tensor(("a",), dtype, shape, data[: count * item])], **options))


SPELLINGS = [
    ("<V2\0torch.uint16", "uint16"),
    ("<V4\0torch.uint32", "uint32"),
    ("<V8\0torch.uint64", "uint64"),
    ("<V4\0torch.chalf", "complex32"),
    ("<V2\0torch.float16", "float16"),
    ("<V2\0torch.half", "float16"),
    ("<V8\0torch.double", "float64"),
    ("|V1\0torch.bool", "bool"),
    ("<f4\0torch.anything", "float32"),
    ("<i2\0", "int16"),
    ("<V2\0torch.bfloat16", "bfloat16"),
    ("|u1", "uint8"),
    ("<u8", "uint64"),
]


# torch 2.1 and 2.2 have none of the wider unsigned integers
@pytest.mark.parametrize(
    ("stored", "dtype"), [(stored, getattr(torch, name)) for stored, name in SPELLINGS if hasattr(torch, name)]
)
def test_spellings_of_other_writers_are_understood(stored, dtype):
    for version in (1, 2):
        found = load(one_tensor(stored, data=bytes([1, 0] * 8), version=version), verify_hash=True)["a"]
        assert found.dtype == dtype
        assert samples.raw(found) == bytes([1, 0] * 8)[: found.nbytes]


@pytest.mark.parametrize(
    "stored",
    [
        "<V2", "<V2\0", "<V2\0bfloat16", "<V2\0torch.", "<V2\0torch.no_such_dtype", "<V2\0torch.nn",
        "<V2\0torch.Tensor", "<V2\0torch.float32",
        "<V4\0torch.bfloat16",
        "<V2\0torch.nn.functional", "<V2\0torch.__name__", "<V16\0torch.complex128x", "<V2\0torch.bfloat16 ",
    ],
    ids=ascii,
)  # fmt: skip
def test_an_opaque_dtype_that_does_not_resolve_is_refused(stored):
    with pytest.raises(errors.FormatError):
        load(one_tensor(stored, version=2))


def raw_dtype_file(stored: bytes) -> io.BytesIO:
    """A file whose dtype field holds any bytes."""
    data = fmt.write_file([fmt.Tensor(("a",), "<f4", (1,), bytes(4), hashes=())], index_nbytes=200)
    file = fmt.read_file(data)
    (record,) = file.records
    header = record.header.raw.replace(b"\3<f4", bytes([len(stored)]) + stored)
    header = len(header).to_bytes(8, "little") + header[8:]
    at = record.entry.offset
    entry = fmt.encode_entry(fmt.Tensor(("a",), "<f4", (1,), bytes(4)), at, at + len(header))
    entry = entry.replace(b"\3<f4", bytes([len(stored)]) + stored)
    return io.BytesIO(data[: fmt.PROLOGUE_NBYTES] + entry.ljust(200, b"\0") + header + bytes(12))


@pytest.mark.parametrize(
    "stored",
    [
        b"", b"<", b"<f0", b"<f3", b"<f-4", b"<f4x", b"<x4", b"?4", b"<f99999999999999999999", b"\xff\xff", b"<U4",
        b"|S4", b"|O8", b"<M8[s]", b"<m8", b"<f16", b"<i16", b"<b1x", b"<c4", b"4f", b"<f4,<f4", b"\0torch.float32",
        b"<f2\0\0", b"<V2\0torch.bfloat16\0", b"<V2\0torch.bfloat16\0torch.bfloat16",
    ],
    ids=ascii,
)  # fmt: skip
def test_what_is_no_dtype_is_refused(stored):
    with pytest.raises(errors.FormatError):
        load(raw_dtype_file(stored))


@pytest.mark.parametrize(("stored", "dtype"), [(">f4", torch.float32), (">i4", torch.int32), (">c8", torch.complex64)])
def test_big_endian_data_is_swapped_or_refused_but_never_misread(stored, dtype):
    value = torch.tensor([1, 2]).to(dtype)
    width = 4
    swapped = b"".join(samples.raw(value)[i : i + width][::-1] for i in range(0, value.nbytes, width))
    try:
        found = load(one_tensor(stored, data=swapped))["a"]
    except errors.FormatError:
        return
    assert samples.same(found, value)


def test_surplus_payload_is_ignored_and_verified():
    tensors = [fmt.Tensor(("a",), "<f4", (2,), bytes(range(20))), fmt.Tensor(("b",), "<f4", (1,), b"abcd")]
    data = bytearray(fmt.write_file(tensors))
    found = load(io.BytesIO(data), verify_hash=True)
    assert samples.raw(found["a"]) == bytes(range(8))
    assert samples.raw(found["b"]) == b"abcd"
    assert found["a"].untyped_storage().nbytes() == 8
    record = fmt.read_file(bytes(data)).records[0]
    data[record.entry.data_offset + 19] ^= 1  # in the surplus
    with pytest.raises(errors.HashMismatchError):
        load(io.BytesIO(data), verify_hash=True)


def test_tensors_without_data_come_back_as_zeros_whatever_the_version_says():
    tensors = [
        fmt.Tensor(("m",), "<f4", (2, 3), None),
        fmt.Tensor(("half",), "<V2\0torch.bfloat16", (4,), None),
        fmt.Tensor(("spared",), "<V2\0torch.bfloat16", (4,), None, index_dtype="<V2"),
        fmt.Tensor(("scalar",), "<i8", (), None),
        fmt.Tensor(("empty",), "<V2\0torch.bfloat16", (0,), b""),
        fmt.Tensor(("empty spared",), "<V2\0torch.bfloat16", (0,), b"", index_dtype="<V2"),
    ]
    wanted = {
        "m": torch.zeros(2, 3),
        "half": torch.zeros(4, dtype=torch.bfloat16),
        "spared": torch.zeros(4, dtype=torch.bfloat16),
        "scalar": torch.zeros((), dtype=torch.int64),
        "empty": torch.zeros(0, dtype=torch.bfloat16),
        "empty spared": torch.zeros(0, dtype=torch.bfloat16),
    }
    for version in (1, 2, 4, 5):
        data = fmt.write_file(tensors, version=version, flags=0)
        for lazy_load in (False, True):
            assert_same(load(io.BytesIO(data), verify_hash=True, lazy_load=lazy_load), wanted)


def test_the_dtypes_of_numpy_reads_are_the_stored_ones():
    values = {str(dtype): tensor((3,), dtype) for dtype in ALL_DTYPES}
    with TensorDeserializer(io.BytesIO(state_dict_bytes(values)), device="cpu", lazy_load=True) as deserializer:
        found = {item[2]: item[3:] for item in deserializer.read_numpy_arrays(allow_raw_data=True)}
    for dtype in ALL_DTYPES:
        array, is_opaque, torch_dtype = found[str(dtype)]
        assert array.tobytes() == samples.raw(values[str(dtype)])
        assert (is_opaque, torch_dtype) == ((False, None) if dtype in NUMPY_DTYPES else (True, str(dtype)))
        assert array.dtype.kind == ("i" if is_opaque else STORED[dtype][1])


def test_nan_payloads_and_signed_zeros_survive_a_conversion_free_load():
    bits = torch.tensor([0x7FC00001, -0x00400001, 0x7F800001, -0x80000000, 1], dtype=torch.int32)
    found = load(io.BytesIO(state_dict_bytes({"a": bits.view(torch.float32)})))["a"]
    assert torch.equal(found.detach().view(torch.int32), bits)


def test_an_opaque_dtype_in_foreign_byte_order_is_refused():
    with pytest.raises(errors.FormatError, match="byte order"):
        load(raw_dtype_file(b">V2\0torch.bfloat16"))
