"""TensorDeserializer: mapping, lazy reading, filters, dtype, generators, counters, lifetime, mapped files."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import inspect
import io
import os
import re
import weakref
from collections.abc import Mapping

import numpy as np
import pytest
import reference_format as fmt
import samples
import torch
from samples import assert_same, load, state_dict_bytes, tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tensorizer
from tensorizer import _C, TensorDeserializer, TensorSerializer, TensorType, errors, serialization

VALUES = {
    "a": tensor((5, 3), seed=1),
    "b": tensor((7,), torch.int64),
    "c": tensor((), torch.bfloat16),
    "d": tensor((300, 300), torch.float16),
    "e": torch.empty((0, 3)),
    "f": tensor((4,), torch.bool),
}
DATA = state_dict_bytes(VALUES)
TOTAL = sum(value.nbytes for value in VALUES.values())


def open_data(data=DATA, **options):
    options.setdefault("device", "cpu")
    return TensorDeserializer(io.BytesIO(data), **options)


@pytest.fixture(params=["eager", "lazy", "mapped", "lazy mapped"])
def mode(request, tmp_path):
    """Opens bytes in each of the ways that must not differ to a caller."""

    def open_it(data=DATA, **options):
        options = {"device": "cpu", "lazy_load": "lazy" in request.param, **options}
        if "mapped" not in request.param:
            return TensorDeserializer(io.BytesIO(data), **options)
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.tensors"
        path.write_bytes(data)
        return TensorDeserializer(path, mmap=True, **options)

    return open_it


class CountingFile(io.BytesIO):
    """Remembers where and how much was read through ``readinto`` and ``read``."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.spans: list = []

    def readinto(self, buffer) -> int:
        at = self.tell()
        count = super().readinto(buffer)
        self.spans.append((at, at + count))
        return count

    def read(self, size=-1) -> bytes:
        at = self.tell()
        data = super().read(size)
        self.spans.append((at, at + len(data)))
        return data

    def touched(self, begin: int, end: int) -> bool:
        return any(a < end and b > begin for a, b in self.spans)


# --- constructor ----------------------------------------------------------------------------------------------------


def test_the_signature_keeps_the_positional_order_keywords_and_defaults():
    parameters = list(inspect.signature(TensorDeserializer.__init__).parameters.values())[1:]
    assert [p.name for p in parameters[:4]] == ["file_obj", "device", "filter_func", "dtype"]
    assert [p.default for p in parameters[1:4]] == [None, None, None]
    keywords = {p.name: p for p in parameters[4:]}
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in keywords.values())
    wanted = {
        "lazy_load": False,
        "plaid_mode": None,
        "plaid_mode_buffers": None,
        "num_readers": None,
        "verify_hash": None,
        "encryption": None,
        "mmap": False,
    }
    assert {name: keywords[name].default for name in wanted} == wanted
    assert all(p.default is not inspect.Parameter.empty for p in keywords.values())


@pytest.mark.parametrize(
    ("method", "names", "keywords"),
    [
        ("tree", ["prefix"], ["default", "filter_func"]),
        ("read_tensors", ["filter_func", "num_tensors", "verify_hash"], ["cache"]),
        ("read_numpy_arrays", ["filter_func", "num_tensors", "allow_raw_data", "verify_hash"], ["cache"]),
        ("load_into_module", ["m", "filter_func", "verify_hash"], []),
        ("verify_module", ["m"], []),
    ],
)
def test_the_methods_keep_their_parameters(method, names, keywords):
    parameters = inspect.signature(getattr(TensorDeserializer, method)).parameters
    assert list(parameters)[1 : 1 + len(names)] == names
    for keyword in keywords:
        assert parameters[keyword].kind is inspect.Parameter.KEYWORD_ONLY
    if "num_tensors" in names:
        assert parameters["num_tensors"].default == -1
        assert parameters["cache"].default is True


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_readers": 0}, ValueError),
        ({"num_readers": -3}, ValueError),
        ({"num_readers": 1.5}, TypeError),
        ({"num_readers": "2"}, TypeError),
        ({"encryption": b"k" * 32}, TypeError),
        ({"encryption": "password"}, TypeError),
        ({"device": "no such device"}, RuntimeError),
        ({"dtype": "flaot16"}, TypeError),
        ({"dtype": np.float16}, TypeError),
        ({"filter_func": torch.float16}, TypeError),
    ],
    ids=repr,
)
def test_a_bad_argument_is_refused_and_the_file_closed_if_it_was_opened(options, error):
    stream = io.BytesIO(DATA)
    with pytest.raises(error):
        TensorDeserializer(stream, **{"device": "cpu", **options})
    assert stream.closed or stream.tell() == 0
    assert stream.closed == bool({"num_readers", "dtype", "filter_func"} & options.keys())


def test_a_missing_file_is_reported_before_a_bad_number_of_readers(tmp_path):
    with pytest.raises(FileNotFoundError):
        TensorDeserializer(tmp_path / "none", device="cpu", num_readers=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_cuda_device_that_is_not_there_is_a_runtime_error_before_the_file_is_touched():
    stream = io.BytesIO(DATA)
    with pytest.raises(RuntimeError):
        TensorDeserializer(stream, device="cuda")
    assert not stream.closed
    assert stream.tell() == 0


@pytest.mark.parametrize("num_readers", [1, 2, 3, 1000, 2**32, 10**30, True])
def test_any_positive_number_of_readers_gives_the_same_tensors(tmp_path, num_readers):
    path = tmp_path / "f"
    path.write_bytes(DATA)
    assert_same(load(path, num_readers=num_readers), VALUES)


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "cpu:0"])
def test_the_device_may_be_given_in_any_form_torch_accepts(device):
    assert_same(load(io.BytesIO(DATA), device=device), VALUES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_default_device_without_an_accelerator_is_the_cpu_whatever_the_context_says():
    with torch.device("meta"), TensorDeserializer(io.BytesIO(DATA)) as deserializer:
        found = deserializer.tree()
    assert_same(found, VALUES)


def test_contexts_for_device_and_dtype_do_not_change_what_is_loaded(mode):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), mode() as deserializer:
            assert_same(deserializer.tree(), VALUES)
    finally:
        torch.set_default_dtype(before)


def test_the_meta_device_gives_meta_tensors_of_the_right_shape_and_dtype():
    found = load(io.BytesIO(DATA), device="meta")
    assert all(value.is_meta for value in found.values())
    assert {k: (v.shape, v.dtype) for k, v in found.items()} == {k: (v.shape, v.dtype) for k, v in VALUES.items()}


# --- mapping --------------------------------------------------------------------------------------------------------


def test_keys_length_and_membership(mode):
    with mode() as deserializer:
        assert list(deserializer.keys()) == list(VALUES)
        assert type(deserializer.keys()) is type({}.keys())
        assert list(deserializer) == list(VALUES)
        assert len(deserializer) == len(VALUES)
        assert bool(deserializer)
        assert "a" in deserializer
        for key in ("z", "", "a.b", ("a",), 0, None, b"a"):
            assert key not in deserializer
            with pytest.raises(KeyError):
                deserializer[key]


def test_it_is_a_mapping_and_a_context_manager_and_neither_hashable_nor_reversible():
    assert issubclass(TensorDeserializer, Mapping)
    assert issubclass(TensorDeserializer, contextlib.AbstractContextManager)
    assert TensorDeserializer is serialization.TensorDeserializer
    with open_data() as deserializer:
        for refused in (hash, reversed):
            with pytest.raises(TypeError):
                refused(deserializer)


def test_items_values_and_get_give_the_tensors(mode):
    with mode() as deserializer:
        assert_same(dict(deserializer.items()), VALUES)
        values = deserializer.values()
        for _ in range(2):
            assert all(samples.same(one, other) for one, other in zip(values, VALUES.values()))
        assert samples.same(deserializer.get("b"), VALUES["b"])
        assert deserializer.get("z") is None
        assert deserializer.get("z", 3) == 3


def test_values_are_parameters_that_require_grad_by_their_dtype_with_storages_of_their_own_size(mode):
    with mode() as deserializer:
        for name, wanted in VALUES.items():
            found = deserializer[name]
            assert type(found) is torch.nn.Parameter
            assert found.requires_grad == wanted.is_floating_point()
            assert found.is_contiguous()
            assert found.is_leaf
            assert found.storage_offset() == 0
            assert found.untyped_storage().nbytes() == wanted.nbytes
    buffer = io.BytesIO()
    torch.save(found, buffer)
    assert len(buffer.getvalue()) < 4096


def test_a_value_trains_and_is_copied_and_pickled_like_any_other_parameter(mode):
    with mode() as deserializer:
        found = deserializer["a"]
    assert not found._is_view()
    assert samples.same(found.detach().clone(), VALUES["a"])
    assert found.detach().numpy().ctypes.data == found.data_ptr()
    stream = io.BytesIO()
    torch.save(found, stream)
    stream.seek(0)
    assert samples.same(torch.load(stream), VALUES["a"])
    copied = copy.deepcopy(found)
    assert type(copied) is torch.nn.Parameter
    assert copied.requires_grad
    assert samples.same(copied, VALUES["a"])
    with torch.no_grad():
        found.copy_(torch.arange(15.0).reshape(5, 3))
    module = torch.nn.ParameterList([found])
    assert [name for name, _ in module.named_parameters()] == ["0"]
    (found.float() * 2).sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.5).step()
    assert torch.equal(found.detach(), torch.arange(15.0).reshape(5, 3) - 1)


def test_a_value_is_the_same_object_each_time(mode):
    with mode() as deserializer:
        assert deserializer["a"] is deserializer["a"]
        assert deserializer.tree()["a"] is deserializer["a"]
        assert next(iter(deserializer.values())) is deserializer["a"]
        assert next(deserializer.read_tensors())[3] is deserializer["a"]


def test_values_are_writable_and_independent(mode):
    with mode() as one, mode() as two:
        found, other = one["a"], two["a"]
        with torch.no_grad():
            found.fill_(3)
        assert samples.same(other, VALUES["a"])
        assert (one["a"] == 3).all()


def test_values_stay_valid_when_everything_else_is_gone(mode):
    deserializer = mode()
    found = {name: deserializer[name] for name in VALUES}
    deserializer.close()
    alive = weakref.ref(deserializer)
    del deserializer
    gc.collect()
    assert alive() is None
    assert_same(found, VALUES)
    found = found["d"]
    gc.collect()
    assert samples.same(found, VALUES["d"])


# --- lazy reading ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["abcdef", "fedcba", "cafebd", "aabbaa"])
def test_lazy_access_works_in_any_order(order):
    with open_data(lazy_load=True) as deserializer:
        for name in order:
            assert samples.same(deserializer[name], VALUES[name])


def test_lazy_opening_reads_no_tensor_data_and_membership_reads_nothing():
    stream = CountingFile(
        state_dict_bytes({"a": tensor((1 << 20,), torch.uint8), "b": tensor((1 << 22,), torch.uint8)})
    )
    records = {record.path[0]: record.entry for record in fmt.read_file(stream.getvalue()).records}
    deserializer = TensorDeserializer(stream, device="cpu", lazy_load=True)
    assert "a" in deserializer
    assert list(deserializer) == ["a", "b"]
    read = sum(end - begin for begin, end in stream.spans)
    assert read <= 2 << 20  # a first request may take more than the index, never the whole file
    entry = records["b"]
    assert not stream.touched(entry.data_offset + (2 << 20), entry.data_offset + entry.data_nbytes)
    deserializer["a"]
    assert not stream.touched(entry.data_offset + (2 << 20), entry.data_offset + entry.data_nbytes)
    deserializer.close()


def test_a_cached_tensor_is_not_read_again_and_alone_stays_after_close():
    stream = CountingFile(DATA)
    deserializer = TensorDeserializer(stream, device="cpu", lazy_load=True)
    found = deserializer["d"]
    count = len(stream.spans)
    assert deserializer["d"] is found
    assert deserializer.tree(("d",)) is found
    assert len(stream.spans) == count
    deserializer.close()
    assert deserializer["d"] is found
    module = torch.nn.Module()
    module.register_parameter("a", torch.nn.Parameter(torch.empty_like(VALUES["a"]), requires_grad=False))
    for read in (
        lambda: deserializer["a"],
        lambda: deserializer.tree(),
        lambda: list(deserializer.read_tensors()),
        lambda: list(deserializer.items()),
        lambda: deserializer.load_into_module(module),
    ):
        with pytest.raises((RuntimeError, ValueError)):
            read()
    assert list(deserializer) == list(VALUES)
    assert deserializer.total_tensor_bytes == TOTAL


# --- filters --------------------------------------------------------------------------------------------------------


def test_the_filter_sees_each_name_once_in_file_order_and_decides_by_truth(mode):
    seen = []

    def keep(name):
        seen.append(name)
        return [] if name in "bd" else "yes"

    with mode(filter_func=keep) as deserializer:
        assert list(deserializer) == ["a", "c", "e", "f"]
        assert seen == list(VALUES)
        assert "b" not in deserializer
        with pytest.raises(KeyError):
            deserializer["b"]
        assert [name for _, _, name, _ in deserializer.read_tensors()] == ["a", "c", "e", "f"]
        assert_same(deserializer.tree(), {name: VALUES[name] for name in "acef"})
        assert deserializer.total_tensor_bytes == sum(VALUES[name].nbytes for name in "acef")
    assert seen == list(VALUES)


def test_a_compiled_pattern_is_a_filter():
    with open_data(filter_func=re.compile("[ab]").match) as deserializer:
        assert list(deserializer) == ["a", "b"]


def test_structured_names_reach_the_filter_as_plain_tuples(mode):
    seen = []
    for data in ({"x": [tensor(), {"y": tensor()}], "z": tensor()}, [tensor()]):
        with mode(state_dict_bytes(data), filter_func=lambda path: seen.append(path) or True):
            pass
    assert seen == [("x", 0), ("x", 1, "y"), "z", (0,)]
    assert [type(path) for path in seen] == [tuple, tuple, str, tuple]


def test_a_filter_that_rejects_everything_gives_an_empty_mapping(mode):
    with mode(filter_func=lambda name: False) as deserializer:
        assert len(deserializer) == 0
        assert not deserializer
        assert dict(deserializer.items()) == {}
        assert deserializer.tree(default=3) == 3
        assert list(deserializer.read_tensors()) == []
        assert deserializer.total_tensor_bytes == 0
        with pytest.warns(UserWarning, match="nothing is loaded into Linear"):
            assert deserializer.load_into_module(torch.nn.Linear(1, 1)) == 0


def test_an_exception_of_the_filter_propagates_and_closes_the_file():
    class Stop(Exception):
        pass

    def stop(name):
        raise Stop(name)

    stream = io.BytesIO(DATA)
    with pytest.raises(Stop):
        TensorDeserializer(stream, device="cpu", filter_func=stop)
    assert stream.closed
    with open_data(lazy_load=True) as deserializer:
        with pytest.raises(Stop):
            list(deserializer.read_tensors(filter_func=stop))
        with pytest.raises(Stop):
            deserializer.tree(filter_func=stop)
        assert samples.same(deserializer["a"], VALUES["a"])


# --- dtype ----------------------------------------------------------------------------------------------------------

CONVERTED = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", [*CONVERTED, torch.int8, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_dtype_converts_among_the_four_float_types_and_leaves_all_others(mode, dtype):
    values = {str(d): tensor((4,), d) for d in samples.ALL_DTYPES}
    for d in CONVERTED:
        values[str(d)] = torch.tensor([0.0, 1.0, -2.5, 1e-3]).to(d)
    with mode(state_dict_bytes(values), dtype=dtype) as deserializer:
        for name, wanted in values.items():
            if wanted.dtype in CONVERTED and dtype in CONVERTED:
                wanted = wanted.to(dtype)
            found = deserializer[name]
            assert samples.same(found, wanted), name
            assert found.requires_grad == (values[name].is_floating_point() or values[name].is_complex()), name


@pytest.mark.parametrize("dtype", CONVERTED, ids=str)
def test_dtype_converts_tensors_without_data_too_each_for_itself(mode, dtype):
    values = {f"empty {d}": torch.empty(2, 0, dtype=d) for d in CONVERTED}
    values |= {f"meta {d}": torch.empty(3, dtype=d, device="meta") for d in CONVERTED}
    with mode(state_dict_bytes(values), dtype=dtype) as deserializer:
        for name, written in values.items():
            assert samples.same(deserializer[name], torch.zeros(written.shape, dtype=dtype)), name
    with TensorDeserializer(io.BytesIO(state_dict_bytes(values)), device="cpu", dtype=dtype, lazy_load=True) as lazy:
        for name, written in values.items():
            ((_, _, _, _, opaque, _),) = lazy.read_numpy_arrays(name.__eq__, allow_raw_data=True)
            assert opaque == (written.dtype == torch.bfloat16), name


@pytest.mark.parametrize("dtype", CONVERTED, ids=str)
def test_numpy_arrays_have_the_stored_dtype_whatever_the_constructor_converts_to(dtype):
    values = {str(d): tensor((4,), d) for d in CONVERTED}
    data = state_dict_bytes(values)
    with TensorDeserializer(io.BytesIO(data), device="cpu", dtype=dtype, lazy_load=True) as deserializer:
        assert deserializer[str(torch.float32)].dtype == dtype  # cached in its converted form
        arrays = {name: array for _, _, name, array, _, _ in deserializer.read_numpy_arrays(allow_raw_data=True)}
    for name, value in values.items():
        assert arrays[name].tobytes() == samples.raw(value), name
    eager = TensorDeserializer(io.BytesIO(data), device="cpu", dtype=dtype)
    with pytest.raises(RuntimeError, match="closed"):  # the stored form is gone with the file
        list(eager.read_numpy_arrays(allow_raw_data=True))


@pytest.mark.parametrize("target", CONVERTED, ids=str)
@pytest.mark.parametrize("stored", CONVERTED, ids=str)
def test_a_conversion_rounds_as_torch_rounds(stored, target):
    generator = torch.Generator().manual_seed(0)
    value = (torch.randn(10_000, generator=generator, dtype=torch.float64) * 10 ** torch.linspace(-9, 6, 10_000)).to(
        stored
    )
    value[:4] = torch.tensor([0.0, -0.0, float("inf"), -float("inf")])
    with open_data(state_dict_bytes({"a": value}), dtype=target) as deserializer:
        assert samples.same(deserializer["a"], value.to(target))


def test_converted_tensors_keep_nothing_of_the_stored_form():
    with open_data(dtype=torch.float64) as deserializer:
        found = deserializer["d"]
    assert found.untyped_storage().nbytes() == 8 * 300 * 300
    assert samples.same(found, VALUES["d"].double())


# --- generators -----------------------------------------------------------------------------------------------------


def names_of(generator):
    return [item[2] for item in generator]


def test_read_tensors_yields_everything_in_file_order(mode):
    with mode(num_readers=3) as deserializer:
        generator = deserializer.read_tensors()
        assert iter(generator) is generator
        found = list(generator)
    assert [item[:3] for item in found] == [(0, TensorType.STATE_DICT, name) for name in VALUES]
    assert all(type(item[1]) is TensorType for item in found)
    assert all(samples.same(item[3], VALUES[item[2]]) for item in found)


def test_consecutive_calls_page_through_the_file_and_other_accesses_do_not_move_the_cursor(mode):
    with mode() as deserializer:
        assert deserializer.tree().keys() == {**deserializer}.keys()
        assert names_of(deserializer.read_tensors(num_tensors=2)) == ["a", "b"]
        deserializer["f"]
        assert names_of(deserializer.read_numpy_arrays(num_tensors=1, allow_raw_data=True)) == ["c"]
        assert names_of(deserializer.read_tensors(num_tensors=0)) == []
        generator = deserializer.read_tensors()
        assert next(generator)[2] == "d"
        generator.close()  # one that is left early keeps the cursor at the last item
        assert names_of(deserializer.read_tensors(num_tensors=100)) == ["e", "f"]
        assert names_of(deserializer.read_tensors()) == []


def test_num_tensors_counts_what_passes_the_filter(mode):
    with mode() as deserializer:
        assert names_of(deserializer.read_tensors(lambda name: name in "bdf", 2)) == ["b", "d"]
        assert names_of(deserializer.read_tensors()) == ["e", "f"]


@pytest.mark.parametrize("method", ["read_tensors", "read_numpy_arrays"])
def test_a_number_of_tensors_below_minus_one_is_a_value_error_on_the_first_item(mode, method):
    with mode() as deserializer:
        generator = getattr(deserializer, method)(num_tensors=-2)
        with pytest.raises(ValueError):
            next(generator)


def test_nothing_is_kept_with_cache_off():
    data = state_dict_bytes({str(i): tensor((1000,), seed=i) for i in range(10)})
    stream = CountingFile(data)
    with TensorDeserializer(stream, device="cpu", lazy_load=True) as deserializer:
        for _, _, name, value in deserializer.read_tensors(cache=False):
            assert samples.same(value, tensor((1000,), seed=int(name)))
            alive = weakref.ref(value)
            del value
            assert alive() is None
        assert name == "9"
        count = len(stream.spans)
        assert samples.same(deserializer["3"], tensor((1000,), seed=3))
        assert len(stream.spans) > count
    with TensorDeserializer(io.BytesIO(data), device="cpu", lazy_load=True) as deserializer:
        one = {name: array.tobytes() for _, _, name, array, *_ in deserializer.read_numpy_arrays(cache=False)}
    assert one == {str(i): samples.raw(tensor((1000,), seed=i)) for i in range(10)}


def test_cache_off_hands_out_what_is_cached_already():
    with open_data(lazy_load=True) as deserializer:
        cached = deserializer["b"]
        found = {name: value for _, _, name, value in deserializer.read_tensors(cache=False)}
        assert found["b"] is cached
        assert deserializer["a"] is not found["a"]
        assert_same(found, VALUES)


def test_numpy_arrays_have_the_stored_dtype_and_share_memory_with_the_tensor(mode):
    with mode() as deserializer:
        for idx, kind, name, array, is_opaque, torch_dtype in deserializer.read_numpy_arrays(allow_raw_data=True):
            wanted = VALUES[name]
            assert (idx, kind) == (0, TensorType.STATE_DICT)
            assert isinstance(array, np.ndarray)
            assert array.shape == tuple(wanted.shape)
            assert array.tobytes() == samples.raw(wanted)
            if wanted.dtype == torch.bfloat16:
                assert (is_opaque, torch_dtype) == (True, "torch.bfloat16")
                assert array.dtype == np.int16
            else:
                assert (is_opaque, torch_dtype) == (False, None)
                assert array.dtype == wanted.numpy().dtype
            if array.size:
                assert array.__array_interface__["data"][0] == deserializer[name].data_ptr()


def test_a_dtype_that_numpy_lacks_is_a_value_error_unless_raw_data_is_allowed(mode):
    with mode() as deserializer:
        generator = deserializer.read_numpy_arrays()
        assert next(generator)[2] == "a"
        assert next(generator)[2] == "b"
        with pytest.raises(ValueError):
            next(generator)


def test_numpy_arrays_need_the_cpu():
    with open_data(device="meta", lazy_load=True) as deserializer:
        generator = deserializer.read_numpy_arrays()
        with pytest.raises(RuntimeError):
            next(generator)


# --- counters and lifetime ------------------------------------------------------------------------------------------


def test_the_counters(mode):
    deserializer = mode()
    assert deserializer.total_tensor_bytes == TOTAL
    assert deserializer.total_file_bytes == TOTAL
    assert deserializer.read_bytes == 0
    assert deserializer.total_compressed_tensor_bytes == 0
    assert deserializer.cache_status is None
    deserializer.tree()
    assert deserializer.total_bytes_read >= TOTAL
    deserializer.close()
    assert deserializer.total_tensor_bytes == TOTAL
    assert deserializer.total_bytes_read >= TOTAL
    with mode(state_dict_bytes({"a": torch.ones(10), "m": torch.ones(5, device="meta")})) as deserializer:
        assert deserializer.total_tensor_bytes == 60  # of meta tensors what they take when they are loaded


def test_eager_loading_closes_the_file_and_a_lazy_object_when_its_block_ends():
    stream = io.BytesIO(DATA)
    deserializer = TensorDeserializer(stream, device="cpu")
    assert stream.closed
    deserializer.close()
    stream = io.BytesIO(DATA)
    deserializer = TensorDeserializer(stream, device="cpu", lazy_load=True)
    with deserializer as entered:
        assert entered is deserializer
        deserializer["a"], deserializer.tree(), list(deserializer.read_tensors())
        assert not stream.closed
    assert stream.closed
    deserializer.close()


def test_garbage_collection_closes_the_file_and_many_loads_leave_no_descriptors_behind(
    mapped_path, leaves_no_descriptors
):
    stream = io.BytesIO(DATA)
    deserializer = TensorDeserializer(stream, device="cpu", lazy_load=True)
    other = TensorDeserializer(mapped_path, device="cpu", lazy_load=True)
    other["a"]
    del deserializer, other
    gc.collect()
    assert stream.closed
    for number in range(40):
        with TensorDeserializer(mapped_path, device="cpu", lazy_load=bool(number % 2)) as deserializer:
            deserializer["a"]


def test_both_classes_can_be_patched_where_integrators_patch_them(monkeypatch):
    for module, use in ((TensorDeserializer, open_data), (TensorSerializer, lambda: TensorSerializer(io.BytesIO()))):
        calls = []
        original = module.__init__

        def record(self, *args, calls=calls, original=original, **options):
            calls.append(args)
            original(self, *args, **options)

        monkeypatch.setattr(getattr(serialization, module.__name__), "__init__", record)
        use().close()
        assert len(calls) == 1


# --- mapped files ---------------------------------------------------------------------------------------------------


@pytest.fixture
def mapped_path(tmp_path):
    return samples.write_state_dict(tmp_path / "f.tensors", VALUES)


def mappings_of(path) -> list:
    with open("/proc/self/maps") as maps:
        return [line for line in maps if line.rstrip().endswith(str(path))]


def test_a_mapped_load_gives_views_of_the_file_that_keep_the_mapping_alive(mapped_path):
    deserializer = TensorDeserializer(mapped_path, device="cpu", mmap=True)
    found = {name: deserializer[name] for name in VALUES}
    deserializer.close()
    del deserializer
    gc.collect()
    ranges = [tuple(int(x, 16) for x in line.split()[0].split("-")) for line in mappings_of(mapped_path)]
    for name in "abd":
        at = found[name].data_ptr()
        assert any(begin <= at < end for begin, end in ranges), name
    assert_same(found, VALUES)
    del found
    gc.collect()
    assert mappings_of(mapped_path) == []


@pytest.mark.parametrize("code", [errno.ENODEV, errno.ENOMEM, errno.EACCES])
def test_a_file_that_cannot_be_mapped_is_read_unless_a_mapping_was_asked_for(mapped_path, monkeypatch, code):
    def fail(_source):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(_C.FileSource, "map", fail)
    assert_same(load(mapped_path, mmap=None), VALUES)
    assert tensorizer.load_file(mapped_path, backend="mmap").keys() == VALUES.keys()
    with tensorizer.safe_open(mapped_path, backend="mmap") as file:
        assert file.get_tensor("a").equal(VALUES["a"])
    assert mappings_of(mapped_path) == []
    with pytest.raises(OSError, match=os.strerror(code)):
        load(mapped_path, mmap=True)


def test_writing_into_a_mapped_tensor_never_reaches_the_file(mapped_path):
    before = mapped_path.read_bytes()
    one = load(mapped_path, mmap=True)
    other = load(mapped_path, mmap=True)
    with torch.no_grad():
        one["a"].fill_(1)
        one["d"].fill_(2)
    assert mapped_path.read_bytes() == before
    assert samples.same(other["d"], VALUES["d"])
    assert (one["d"] == 2).all()


def test_a_mapped_file_may_be_replaced_or_removed(mapped_path):
    found = load(mapped_path, mmap=True)
    samples.write_state_dict(mapped_path, {"x": tensor()})
    assert_same(found, VALUES)
    found = load(mapped_path, mmap=True)
    mapped_path.unlink()
    assert_same(found, {"x": tensor()})


def test_misaligned_tensors_of_older_files_are_copied(tmp_path):
    path = tmp_path / "f"
    tensors = [fmt.Tensor((f"t{i}",), "<f8", (i,), samples.stream(8 * i, i)) for i in range(1, 30)]
    path.write_bytes(fmt.write_file(tensors))
    found = load(path, mmap=True)
    for value, wanted in zip(found.values(), tensors):
        assert value.data_ptr() % 8 == 0
        assert samples.raw(value) == wanted.data
        with torch.no_grad():
            value.zero_()
    assert path.read_bytes() == fmt.write_file(tensors)


def test_an_open_file_can_be_mapped_and_a_source_without_a_file_is_refused(mapped_path):
    for buffering in (0, -1):
        assert_same(load(mapped_path.open("rb", buffering=buffering), mmap=True), VALUES)
    for source in (io.BytesIO(DATA), io.BufferedReader(io.BytesIO(DATA))):
        with pytest.raises(ValueError, match=r"mmap|mapped"):
            TensorDeserializer(source, device="cpu", mmap=True)


def test_a_mapped_load_verifies_hashes_when_asked(mapped_path):
    data = bytearray(mapped_path.read_bytes())
    entry = next(r.entry for r in fmt.read_file(bytes(data)).records if r.path == ("d",))
    data[entry.data_offset + 1000] ^= 1
    mapped_path.write_bytes(data)
    with pytest.raises(errors.HashMismatchError):
        load(mapped_path, mmap=True, verify_hash=True)
    assert not samples.same(load(mapped_path, mmap=True)["d"], VALUES["d"])


def test_meta_and_empty_tensors_need_no_mapping(tmp_path):
    values = {"m": torch.ones((3,), device="meta"), "e": torch.empty((0,))}
    path = samples.write_state_dict(tmp_path / "f", values)
    found = load(path, mmap=True)
    assert_same(found, {"m": torch.zeros(3), "e": torch.empty((0,))})
    with torch.no_grad():
        found["m"].fill_(1)


# --- modes of the caller --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [torch.inference_mode, FakeTensorMode], ids=lambda inside: inside.__name__)
@pytest.mark.parametrize("dtype", [None, torch.float64], ids=["stored", "cast"])
def test_tensors_loaded_in_a_mode_of_the_caller_are_ordinary_ones_that_can_be_trained_later(mode, inside, dtype):
    with inside(), mode(dtype=dtype) as deserializer:
        found = [*deserializer.values(), *deserializer.tree().values()]
        found += [item[-1] for item in deserializer.read_tensors()]
    assert all(type(value) is torch.nn.Parameter and not value.is_inference() for value in found)
    wanted = VALUES["a"] if dtype is None else VALUES["a"].to(dtype)
    assert samples.same(found[0], wanted)
    (found[0] * 2).sum().backward()
    with torch.no_grad():
        assert found[0].add_(1).grad is not None
