"""TensorSerializer: the constructor, the three write methods, counters, lifetime, and the bytes that come out."""

from __future__ import annotations

import gc
import inspect
import io
import logging
import struct
import warnings
import weakref

import numpy as np
import pytest
import reference_format as fmt
import samples
import torch
from samples import WRONG_ANSWERS, Wrapper, assert_released, assert_same, load, state_dict_bytes, tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tensorizer import TensorDeserializer, TensorSerializer, TensorType, serialization


def alignment(nbytes: int) -> int:
    """The alignment that payloads of this project have (docs/format.md)."""
    return 4096 if nbytes >= 256 * 1024 else 64


# --- constructor ----------------------------------------------------------------------------------------------------


def test_the_signature_keeps_the_positional_order_keywords_and_defaults():
    parameters = list(inspect.signature(TensorSerializer.__init__).parameters.values())[1:]
    assert [p.name for p in parameters[:2]] == ["file_obj", "compress_tensors"]
    assert parameters[0].default is inspect.Parameter.empty
    assert parameters[1].default is False
    keywords = {p.name: p for p in parameters[2:]}
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in keywords.values())
    assert all(p.default is not inspect.Parameter.empty for p in keywords.values())
    assert keywords["encryption"].default is None
    assert keywords["limit_cpu_concurrency"].default is None
    assert keywords["fsync"].default is True
    assert {"hashes", "fsync"} <= set(keywords)


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ("write_module", ["m", "remove_tensors", "include_non_persistent_buffers"]),
        ("write_state_dict", ["state_dict"]),
        ("write_tensor", ["idx", "name", "tensor_type", "tensor"]),
        ("close", []),
    ],
)
def test_the_methods_keep_their_parameters(method, names):
    parameters = inspect.signature(getattr(TensorSerializer, method)).parameters
    assert list(parameters)[1 : len(names) + 1] == names
    if method == "write_module":
        assert parameters["remove_tensors"].default is False
        assert parameters["include_non_persistent_buffers"].default is True
        assert parameters["include_non_persistent_buffers"].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"limit_cpu_concurrency": 0}, ValueError),
        ({"limit_cpu_concurrency": -1}, ValueError),
        ({"limit_cpu_concurrency": 1.5}, TypeError),
        ({"limit_cpu_concurrency": "2"}, TypeError),
        ({"encryption": b"k" * 32}, TypeError),
        ({"encryption": "key"}, TypeError),
        ({"hashes": "md5"}, ValueError),
        ({"hashes": ("crc32", "md5")}, ValueError),
        ({"hashes": 7}, TypeError),
        ({"colour": "red"}, TypeError),
        ({"ties": "thrice"}, ValueError),
        ({"ties": None}, ValueError),
        ({"metadata": [("a", "b")]}, TypeError),
        ({"metadata": {"a": 1}}, TypeError),
        ({"metadata": {1: "a"}}, TypeError),
        ({"metadata": {"a": "\ud800"}}, ValueError),
    ],
    ids=ascii,
)
def test_a_bad_argument_is_refused_before_anything_is_touched(tmp_path, options, error):
    old = tmp_path / "old.tensors"
    old.write_bytes(b"old content")
    for target in (old, tmp_path / "new" / "file.tensors"):
        with pytest.raises(error):
            TensorSerializer(target, **options)
    assert old.read_bytes() == b"old content"
    assert samples.temporary_leftovers(tmp_path, "old.tensors") == []
    stream = io.BytesIO(b"old content")
    with pytest.raises(error):
        TensorSerializer(stream, **options)
    assert stream.getvalue() == b"old content"


def test_compression_is_accepted_and_changes_nothing():
    data = {"a": tensor(), "b": tensor((5,), torch.int64)}
    assert state_dict_bytes(data, compress_tensors=True) == state_dict_bytes(data)
    with TensorSerializer(io.BytesIO(), True) as serializer:
        assert serializer.compress_tensors is True
        assert serializer.total_compressed_tensor_bytes == 0


@pytest.mark.parametrize(("limit", "in_force"), [(1, 1), (10**30, 10**30), (None, serialization.cpu_count)])
def test_cpu_limit_holds_the_limit_in_force(limit, in_force):
    with TensorSerializer(io.BytesIO(), limit_cpu_concurrency=limit) as serializer:
        assert serializer.cpu_limit == in_force >= 1
        serializer.write_state_dict({"a": tensor()})


# --- what comes out -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state_dict", "version", "flags"),
    [
        ({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.int8)}, 1, 0),
        ({"a": torch.ones(2, dtype=torch.bfloat16)}, 2, 0),
        ({"a": torch.ones(2, device="meta")}, 4, 0),
        ({"a": torch.ones(2, device="meta", dtype=torch.bfloat16)}, 4, 0),
        ({"a": torch.ones(2, device="meta"), "b": torch.ones(3)}, 4, 0),
        ({"a": torch.empty((1 << 32, 0)), "b": torch.ones(3)}, 5, 2),
        ({"a": torch.empty(((1 << 32) - 1, 0)), "b": torch.ones(3)}, 1, 0),
        ({"layers": [{"w": torch.ones(2)}]}, 1, 0),
    ],
    ids=["plain", "opaque", "meta", "opaque meta", "meta and plain", "long", "nearly long", "nested"],
)
def test_the_lowest_data_version_that_can_hold_the_content_is_written(state_dict, version, flags):
    file = fmt.read_file(state_dict_bytes(state_dict))
    assert (file.version, file.flags) == (version, flags)


def test_the_bytes_are_those_the_format_document_prescribes():
    nested = {
        "plain": tensor((3, 5)),
        "empty": torch.empty((0, 4), dtype=torch.int16),
        "scalar": tensor((), torch.float64),
        "half": tensor((7,), torch.bfloat16),
        "list": [tensor((2, 2), torch.bool), {"é": tensor((9,), torch.uint8)}],
        "large": tensor((300, 300)),
    }
    data = state_dict_bytes(nested)
    file = fmt.read_file(data)
    assert fmt.rewrite(file) == data
    assert file.tensor_size == sum(len(record.payload) for record in file.records)
    assert file.reserved == bytes(8)
    assert file.index_slack.strip(b"\0") == b""
    assert data[-8:] == bytes(8)
    assert all(record.hashes_hold() for record in file.records)
    assert [[kind for kind, _ in record.header.hashes] for record in file.records] == [[0, 1]] * len(file.records)


def test_records_are_contiguous_in_index_order_and_directly_behind_the_index():
    file = fmt.read_file(state_dict_bytes({str(i): tensor((i,), seed=i) for i in range(40)}))
    at = fmt.PROLOGUE_NBYTES + file.index_nbytes
    for record in file.records:
        assert record.entry.offset == at
        assert record.entry.data_offset == at + record.header.nbytes
        at += record.header.nbytes + len(record.payload)


@pytest.mark.parametrize("nbytes", [1, 63, 64, 1000, 256 * 1024 - 1, 256 * 1024, 256 * 1024 + 1, 1 << 20])
def test_payloads_are_aligned_by_padding_of_the_record_header(nbytes):
    file = fmt.read_file(state_dict_bytes({"a": tensor((5,)), "b": tensor((nbytes,), torch.uint8), "c": tensor((3,))}))
    for record in file.records:
        wanted = alignment(len(record.payload))
        assert record.entry.data_offset % wanted == 0
        assert len(record.header.padding) < wanted
        assert record.header.padding.strip(b"\0") == b""


def test_output_is_deterministic_and_does_not_depend_on_the_target(tmp_path):
    model = samples.net()
    first = samples.write_module(samples.KeptBytesIO(), model).getvalue()
    assert samples.write_module(samples.KeptBytesIO(), model).getvalue() == first
    assert samples.write_module(tmp_path / "a", model).read_bytes() == first
    with (tmp_path / "b").open("wb+", buffering=0) as stream:
        samples.write_module(stream, model, options={"limit_cpu_concurrency": 1})
    assert (tmp_path / "b").read_bytes() == first


# --- write_tensor ---------------------------------------------------------------------------------------------------


def test_write_tensor_records_index_name_and_type(tmp_path):
    with TensorSerializer(tmp_path / "f") as serializer:
        wanted = [
            (0, "a", TensorType.PARAM, tensor(seed=1)),
            (65535, "b.c", TensorType.BUFFER, tensor((2,), torch.int64)),
            (7, "d", TensorType.STATE_DICT, tensor((), torch.bfloat16)),
        ]
        for idx, name, kind, value in wanted:
            assert serializer.write_tensor(idx, name, kind, value) is None
        serializer.write_tensor(idx=1, name="last", tensor_type=TensorType.PARAM, tensor=tensor(seed=2))
    with TensorDeserializer(tmp_path / "f", device="cpu") as deserializer:
        found = list(deserializer.read_tensors())
    assert [item[:3] for item in found] == [
        *[(idx, kind, name) for idx, name, kind, _ in wanted],
        (1, TensorType.PARAM, "last"),
    ]
    assert all(samples.same(one[3], other[3]) for one, other in zip(found, wanted))


def test_numbers_of_numpy_are_numbers():
    stream = samples.KeptBytesIO()
    with TensorSerializer(stream) as serializer:
        serializer.write_tensor(np.int64(7), "a", TensorType.PARAM, np.float32(2.5))
    stream.seek(0)
    ((idx, _, _, value),) = TensorDeserializer(stream, device="cpu").read_tensors()
    assert (idx, value.dtype, value.shape, value.item()) == (7, torch.float32, (), 2.5)


OUT_OF_RANGE, NO_PATH = (ValueError, struct.error), (TypeError, ValueError)
WRONG_CALLS = [
    *((OUT_OF_RANGE, idx, "a", TensorType.PARAM, torch.ones(1)) for idx in (-1, 65536, 1 << 40)),
    *((TypeError, 0, name, TensorType.STATE_DICT, torch.ones(1)) for name in (b"a", None, 3, ["a"])),
    *(
        (NO_PATH, 0, ("a", *part), TensorType.STATE_DICT, torch.ones(1))
        for part in ([-1], [1.5], [None], [True], [b"b"])
    ),
    (NO_PATH, 0, (), TensorType.STATE_DICT, torch.ones(1)),
    *((NO_PATH, 0, ("a", 0), kind, torch.ones(1)) for kind in (TensorType.PARAM, TensorType.BUFFER)),
    *((TypeError, 0, "a", TensorType.PARAM, value) for value in (None, 1.0, [1.0], "x")),
]


@pytest.mark.parametrize(
    ("error", "arguments"), [(error, arguments) for error, *arguments in WRONG_CALLS], ids=lambda value: str(value)[:40]
)
def test_write_tensor_refuses_an_argument_that_the_format_cannot_hold(error, arguments):
    with TensorSerializer(io.BytesIO()) as serializer, pytest.raises(error):
        serializer.write_tensor(*arguments)


def test_write_tensor_takes_a_path_as_read_tensors_yields_it():
    structure = {"layers": [tensor(seed=1), {"w": tensor(seed=2)}], "x": tensor(seed=3)}
    copy = samples.KeptBytesIO()
    deserializer = TensorDeserializer(io.BytesIO(state_dict_bytes(structure)), device="cpu")
    with TensorSerializer(copy) as serializer:
        for idx, kind, name, value in deserializer.read_tensors():
            serializer.write_tensor(idx, name, kind, value)
    assert_same(load(io.BytesIO(copy.getvalue())), structure)


NUMPY_ARRAYS = [
    np.arange(12, dtype=np.float32).reshape(3, 4),
    np.arange(12, dtype=np.int64).reshape(3, 4).T,
    *([np.arange(24, dtype=np.uint16)[::2]] if hasattr(torch, "uint16") else []),  # torch 2.3 and later
    np.asfortranarray(np.arange(6, dtype=np.complex128).reshape(2, 3)),
    np.array(3.5),
    np.array([True, False]),
    np.zeros((0, 3), dtype=np.float16),
    np.arange(10, dtype=np.uint8)[::-1],
]


@pytest.mark.parametrize("array", NUMPY_ARRAYS, ids=lambda a: f"{a.dtype}{a.shape}")
def test_an_array_is_stored_like_the_tensor_with_equal_contents(array):
    array.setflags(write=False)
    targets = samples.KeptBytesIO(), samples.KeptBytesIO()
    for target, value in zip(targets, (array, torch.from_numpy(array.copy(order="C")))):
        with TensorSerializer(target) as serializer:
            serializer.write_tensor(0, "a", TensorType.STATE_DICT, value)
    assert targets[0].getvalue() == targets[1].getvalue()


@pytest.mark.parametrize(
    ("array", "error"),
    [
        (np.arange(3, dtype=">f4"), ValueError),
        (np.arange(3, dtype=">i8"), ValueError),
        (np.array([object()]), TypeError),
        (np.array(["text"]), TypeError),
        (np.array(["2020-01-01"], dtype="datetime64[D]"), TypeError),
        (np.zeros(2, dtype=np.longdouble), TypeError),
        (np.zeros(2, dtype=[("x", "f4")]), TypeError),
    ],
    ids=lambda value: str(getattr(value, "dtype", "")),
)
def test_an_array_that_torch_cannot_adopt_is_refused(array, error):
    with TensorSerializer(io.BytesIO()) as serializer, pytest.raises(error):
        serializer.write_tensor(0, "a", TensorType.STATE_DICT, array)


# --- tensors of every layout ----------------------------------------------------------------------------------------


def layouts():
    base = tensor((6, 8))
    yield "transposed", base.t()
    yield "strided", base[::2, 1::3]
    yield "slice of a row", base[2, 3:7]
    yield "expanded", base[:1].expand(5, 8)
    yield "offset view", base.flatten()[3:40]
    yield "permuted", tensor((2, 3, 4), torch.int16).permute(2, 0, 1)
    yield "channels last", tensor((2, 3, 4, 5), torch.float16).to(memory_format=torch.channels_last)
    yield "conjugate", torch.view_as_complex(tensor((4, 2))).conj()
    yield "negative", torch.view_as_complex(torch.rand(4, 2)).conj().imag
    yield "requires grad", torch.ones(3, requires_grad=True)
    yield "inside a graph", torch.ones(3, requires_grad=True) * 2
    yield "parameter", torch.nn.Parameter(tensor((3,)))


LAYOUTS = dict(layouts())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_of_any_strided_layout_is_stored_in_c_order(layout):
    value = LAYOUTS[layout]
    wanted = value.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    found = load(io.BytesIO(state_dict_bytes({"a": value})))["a"]
    assert samples.same(found, wanted)


@pytest.mark.parametrize("dtype", samples.ALL_DTYPES, ids=str)
def test_a_transposed_tensor_of_any_dtype_is_stored_in_c_order(dtype):
    value = tensor((3, 4), dtype)
    wanted = bytearray()
    width = value.element_size()
    data = samples.raw(value)
    for column in range(4):
        for row in range(3):
            wanted += data[(row * 4 + column) * width :][:width]
    found = load(io.BytesIO(state_dict_bytes({"a": value.t()})))["a"]
    assert (found.dtype, found.shape, samples.raw(found)) == (dtype, (4, 3), bytes(wanted))


def quantized(dtype):
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, dtype)


def fake():
    with FakeTensorMode():
        return torch.empty(3)


def with_storage_of(nbytes, value=None):
    value = torch.ones(1000) if value is None else value
    value.untyped_storage().resize_(nbytes)
    return value


UNSUPPORTED = {
    "wrapper": (lambda: Wrapper(torch.ones(3)), RuntimeError),
    "fake": (fake, RuntimeError),
    "storage resized to nothing": (lambda: with_storage_of(0), RuntimeError),
    "storage resized to less": (lambda: with_storage_of(3999), RuntimeError),
    "view of a storage resized to less": (lambda: with_storage_of(3999, torch.ones(10, 100).t()), RuntimeError),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), RuntimeError),
    "sparse": (lambda: torch.eye(3).to_sparse(), RuntimeError),
    "sparse rows": (lambda: torch.eye(3).to_sparse_csr(), RuntimeError),
    "qint8": (lambda: quantized(torch.qint8), NotImplementedError),
    "quint8": (lambda: quantized(torch.quint8), NotImplementedError),
    "qint32": (lambda: quantized(torch.qint32), NotImplementedError),
    "uninitialized": (lambda: torch.nn.LazyLinear(2).weight, ValueError),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_a_tensor_that_the_format_cannot_hold_is_refused_by_every_method(kind):
    make, error = UNSUPPORTED[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces the end of quantized tensors
        value = make()
    with TensorSerializer(io.BytesIO()) as serializer:
        with pytest.raises(error, match=r"tensor 'a'.* cannot be stored"):
            serializer.write_state_dict({"fine": torch.ones(2), "a": value})
        with pytest.raises(error, match=r"tensor 'b'.* cannot be stored"):
            serializer.write_tensor(0, "b", TensorType.PARAM, value)


def test_the_callers_tensors_are_not_touched():
    values = {name: value.detach().clone() for name, value in LAYOUTS.items() if not value.is_conj()}
    values["large"] = tensor((1 << 20,), torch.uint8)
    before = {name: (samples.raw(value), value.data_ptr(), value._version) for name, value in values.items()}
    state_dict_bytes(values)
    assert {name: (samples.raw(value), value.data_ptr(), value._version) for name, value in values.items()} == before


def test_tied_tensors_are_written_once_per_name():
    shared = tensor((100,))
    data = state_dict_bytes({"a": shared, "b": shared, "c": shared[:50]})
    assert [len(record.payload) for record in fmt.read_file(data).records] == [400, 400, 200]
    found = load(io.BytesIO(data))
    assert found["a"] is found["b"]
    found["a"].data.zero_()
    assert samples.same(found["c"], shared[:50])


def test_meta_tensors_carry_no_data_and_come_back_as_zeros():
    values = {
        "matrix": torch.empty((3, 4), device="meta"),
        "half": torch.empty((5,), device="meta", dtype=torch.bfloat16),
        "scalar": torch.empty((), device="meta", dtype=torch.int64),
        "half scalar": torch.empty((), device="meta", dtype=torch.bfloat16),
        "empty": torch.empty((0, 2), device="meta"),
        "long": torch.empty((1 << 40,), device="meta", dtype=torch.int8)[:7],
        "real": tensor((2,)),
    }
    data = state_dict_bytes(values)
    wanted = {k: torch.zeros(v.shape, dtype=v.dtype) if v.is_meta else v for k, v in values.items()}
    assert_same(load(io.BytesIO(data), verify_hash=True), wanted)
    file = fmt.read_file(data)
    assert all(record.hashes_hold() for record in file.records)
    assert sum(len(record.payload) for record in file.records) < 100


def test_empty_tensors_of_any_dtype_round_trip():
    values = {str(dtype): torch.empty((0, 3), dtype=dtype) for dtype in samples.ALL_DTYPES}
    data = state_dict_bytes(values)
    assert_same(load(io.BytesIO(data), verify_hash=True), values)
    # older readers choke on a full opaque dtype in the index entry of a tensor without data (docs/format.md)
    for record in fmt.read_file(data).records:
        assert "\0" not in record.entry.dtype


# --- several calls --------------------------------------------------------------------------------------------------


def test_methods_may_be_mixed_and_repeated(tmp_path):
    path = tmp_path / "mixed.tensors"
    model = samples.net()
    with TensorSerializer(path) as serializer:
        serializer.write_tensor(3, "first", TensorType.PARAM, tensor((2,)))
        serializer.write_module(model)
        serializer.write_state_dict({"sd.a": tensor((4,), torch.bfloat16)})
        serializer.write_tensor(4, "second", TensorType.STATE_DICT, np.arange(5))
        serializer.write_state_dict({"sd.b": {"deep": [tensor((1,))]}})
    with TensorDeserializer(path, device="cpu", verify_hash=True) as deserializer:
        names = [name for _, _, name, _ in deserializer.read_tensors()]
    middle = samples.module_names(model)
    assert names == ["first", *middle, "sd.a", "second", ("sd.b", "deep", 0)]
    file = fmt.read_file(path.read_bytes())
    assert file.version == 2
    assert fmt.rewrite(file) == path.read_bytes()


def test_after_each_call_the_file_is_complete_and_readable_by_another_handle(tmp_path):
    path = tmp_path / "f.tensors"
    wanted = {}
    with TensorSerializer(path) as serializer:
        for step in range(5):
            part = {f"{step}.{i}": tensor((i + 1,), seed=(step, i)) for i in range(3)}
            serializer.write_state_dict(part)
            wanted.update(part)
            assert_same(load(path, verify_hash=True), wanted)
            assert fmt.rewrite(fmt.read_file(path.read_bytes())) == path.read_bytes()
    assert_same(load(path), wanted)


def test_twenty_thousand_tensors_in_one_call_just_work(tmp_path):
    values = {f"model.layers.{i}.some.long.parameter.name.weight": torch.full((1,), i) for i in range(20_000)}
    path = samples.write_state_dict(tmp_path / "many", values, fsync=False)
    with TensorDeserializer(path, device="cpu") as deserializer:
        assert list(deserializer) == list(values)
        assert [int(value) for value in deserializer.values()] == list(range(20_000))


@pytest.mark.parametrize("target", ["path", "file", "memory"])
def test_later_calls_may_outgrow_the_room_of_the_index(tmp_path, target):
    path, memory = tmp_path / "grows", samples.KeptBytesIO()
    serializer = TensorSerializer(
        {"path": lambda: path, "file": lambda: path.open("wb+"), "memory": lambda: memory}[target](), fsync=False
    )
    wanted = {}
    for step in range(4):
        part = {f"{step}/{i}/{'n' * 100}": torch.full((2,), 1000 * step + i) for i in range(3000)}
        serializer.write_state_dict(part)
        wanted.update(part)
        data = memory.getvalue() if target == "memory" else path.read_bytes()
        assert_same(load(io.BytesIO(data), verify_hash=step == 3), wanted)
    serializer.close()
    assert list(fmt.read_file(data).contents()) == [(name,) for name in wanted]


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
def test_a_reader_of_a_file_that_is_laid_out_anew_goes_on_reading_the_earlier_one(tmp_path, mmap):
    count, path = 6000, tmp_path / "f"
    first = {"a": tensor((5000,), seed=1), "b": tensor((70_000,), torch.uint8, seed=2)}
    serializer = TensorSerializer(path, fsync=False)
    serializer.write_state_dict(first)
    with TensorDeserializer(path, device="cpu", lazy_load=True, verify_hash=True, mmap=mmap) as earlier:
        serializer.write_state_dict({f"{i}.{'n' * 100}": torch.zeros(1) for i in range(count)})
        serializer.close()
        assert_same(earlier.tree(), first)
    assert len(load(path, verify_hash=True)) == 2 + count


def test_a_long_dimension_may_come_in_a_later_call(tmp_path):
    path = tmp_path / "f"
    with TensorSerializer(path) as serializer:
        serializer.write_state_dict({"a": tensor((3,)), "b": tensor((2, 2))})
        assert fmt.read_file(path.read_bytes()).version == 1
        serializer.write_state_dict({"long": torch.empty((1 << 33, 0), dtype=torch.int8)})
        serializer.write_state_dict({"c": tensor((5,), torch.bfloat16)})
    file = fmt.read_file(path.read_bytes())
    assert (file.version, file.flags) == (5, 2)
    assert [record.entry.version for record in file.records] == [1, 1, 5, 1]
    assert fmt.rewrite(file) == path.read_bytes()
    assert load(path)["long"].shape == (1 << 33, 0)


def test_a_failed_call_leaves_the_last_complete_content_readable(tmp_path):
    path = tmp_path / "f"
    with TensorSerializer(path) as serializer:
        serializer.write_state_dict({"a": tensor()})
        before = path.read_bytes()
        for error, refused in (
            (ValueError, {"b": tensor(seed=1), "a": tensor(seed=2)}),
            (TypeError, {"b": tensor(), "c": 3.0}),
        ):
            with pytest.raises(error):
                serializer.write_state_dict(refused)
            assert path.read_bytes() == before  # it is found before anything is written
            assert serializer.total_tensor_bytes == tensor().nbytes
    assert_same(load(path, verify_hash=True), {"a": tensor()})


# --- counters and lifetime ------------------------------------------------------------------------------------------


def test_total_tensor_bytes_counts_what_was_written_and_stays_readable():
    serializer = TensorSerializer(io.BytesIO())
    assert serializer.total_tensor_bytes == 0
    serializer.write_state_dict({"a": torch.ones(10), "m": torch.ones(5, device="meta")})
    assert serializer.total_tensor_bytes == 40
    serializer.write_tensor(0, "b", TensorType.PARAM, torch.ones(3, dtype=torch.int8))
    assert serializer.total_tensor_bytes == 43
    serializer.close()
    assert serializer.total_tensor_bytes == 43
    with pytest.raises(AttributeError):
        serializer.total_tensor_bytes = 1


def test_a_with_block_closes_the_serializer_and_writing_afterwards_is_refused(tmp_path):
    with TensorSerializer(tmp_path / "f") as serializer:
        assert isinstance(serializer, TensorSerializer)
        serializer.write_state_dict({"a": tensor()})
    serializer.close()  # once more is harmless
    for write in (
        lambda: serializer.write_state_dict({"b": tensor()}),
        lambda: serializer.write_tensor(0, "b", TensorType.PARAM, tensor()),
        lambda: serializer.write_module(torch.nn.Linear(1, 1)),
    ):
        with pytest.raises(ValueError):
            write()
    assert_same(load(tmp_path / "f"), {"a": tensor()})


def test_close_calls_the_close_of_the_callers_object_as_an_attribute(tmp_path):
    calls = []
    kept = samples.KeptBytesIO()
    kept.close = lambda: calls.append("closed")
    serializer = TensorSerializer(kept)
    serializer.write_state_dict({"a": tensor()})
    assert calls == []
    serializer.close()
    assert calls == ["closed"]
    with (tmp_path / "f").open("wb+") as stream:
        samples.write_state_dict(stream, {"a": tensor()})
        assert stream.closed  # and the with block closes it once more, harmlessly
    assert_same(load(tmp_path / "f"), {"a": tensor()})


def drop(serializers) -> None:
    alive = weakref.ref(serializers[0])
    serializers.clear()  # as an argument it would live on in the caller, up to Python 3.10
    gc.collect()
    assert alive() is None


def end(path, how, calls) -> None:
    """Writes as many calls, and ends with an exception in a ``with`` block or without a word."""
    serializers = [TensorSerializer(path)]
    for call in calls:
        serializers[0].write_state_dict(call)
    if how == "exception":
        with pytest.raises(ZeroDivisionError), serializers[0] as serializer:
            raise ZeroDivisionError
        with pytest.raises(ValueError):
            serializer.write_state_dict({"b": tensor()})
    else:
        drop(serializers)


@pytest.mark.parametrize("how", ["exception", "dropped"])
def test_a_serializer_that_is_not_closed_loses_nothing_and_leaves_the_old_file_before_any_write(
    tmp_path, how, leaves_no_descriptors
):
    path = tmp_path / "f"
    path.write_bytes(b"old content")
    end(path, how, [])
    end(tmp_path / "new", how, [])
    assert path.read_bytes() == b"old content"
    assert samples.temporary_leftovers(tmp_path, "f") == []
    end(path, how, [{"a": tensor()}])
    assert_same(load(path, verify_hash=True), {"a": tensor()})
    assert samples.temporary_leftovers(tmp_path, "f") == []


def test_the_tensors_are_kept_alive_neither_by_the_serializer_nor_by_its_log(caplog):
    caplog.set_level(logging.DEBUG, "tensorizer")  # records are kept, and with them their arguments
    value = tensor((1000,))
    alive = weakref.ref(value)
    with TensorSerializer(io.BytesIO()) as serializer:
        serializer.write_tensor(0, "a", TensorType.PARAM, value)
        serializer.write_state_dict({"b": value})
        del value
        gc.collect()
        assert alive() is None


def test_an_empty_state_dict_writes_a_file_that_no_reader_opens(tmp_path):
    with pytest.raises(ValueError):
        load(samples.write_state_dict(tmp_path / "f", {}))


def test_what_is_written_is_logged_at_debug_and_nothing_above(caplog):
    with caplog.at_level(logging.DEBUG, logger="tensorizer"):
        data = state_dict_bytes({"some.name": tensor()})
        load(io.BytesIO(data))
    assert caplog.records
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}
    assert {record.name for record in caplog.records} == {"tensorizer.serialization"}
    assert any("some.name" in record.getMessage() for record in caplog.records)


def test_nothing_is_printed(capfd):
    data = state_dict_bytes({"a": tensor()})
    load(io.BytesIO(data), verify_hash=True)
    with pytest.raises(ValueError):
        load(io.BytesIO(b"no tensors"))
    assert capfd.readouterr() == ("", "")


class Handle(Wrapper):
    """A wrapper whose operations give plain tensors."""

    # Results of functions are what __torch_dispatch__ makes of them; torch 2.1 would make each a Handle of nothing.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*[arg.inner if isinstance(arg, Handle) else arg for arg in args], **(kwargs or {}))


@pytest.mark.parametrize("make", [lambda t: t, lambda t: t.t()], ids=["contiguous", "transposed"])
def test_a_wrapper_that_detaches_to_the_tensor_it_stands_for_is_written_as_that(make):
    inner = make(tensor((3, 5)))
    assert_same(load(io.BytesIO(state_dict_bytes({"a": Handle(inner)}))), {"a": inner.contiguous()})


class LentOut(io.BytesIO):
    """Keeps what it was given to write; answers what ``answer`` makes of the count."""

    def __init__(self, answer):
        super().__init__()
        self.kept, self.answer = [], answer

    def write(self, data):
        self.kept.append(data)
        return self.answer(super().write(data))


@pytest.mark.parametrize(
    ("answer", "error"), [*WRONG_ANSWERS.values(), (lambda n: None, OSError)], ids=[*WRONG_ANSWERS, "None"]
)
def test_a_write_that_answers_nonsense_or_fails_is_an_error_and_keeps_no_memory(answer, error):
    target = LentOut(answer)
    with pytest.raises(error):
        TensorSerializer(target).write_state_dict({"a": tensor((300, 300))})
    assert_released(target.kept)
