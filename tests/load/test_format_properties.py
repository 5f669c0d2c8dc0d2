"""The package against the oracle, on files that hypothesis makes up: what one writes the other reads, to the byte."""

from __future__ import annotations

import ctypes
import io
import math

import pytest
import reference_format as fmt
import samples
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tensorizer import TensorDeserializer, TensorSerializer, errors

settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    max_examples=120,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
settings.load_profile("suite")

DTYPES = {
    "|u1": torch.uint8,
    "|i1": torch.int8,
    "<i2": torch.int16,
    "<i8": torch.int64,
    "<f2": torch.float16,
    "<f4": torch.float32,
    "<f8": torch.float64,
    "<c8": torch.complex64,
    "<V2\0torch.bfloat16": torch.bfloat16,
    "|V1\0torch.float8_e4m3fn": torch.float8_e4m3fn,
    "<V4\0torch.complex32": torch.complex32,
}
if hasattr(torch, "uint16"):  # torch 2.3
    DTYPES["<u2"] = torch.uint16

keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def trees(leaves):
    """State dicts: nested mappings and sequences without empty containers."""
    return st.recursive(
        leaves,
        lambda inner: st.dictionaries(keys, inner, min_size=1, max_size=4) | st.lists(inner, min_size=1, max_size=4),
        max_leaves=12,
    ).filter(lambda tree: isinstance(tree, (dict, list)))


@st.composite
def leaf_tensors(draw):
    """Tensors of any dtype, contiguous or a view, with data or without."""
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    shape = draw(shapes)
    if draw(st.integers(0, 9)) == 0:
        return torch.empty(shape, dtype=dtype, device="meta")
    value = samples.tensor(shape, dtype, seed=draw(st.integers(0, 99)))
    if value.dim() >= 2 and draw(st.booleans()):
        value = value.transpose(0, 1)
    return value


def as_loaded(tree):
    if isinstance(tree, dict):
        return {key: as_loaded(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [as_loaded(value) for value in tree]
    if tree.is_meta:  # by way of another dtype: torch 2.1 fills no float8
        return torch.zeros(tree.shape).to(tree.dtype)
    return tree


def flatten(tree, path=()):
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        if isinstance(value, (dict, list)):
            yield from flatten(value, (*path, key))
        else:
            yield (*path, key), value


@given(tree=trees(leaf_tensors()), hashes=st.sampled_from([("crc32", "sha256"), "crc32", "sha256", ()]))
def test_the_oracle_reads_what_the_package_writes(tree, hashes):
    data = samples.state_dict_bytes(tree, hashes=hashes)
    file = fmt.read_file(data)
    wanted = dict(flatten(as_loaded(tree)))
    assert list(file.contents()) == list(wanted)
    for record in file.records:
        value = wanted[record.path]
        assert record.content == samples.raw(value)
        assert record.header.shape == tuple(value.shape)
        assert DTYPES[record.header.dtype] == value.dtype
        assert record.hashes_hold()
    assert fmt.rewrite(file) == data


@given(tree=trees(leaf_tensors()), options=st.sampled_from([{}, {"lazy_load": True}, {"num_readers": 2}]))
def test_the_package_reads_what_the_package_writes(tree, options):
    data = samples.state_dict_bytes(tree)
    samples.assert_same(samples.load(io.BytesIO(data), verify_hash=True, **options), as_loaded(tree))


@st.composite
def stored_tensors(draw):
    """Tensors as some writer may have stored them, under paths that form a tree."""
    paths = [path for path, _ in flatten(draw(trees(st.none())))]
    tensors = []
    for path in paths:
        dtype = draw(st.sampled_from(list(DTYPES)))
        shape = draw(shapes)
        nbytes = math.prod(shape) * fmt.itemsize(dtype)
        data = None if nbytes and draw(st.integers(0, 9)) == 0 else draw(st.binary(min_size=nbytes, max_size=nbytes))
        flat = len(path) == 1 and isinstance(path[0], str)
        tensors.append(
            fmt.Tensor(
                path=path,
                dtype=dtype,
                shape=shape,
                data=data,
                kind=draw(st.integers(0, 2)) if flat else fmt.STATE_DICT,
                module_idx=draw(st.integers(0, 65_535)),
                index_dtype=fmt.split_dtype(dtype)[0] if not data and draw(st.booleans()) else None,
                hashes=draw(st.sampled_from([("crc32", "sha256"), ("sha256", "crc32"), ("crc32",), ("sha256",), ()])),
                padding=draw(st.sampled_from([0, 0, 1, 7, 64, 300])),
            )
        )
    return tensors


layouts = st.fixed_dictionaries(
    {
        "index_nbytes": st.sampled_from([None, 8192, fmt.RESERVED_INDEX_NBYTES]),
        "start": st.sampled_from([0, 0, 1, 100]),
        "gap": st.sampled_from([0, 0, 1, 17, 5000]),
        "terminator": st.sampled_from([bytes(8), b"", b"anything at all"]),
    }
)
opening = st.fixed_dictionaries(
    {
        "lazy_load": st.booleans(),
        "verify_hash": st.booleans(),
        "allow_missing_hashes": st.just(True),  # the oracle writes records with and without
        "num_readers": st.sampled_from([None, 1, 3]),
    }
)


def opened(data, start=0, **options):
    source = io.BytesIO(bytes(start) + data)
    source.seek(start)
    return TensorDeserializer(source, device="cpu", **options)


def place(tensor_):
    return tensor_.path[0] if len(tensor_.path) == 1 and isinstance(tensor_.path[0], str) else tensor_.path


@given(tensors=stored_tensors(), layout=layouts, options=opening)
def test_the_package_reads_what_the_oracle_writes(tensors, layout, options):
    data = fmt.write_file(tensors, **layout)
    with opened(data, layout["start"], **options) as deserializer:
        found = list(deserializer.read_tensors())
    assert [(idx, int(kind), name) for idx, kind, name, _ in found] == [
        (tensor_.module_idx, tensor_.kind, place(tensor_)) for tensor_ in tensors
    ]
    for (_, _, _, value), tensor_ in zip(found, tensors):
        assert value.dtype == DTYPES[tensor_.dtype]
        assert tuple(value.shape) == tensor_.shape
        wanted = bytes(value.nbytes) if tensor_.data is None else tensor_.data
        assert samples.raw(value) == wanted


@given(tensors=stored_tensors(), layout=layouts, wanted=st.randoms(use_true_random=False))
def test_any_selection_in_any_order_gives_the_same_tensors(tensors, layout, wanted):
    data = fmt.write_file(tensors, **layout)
    chosen = {place(tensor_): tensor_ for tensor_ in wanted.sample(tensors, wanted.randint(0, len(tensors)))}
    with opened(data, layout["start"], lazy_load=True) as deserializer:
        found = {name: deserializer.tree(tensor_.path) for name, tensor_ in chosen.items()}
    with opened(data, layout["start"], filter_func=chosen.__contains__) as deserializer:
        filtered = {name: value for _, _, name, value in deserializer.read_tensors()}
    assert set(filtered) == set(chosen)
    for name, tensor_ in chosen.items():
        for value in (found[name], filtered[name]):
            assert samples.raw(value) == (tensor_.data or bytes(value.nbytes))


FAMILY = (errors.TensorizerError, OSError)


@settings(max_examples=200)
@given(tensors=stored_tensors(), layout=layouts, data=st.data())
def test_a_damaged_file_is_an_error_or_the_original_tensors(tensors, layout, data):
    for tensor_ in tensors:
        tensor_.hashes = fmt.BOTH_HASHES
    original = fmt.write_file(tensors, **{**layout, "start": 0})
    damaged = bytearray(original)
    file = fmt.read_file(original)
    last = max(record.entry.data_offset + len(record.payload) for record in file.records)
    interesting = st.integers(0, min(last, 73 + 400)) | st.integers(file.records[0].entry.offset, last)
    for _ in range(data.draw(st.integers(1, 3))):
        at = min(data.draw(interesting), len(damaged) - 1)
        if data.draw(st.booleans()):
            damaged[at] = data.draw(st.integers(0, 255))
        else:
            damaged[at : at + 8] = data.draw(st.sampled_from([bytes(8), b"\xff" * 8, b"\0" * 7 + b"\x80"]))
    if data.draw(st.integers(0, 4)) == 0:
        damaged = damaged[: data.draw(st.integers(0, len(damaged)))]
    assume(bytes(damaged) != original)
    wanted = {place(tensor_): tensor_ for tensor_ in tensors}
    try:
        with opened(damaged, verify_hash=True) as deserializer:
            found = [(name, value) for _, _, name, value in deserializer.read_tensors()]
    except FAMILY:
        return
    for name, value in found:
        tensor_ = wanted[name]
        if tensor_.data is not None:  # a tensor without data is not covered by any digest
            assert samples.raw(value) == tensor_.data
            assert tuple(value.shape) == tensor_.shape


@settings(max_examples=300)
@given(st.binary(max_size=2000), st.sampled_from([b"", fmt.MAGIC, fmt.encode_prologue(1, 0, 8, 2, 200)]))
def test_noise_is_always_refused(noise, front):
    with pytest.raises(FAMILY):
        samples.load(io.BytesIO(front + noise))


@settings(max_examples=60)
@given(
    parts=st.lists(st.dictionaries(keys, leaf_tensors(), max_size=5), min_size=1, max_size=5),
    start=st.sampled_from([0, 100]),
)
def test_several_calls_make_the_file_that_the_oracle_would_make(parts, start):
    stream = samples.KeptBytesIO(bytes(start))
    stream.seek(start)
    with TensorSerializer(stream) as serializer:
        wanted = {}
        for part in parts:
            fresh = {name: value for name, value in part.items() if name not in wanted}
            serializer.write_state_dict(fresh)
            wanted |= fresh
            if wanted:
                file = fmt.read_file(stream.getvalue(), start=start)
                assert list(file.contents()) == [(name,) for name in wanted]
    if wanted:
        data = stream.getvalue()[start:]
        file = fmt.read_file(stream.getvalue(), start=start)
        assert fmt.rewrite(file, start=start) == data[: len(fmt.rewrite(file, start=start))]
        assert all(record.hashes_hold() for record in file.records)


@given(value=leaf_tensors())
def test_saving_leaves_the_tensor_as_it_was(value):
    def state():
        return value._version, value.stride(), value.storage_offset(), None if value.is_meta else samples.raw(value)

    before = state()
    samples.state_dict_bytes({"a": value})
    assert state() == before


@given(st.binary(min_size=1, max_size=4096))
def test_the_oracles_raw_view_of_a_tensor_is_what_numpy_sees(data):
    value = torch.empty(len(data), dtype=torch.uint8)
    ctypes.memmove(value.data_ptr(), data, len(data))
    assert samples.raw(value) == value.numpy().tobytes() == data
