"""Damaged and hostile files: the right error, quickly, in little memory; no crash, no hang, no wrong tensor."""

from __future__ import annotations

import contextlib
import gzip
import io
import struct
import sys
import time

import golden_files
import memory
import pytest
import reference_auth
import reference_format as fmt
import samples
import torch
from samples import assert_same, load, tensor
from servers.http_faults import FaultyServer, Reply

import tensorizer.torch
from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer, TensorType, errors

FAMILY = (errors.TensorizerError, OSError)
NEVER = (MemoryError, AssertionError, OverflowError, RecursionError, struct.error)
SECONDS = 60.0  # longer is a hang

VALUES = {
    "first": tensor((2, 3), seed=1),
    "half": tensor((5,), torch.bfloat16, seed=2),
    "last": tensor((7,), torch.uint8, seed=3),
}


def as_reference(values):
    stored = {torch.float32: "<f4", torch.bfloat16: "<V2\0torch.bfloat16", torch.uint8: "|u1"}
    return [
        fmt.Tensor((name,), stored[value.dtype], tuple(value.shape), samples.raw(value), padding=5)
        for name, value in values.items()
    ]


SMALL = fmt.write_file(as_reference(VALUES), index_nbytes=150)
FILE = fmt.read_file(SMALL)
PAYLOADS = [range(r.entry.data_offset, r.entry.data_offset + len(r.payload)) for r in FILE.records]

WAYS = {
    "eager": {},
    "eager, verified": {"verify_hash": True},
    "lazy": {"lazy_load": True},
    "three readers": {"num_readers": 3},
}


def read_all(source, **options):
    with TensorDeserializer(source, device="cpu", **options) as deserializer:
        return {name: value for _, _, name, value in deserializer.read_tensors()}


def attempt(data, tmp_path=None, **options):
    """Loads, or gives the error, which must be of the right family and come soon."""
    source = io.BytesIO(data)
    if tmp_path is not None:
        (tmp_path / "bad.tensors").write_bytes(data)
        source = tmp_path / "bad.tensors"
    begin = time.monotonic()
    try:
        return read_all(source, **options)
    except NEVER as error:
        pytest.fail(f"{type(error).__name__}: {error}")
    except FAMILY as error:
        return error
    finally:
        assert time.monotonic() - begin < SECONDS


def assert_refused(data, tmp_path=None, **options):
    result = attempt(data, tmp_path, **options)
    assert isinstance(result, FAMILY), f"was read: {list(result)}"
    assert str(result)
    return result


# --- truncation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_truncated_file_raises_wherever_it_is_cut(way):
    last_needed = PAYLOADS[-1].stop
    for length in range(len(SMALL)):
        result = attempt(SMALL[:length], **WAYS[way])
        if length >= last_needed:
            assert_same(result, VALUES)  # only the end marker is missing: nothing is lost
        else:
            assert isinstance(result, FAMILY), f"cut at {length}: read {list(result)}"
            assert isinstance(result, (ValueError, OSError))


def test_a_truncated_path_names_the_file_and_maps_or_loads_alike(tmp_path):
    for length in range(0, PAYLOADS[-1].stop, 13):
        for options in ({}, {"mmap": True}, {"lazy_load": True, "mmap": True}):
            error = assert_refused(SMALL[:length], tmp_path, **options)
            assert "bad.tensors" in f"{error} {getattr(error, 'source', '')}"


def test_a_file_that_is_cut_while_it_is_open_raises(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(SMALL)
    with TensorDeserializer(path, device="cpu", lazy_load=True) as deserializer:
        with path.open("rb+") as stream:
            stream.truncate(PAYLOADS[1].start + 1)
        for name in ("first", "half", "last"):
            with pytest.raises(FAMILY):
                deserializer[name]


def test_a_cut_in_a_large_file_names_the_tensor(tmp_path):
    path = samples.write_state_dict(
        tmp_path / "f", {"fine": tensor(), "broken": torch.zeros(30 << 20, dtype=torch.uint8)}
    )
    with path.open("rb+") as stream:
        stream.truncate(20 << 20)
    with pytest.raises(errors.TruncatedError, match="broken"):
        load(path)
    with pytest.raises(errors.TruncatedError, match="broken"):
        load(path, filter_func=lambda name: name == "broken", lazy_load=True)


@pytest.mark.parametrize("encrypted", [False, True])
def test_an_offset_that_leaves_a_tebibyte_to_a_record_header_is_refused_before_it_takes_memory(tmp_path, encrypted):
    encryption = EncryptionParams.random() if encrypted else None
    data = samples.state_dict_bytes({"fine": tensor(), "far": torch.arange(5)}, encryption=encryption)
    if encrypted:  # an authenticated index cannot be changed
        data = reference_auth.as_before(data, encryption.key)
    entry = fmt.read_file(data).records[-1].entry
    place = struct.pack("<QQQ", entry.offset, entry.data_offset, entry.data_nbytes)
    assert data.count(place) == 1
    size = 1 << 40
    path = tmp_path / "sparse.tensors"
    path.write_bytes(data.replace(place, struct.pack("<QQQ", entry.offset, size - 8 - 40, 40)))
    try:
        with path.open("rb+") as stream:
            stream.truncate(size)
    except OSError:
        pytest.skip("the file system holds no sparse file of this size")
    keys = {"encryption": DecryptionParams.from_key(encryption.key)} if encrypted else {}
    for options in ({}, {"lazy_load": True}, {"verify_hash": True}, {} if encrypted else {"mmap": True}):
        before = memory.resident()
        with pytest.raises(errors.FormatError, match=r"'far'.*record header"):
            read_all(path, **keys, **options)
        assert memory.resident() - before < 64 << 20


# --- flipped bytes --------------------------------------------------------------------------------------------------


def is_payload(at):
    return any(at in payload for payload in PAYLOADS)


def check_flip(result, what):
    """An error, or tensors of the file: as many as a smaller count leaves, and each of them the original."""
    if isinstance(result, FAMILY):
        return
    assert list(result) == list(VALUES)[: len(result)], what
    for name, value in result.items():
        assert samples.same(value, VALUES[name]), what


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF, 0x02, 0x1E])
def test_a_flipped_byte_outside_of_the_payloads_is_an_error_or_changes_nothing(way, mask):
    for at in range(len(SMALL)):
        if is_payload(at):
            continue
        data = bytearray(SMALL)
        data[at] ^= mask
        check_flip(attempt(bytes(data), **WAYS[way]), f"byte {at} ^ {mask:#x}")


@pytest.mark.parametrize("value", [0x00, 0xFF])
def test_eight_bytes_overwritten_anywhere_are_an_error_or_change_nothing(value):
    for at in range(PAYLOADS[-1].start - 8):
        if any(is_payload(at + i) for i in range(8)):
            continue
        data = SMALL[:at] + bytes([value]) * 8 + SMALL[at + 8 :]
        check_flip(attempt(data), f"bytes {at}..{at + 8} = {value:#x}")


def test_a_byte_inserted_or_removed_anywhere_is_never_read_as_other_tensors():
    for at in range(PAYLOADS[-1].start):
        for data in (SMALL[:at] + b"\1" + SMALL[at:], SMALL[:at] + SMALL[at + 1 :]):
            check_flip(attempt(data, verify_hash=True), f"at {at}")


# --- hostile fields -------------------------------------------------------------------------------------------------


def patched(at: int, code: str, *values) -> bytes:
    data = bytearray(SMALL)
    struct.pack_into("<" + code, data, at, *values)
    return bytes(data)


HUGE = [1 << 16, 1 << 20, 1 << 31, 1 << 32, 1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 8, (1 << 64) - 1]
ENTRY_AT = []
_at = fmt.PROLOGUE_NBYTES
for _tensor, _record in zip(as_reference(VALUES), FILE.records):
    _nbytes = len(fmt.encode_entry(_tensor, 0, 0))
    ENTRY_AT.append((_at, _nbytes))
    _at += _nbytes


def hostile():
    """(what, bytes) of files that must be refused."""
    for huge in HUGE:
        yield f"count {huge}", patched(57, "Q", huge)
        yield f"metadata length {huge}", patched(65, "Q", huge)
        yield f"both {huge}", patched(57, "QQ", huge, huge)
        for index, (at, nbytes) in enumerate(ENTRY_AT):
            end = at + nbytes
            yield f"offset {huge} of {index}", patched(end - 24, "Q", huge)
            yield f"data_offset {huge} of {index}", patched(end - 16, "Q", huge)
            yield f"data_length {huge} of {index}", patched(end - 8, "Q", huge)
            yield f"all three {huge} of {index}", patched(end - 24, "QQQ", huge, huge, huge)
        for index, record in enumerate(FILE.records):
            yield f"header size {huge} of {index}", patched(record.entry.offset, "Q", huge)
            yield f"header data_length {huge} of {index}", patched(record.entry.data_offset - 8, "Q", huge)
            both = bytearray(patched(record.entry.data_offset - 8, "Q", huge))
            struct.pack_into("<Q", both, sum(ENTRY_AT[index]) - 8, huge)
            yield f"data_length {huge} in both of {index}", bytes(both)
    for small in range(17):
        yield f"header size {small}", patched(FILE.records[0].entry.offset, "Q", small)
    first, second, _ = (record.entry for record in FILE.records)
    at = sum(ENTRY_AT[1]) - 24
    yield "second record lies on the first", patched(at, "QQQ", first.offset, first.data_offset, second.data_nbytes)
    yield "record in the prologue", patched(at, "Q", 0)
    yield "record in the index", patched(at, "QQ", 80, 80 + second.data_offset - second.offset)
    yield "payload before its header", patched(at, "QQ", second.data_offset, second.offset)
    yield "payload over the next record", patched(at + 16, "Q", second.data_nbytes + 1)
    yield "record at the end of the file", patched(at, "QQ", len(SMALL), len(SMALL))
    yield "record in the last bytes", patched(at, "QQ", len(SMALL) - 4, len(SMALL))
    swapped = fmt.write_file(as_reference(VALUES), index_nbytes=150)
    one, other = ENTRY_AT[0], ENTRY_AT[1]
    entries = swapped[one[0] : sum(one)], swapped[other[0] : sum(other)]
    yield "index out of file order", swapped[: one[0]] + entries[1] + entries[0] + swapped[sum(other) :]
    yield "count 0", patched(57, "Q", 0)
    yield "metadata length 0", patched(65, "Q", 0)
    for length in (1, 20, 60):
        yield f"metadata length {length}", patched(65, "Q", length)


HOSTILE = dict(hostile())


@pytest.mark.parametrize("options", [{}, {"lazy_load": True}, {"mmap": True}], ids=["eager", "lazy", "mapped"])
def test_hostile_lengths_counts_and_offsets_are_refused_in_little_time_and_memory(tmp_path, options):
    folder = tmp_path if options.get("mmap") else None
    with memory.peak_growth() if memory.can_measure() else contextlib.nullcontext(memory.Growth()) as growth:
        for what, data in list(HOSTILE.items())[:: 3 if folder else 1]:
            result = attempt(data, folder, **options)
            assert isinstance(result, FAMILY), f"{what}: was read: {list(result)}"
    assert growth.peak < 64 * memory.MIB + 100 * len(SMALL)


def one_tensor(entry: bytes, header: bytes, payload: bytes) -> bytes:
    """A file with one tensor, whose index entry and header are what they are."""
    index = entry.ljust(100, b"\0")
    return fmt.encode_prologue(1, 0, 24, 1, len(index)) + index + header + payload + bytes(8)


HONEST = fmt.Tensor(("a",), "<f4", (2, 3), bytes(range(24)))
RECORD_AT = fmt.PROLOGUE_NBYTES + 100


def disagreeing(**changes):
    """A file whose index describes other tensors than its headers do."""
    in_header, in_index = (
        fmt.dataclasses.replace(HONEST, **{k.removeprefix(of): v for k, v in changes.items() if k.startswith(of)})
        for of in ("header_", "index_")
    )
    header = fmt.encode_header(in_header)
    return one_tensor(fmt.encode_entry(in_index, RECORD_AT, RECORD_AT + len(header)), header, in_header.payload)


def damaged_header(change) -> bytes:
    """A file with one tensor whose header went through ``change`` and has its size fields put right again."""
    header = bytearray(fmt.encode_header(HONEST))
    change(header)
    header[:8] = struct.pack("<Q", len(header))
    entry = fmt.encode_entry(HONEST, RECORD_AT, RECORD_AT + len(header))
    return one_tensor(entry, bytes(header), HONEST.payload)


@pytest.mark.parametrize(
    "changes",
    [
        {"index_shape": (3, 2)},
        {"index_shape": (6,)},
        {"index_shape": (2, 3, 1)},
        {"index_shape": (2, 2)},
        {"index_shape": ()},
        {"index_shape": (0,)},
        {"index_dtype": "<i4"},
        {"index_dtype": "<f2"},
        {"index_dtype": "<V4\0torch.float32x"},
        {"index_path": ("b",)},
        {"index_path": ("a", 0)},
        {"index_data": bytes(23)},
        {"index_data": bytes(20)},
        {"index_data": None},
        {"header_data": None},
        {"header_shape": (2, 4)},
        {"header_shape": (1 << 20, 3)},
        {"header_dtype": "<f8"},
    ],
    ids=repr,
)
def test_an_index_that_disagrees_with_the_header_is_refused(changes):
    data = disagreeing(**changes)
    for options in WAYS.values():
        error = assert_refused(data, **options)
        assert isinstance(error, errors.FormatError)
        if "index_path" not in changes:
            assert "a" in str(error)


@pytest.mark.parametrize(
    "tensor_",
    [
        fmt.Tensor(("a",), "<f4", ((1 << 32) - 1,) * 8, bytes(16)),
        fmt.Tensor(("a",), "<f8", (1 << 31, 1 << 31), bytes(16)),
        fmt.Tensor(("a",), "<f4", ((1 << 32) - 1,) * 255, bytes(16)),
        fmt.Tensor(("a",), "|u1", (17,), bytes(16)),
        fmt.Tensor(("a",), "|u1", (1 << 62,), bytes(16)),
        fmt.Tensor(("a",), "|u1", ((1 << 64) - 1,), bytes(16)),
        fmt.Tensor(("a",), "|u1", (1 << 63,), bytes(16)),
        fmt.Tensor(("a",), "|u1", (1 << 32, 1 << 32), bytes(16)),
        fmt.Tensor(("a",), "<f4", ((1 << 32) - 1,) * 8, None),
        fmt.Tensor(("a",), "|u1", (1 << 62,), None),
        fmt.Tensor(("a",), "|u1", ((1 << 64) - 1,), None),
        fmt.Tensor(("a",), "|u1", ((1 << 63), 2), None),
        fmt.Tensor(("a",), "<c16", (1 << 40, 1 << 19), None),
    ],
    ids=lambda t: f"{t.dtype}{t.shape[:3]}{'meta' if t.data is None else ''}",
)
def test_a_shape_that_no_payload_and_no_memory_can_hold_is_refused(tensor_):
    data = fmt.write_file([tensor_], index_nbytes=None)
    for options in WAYS.values():
        assert_refused(data, **options)


@pytest.mark.parametrize(
    "shape", [(1,) * 65, (1,) * 255, (0,) * 200, (1 << 63, 0), ((1 << 64) - 1, 0)], ids=lambda s: str(s[:2])
)
def test_a_shape_that_torch_cannot_have_is_refused_or_read_but_no_crash(shape):
    count = 1
    for dimension in shape:
        count *= dimension
    data = fmt.write_file([fmt.Tensor(("a",), "|u1", shape, bytes(count))], index_nbytes=None)
    for options in WAYS.values():
        result = attempt(data, **options)
        if not isinstance(result, FAMILY):
            assert tuple(result["a"].shape) == shape


def test_data_that_only_the_index_vouches_for_are_refused_where_no_memory_can_hold_them():
    """The object does not say how long it is, so the claim cannot be compared with anything but memory."""

    class Endless(io.BytesIO):
        def seek(self, offset: int, whence: int = 0) -> int:
            if whence == 2:
                raise OSError("no end")
            return super().seek(offset, whence)

    honest = fmt.Tensor(("a",), "|u1", (16,), bytes(16))
    data = fmt.write_file([honest], index_nbytes=None)
    assert data.count(struct.pack("<Q", 16)) == 3  # in prologue, index and header
    claimed = data.replace(struct.pack("<Q", 16), struct.pack("<Q", 1 << 61))
    assert load(Endless(data))["a"].numel() == 16
    with pytest.raises(errors.FormatError, match=r"Endless.*: tensor 'a' .* more than memory can be"):
        load(Endless(claimed))
    planned = data.replace(struct.pack("<Q", 16), struct.pack("<Q", 1 << 46))  # address space would do
    with pytest.raises(errors.FormatError, match="in a source of unknown size"):
        load(Endless(planned))


HASH_BLOCK_AT = 8 + 2 + 1 + 2 + 1 + 1 + 3 + 1 + 8


@pytest.mark.parametrize(
    ("at", "values"),
    [
        (HASH_BLOCK_AT, [0, 1, 40, 42, 60, 255, 256, 65_535]),
        (HASH_BLOCK_AT + 2, [3, 7, 255]),
        (HASH_BLOCK_AT + 3, [2, 9, 255]),
        (HASH_BLOCK_AT + 4, [38, 60, 255]),
        (11, [0, 2, 3, 30, 255]),
        (14, [0, 1, 2, 4, 30, 255]),
        (18, [0, 1, 3, 30, 255]),
        (10, [3, 9, 255]),
    ],
)
def test_a_header_whose_inner_lengths_lie_is_refused(at, values):
    width = 2 if at == HASH_BLOCK_AT else 1
    for value in values:
        lie = value.to_bytes(width, "little")
        assert_refused(damaged_header(lambda header, lie=lie: header.__setitem__(slice(at, at + width), lie)))
    assert_refused(damaged_header(lambda header: header.__delitem__(slice(20, 24))))


def test_the_honest_twins_of_the_lying_files_load():
    for honest in (disagreeing(), damaged_header(lambda header: None)):
        assert samples.raw(load(io.BytesIO(honest), verify_hash=True)["a"]) == bytes(range(24))


# --- whole files ----------------------------------------------------------------------------------------------------


def not_tensors():
    yield "empty", b""
    yield "one byte", b"|"
    yield "magic alone", fmt.MAGIC
    yield "zeros", bytes(100_000)
    yield "text", b"hello world\n" * 1000
    yield "random", samples.stream(100_000, "noise")
    yield "random behind the magic", fmt.MAGIC + samples.stream(100_000, "noise")
    yield "random behind a version", SMALL[:41] + samples.stream(100_000, "noise")
    yield "compressed", gzip.compress(SMALL, mtime=0)
    yield "shifted", b"\0" + SMALL
    yield "pickle", b"\x80\x02}q\x00."
    yield "zip", b"PK\x03\x04" + bytes(1000)
    yield "prologue of zeros", fmt.MAGIC + bytes(1000)


@pytest.mark.parametrize(("what", "data"), list(not_tensors()), ids=[what for what, _ in not_tensors()])
def test_what_is_no_tensors_file_is_a_value_error_that_names_it(tmp_path, what, data):
    for options in ({}, {"lazy_load": True}, {"mmap": True}):
        error = assert_refused(data, tmp_path, **options)
        assert isinstance(error, ValueError)
        assert "bad.tensors" in f"{error} {getattr(error, 'source', '')}"


def test_devices_are_refused_without_a_hang():
    for name in ("/dev/null", "/dev/zero"):
        begin = time.monotonic()
        with pytest.raises(FAMILY):
            TensorDeserializer(name, device="cpu")
        assert time.monotonic() - begin < SECONDS


@pytest.mark.parametrize("version", [0, 6, 7, 255, 1 << 31, (1 << 32) - 1])
def test_an_unknown_version_says_which_one_it_is(version):
    error = assert_refused(patched(5, "I", version))
    assert isinstance(error, errors.InvalidVersionError)
    assert isinstance(error, ValueError)
    assert error.version == version
    assert str(version) in str(error)


@pytest.mark.parametrize("bit", [1, 2, 3, 7, 8, 31, 64, 128, 255])
def test_an_unknown_feature_flag_is_refused_in_every_version(bit):
    for version in (1, 2, 4, 5):
        if bit == 1 and version == 5:
            continue
        data = SMALL[:5] + struct.pack("<I", version) + (1 << bit).to_bytes(32, "little") + SMALL[41:]
        assert isinstance(assert_refused(data), errors.FormatError)


def test_a_count_larger_than_the_entries_of_a_zero_padded_index_is_refused():
    data = fmt.write_file(as_reference(VALUES))
    for count in (4, 5, 1000, 262_144 // 29, 262_144):
        assert_refused(data[:57] + struct.pack("<Q", count) + data[65:])


def test_many_entries_that_share_one_name_or_payload_are_refused_quickly():
    tensors = [fmt.Tensor((f"n{i % 20_000}",), "|u1", (1,), b"x", hashes=()) for i in range(20_001)]
    pieces = [fmt.encode_entry(t, 2_000_000 + 50 * i, 2_000_030 + 50 * i) for i, t in enumerate(tensors)]
    index = b"".join(pieces)
    data = fmt.encode_prologue(1, 0, 1, len(tensors), len(index)) + index
    assert_refused(data.ljust(4_000_000, b"\0"))
    same_place = b"".join(fmt.encode_entry(t, 2_000_000, 2_000_030) for t in tensors[:-1])
    data = fmt.encode_prologue(1, 0, 1, len(tensors) - 1, len(same_place)) + same_place
    assert_refused(data.ljust(4_000_000, b"\0"))


def test_the_deepest_possible_name_is_read_without_recursion():
    path = (0,) * 32_000
    data = fmt.write_file([fmt.Tensor(path, "|u1", (1,), b"x")], index_nbytes=None)
    with TensorDeserializer(io.BytesIO(data), device="cpu") as deserializer:
        ((_, _, name, value),) = deserializer.read_tensors()
        assert name == path
        found = deserializer.tree()
        for _ in path:
            (found,) = found
        assert found is value
        found = deserializer
        for _ in path:
            found = found[0]
        assert found is value
        assert deserializer.tree(path) is value


@pytest.fixture
def little_memory():
    """The test has to do with 64 MiB."""
    if not memory.can_measure():
        pytest.skip("the peak of the resident set cannot be measured here")
    with memory.peak_growth() as growth:
        yield
    assert growth.peak < 64 * memory.MIB


def test_hostile_sizes_need_little_memory(tmp_path, little_memory):
    claims = fmt.Tensor(("a",), "|u1", (1 << 36,), bytes(16))
    entry = fmt.encode_entry(claims, 600, 700)
    entry = entry[:-8] + struct.pack("<Q", 1 << 36)
    data = fmt.encode_prologue(1, 0, 0, 1, 500) + entry.ljust(500, b"\0") + fmt.encode_header(claims) + bytes(300)
    for options in WAYS.values():
        assert_refused(data, tmp_path, **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": torch.float16}, {"dtype": torch.bfloat16, "lazy_load": True}, {"verify_hash": True}],
    ids=repr,
)
def test_zeros_that_a_file_claims_take_no_memory_until_they_are_written_to(options, little_memory):
    value = read_all(io.BytesIO(claimed_zeros()), **options)["z"]
    assert (value.shape, value.dtype) == ((1 << 32,), options.get("dtype", torch.float32))
    assert value[-1] == 0


def test_an_encrypted_load_that_fails_wipes_only_what_it_filled(little_memory):
    data = claimed_zeros(encryption=EncryptionParams.random())
    begin = time.monotonic()
    with pytest.raises(errors.CryptographyError):
        load(io.BytesIO(data), encryption=DecryptionParams.from_key(bytes(32)))
    assert time.monotonic() - begin < SECONDS


def claimed_zeros(**options):
    """A small file with a tensor of 16 GiB that holds no data, behind one of three elements."""
    return samples.state_dict_bytes({"a": torch.ones(3), "z": torch.empty(1 << 32, device="meta")}, **options)


@pytest.mark.parametrize(
    "golden",
    [g for g in golden_files.select(refused=False, encrypted=False) if g["name"].startswith("c-")],
    ids=golden_files.name_of,
)
def test_a_constructed_golden_file_survives_no_single_bit_of_damage_silently(golden):
    data = golden_files.read(golden)
    start = golden.get("start", 0)
    wanted = {tuple(t["path"]): golden_files.content(t) for t in golden["tensors"]}
    ends = [r.entry.data_offset + len(r.payload) for r in fmt.read_file(data, start).records]
    positions = range(start, max(ends))
    step = max(1, len(positions) // 150)
    for at in list(positions)[::step]:
        changed = bytearray(data)
        changed[at] ^= 1 << (at % 8)
        source = io.BytesIO(changed)
        source.seek(start)
        try:
            found = read_all(source, verify_hash=True)
        except NEVER as error:
            pytest.fail(f"byte {at}: {error!r}")
        except FAMILY:
            continue
        unhashed = {r.path for r in fmt.read_file(data, start).records if not r.header.hashes}
        for name, value in found.items():
            path = (name,) if isinstance(name, str) else name
            if path not in unhashed and path in wanted:
                assert samples.raw(value) == wanted[path], f"byte {at}"


@pytest.mark.parametrize("over", ["a sparse file", "HTTP"])
def test_an_index_that_claims_more_than_makes_sense_takes_no_memory_for_it(over, tmp_path, fresh_process):
    """A prologue of 200 GiB of index: of zeros, and behind an entry that is right."""
    path = samples.write_state_dict(tmp_path / "f.tensors", {"a": torch.arange(5)})
    head = bytearray(path.read_bytes()[:4096])
    head[65:73] = struct.pack("<Q", 200 << 30)
    program = """
import resource, sys
from tensorizer import TensorDeserializer
from tensorizer.errors import FormatError
resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))
for source in sys.argv[1:]:
    try:
        TensorDeserializer(source, device="cpu")
    except FormatError as error:
        assert str(error).startswith(source), error
        print("refused")
"""
    contents = ((b"\0" * (4096 - 73), 1), (bytes(head[73:]), 1), (bytes(head[73:]), 1 << 32))
    begins = [bytes(head[:57] + struct.pack("<Q", count) + head[65:73] + entries) for entries, count in contents]

    def answer(request):
        begin = begins[int(request.target.rpartition("/")[2])]
        first, last = request.range
        last = first + (64 << 20) - 1 if last is None else last
        body = begin[first : last + 1].ljust(last + 1 - first, b"\0")
        return Reply(status=206, body=body, headers={"Content-Range": f"bytes {first}-{last}/{300 << 30}"})

    paths = [tmp_path / f"{number}.tensors" for number in range(3)]
    for path, begin in zip(paths, begins):
        with path.open("wb") as file:
            file.write(begin)
            file.truncate(300 << 30)
    with FaultyServer(b"\0" * 1000, default=answer) as server:
        # A GiB of each is read, so each is read from one place only.
        places = [f"{server.url.rpartition('/')[0]}/1"] if over == "HTTP" else [paths[0], paths[2]]
        done = fresh_process(program, *places)
    assert (done.returncode, done.stdout) == (0, "refused\n" * len(places)), done.stderr


def test_a_dtype_that_torch_lacks_is_refused_by_file_and_tensor_on_every_way(tmp_path):
    file = tmp_path / "x.tensors"
    module = torch.nn.Module()
    module.bad = torch.nn.Parameter(torch.zeros(8))

    def opened(**options):
        return TensorDeserializer(file, **{"device": "cpu", **options})

    def part():
        with opened(lazy_load=True) as found:
            return found.get_slice("bad")[:1]

    ways = {
        "eager": opened,
        "mapped": lambda: opened(mmap=True),
        "lazy": lambda: opened(lazy_load=True)["bad"],
        "converted": lambda: opened(dtype=torch.float16),
        "meta": lambda: opened(device="meta"),
        "arrays": lambda: list(opened(lazy_load=True).read_numpy_arrays()),
        "load_file": lambda: tensorizer.torch.load_file(file),
        "load_state_dict": lambda: module.load_state_dict(opened(lazy_load=True)),
        "load_into_module": lambda: opened(lazy_load=True).load_into_module(module),
        "slice": part,
    }
    for dtype, words in (("<V4\0torch.foo", "no dtype 'torch.foo'"), (">f4", "foreign byte order")):
        good = fmt.Tensor(("good",), "<f4", (8,), bytes(32))
        file.write_bytes(fmt.write_file([good, fmt.Tensor(("bad",), dtype, (8,), bytes(32))]))
        for way, load_it in ways.items():
            with pytest.raises(errors.FormatError) as caught:
                load_it()
            assert str(caught.value).startswith(f"{file}: tensor 'bad': stored dtype"), (way, caught.value)
            assert words in str(caught.value), way
            assert caught.value.source == str(file), way


def test_zeros_beyond_all_memory_and_more_dimensions_than_numpy_has_are_refused_by_file_and_tensor(tmp_path):
    file = tmp_path / "x.tensors"
    file.write_bytes(fmt.write_file([fmt.Tensor(("deep",), "<f4", (1,) * 70, bytes(4))]))
    with TensorDeserializer(file, device="cpu") as found:
        assert found["deep"].dim() == 70
        with pytest.raises(errors.FormatError, match=r"x\.tensors: tensor 'deep': .* 70 dimensions") as deep:
            list(found.read_numpy_arrays())
    file.write_bytes(fmt.write_file([fmt.Tensor(("vast",), "<f2", (1 << 25, 1 << 20), b"")]))
    with pytest.raises(errors.FormatError, match=r"x\.tensors: tensor 'vast': claims [0-9]+ bytes of zeros") as vast:
        TensorDeserializer(file, device="cpu", dtype=torch.float64)
    assert deep.value.source == vast.value.source == str(file)


@pytest.mark.parametrize("digits", [4000, 4001, 4300])
def test_an_index_of_4300_digits_is_written_and_read_and_none_of_more(digits):
    name, target = ("a", 10 ** (digits - 1)), samples.KeptBytesIO()
    with TensorSerializer(target) as serializer:
        serializer.write_tensor(0, name, TensorType.STATE_DICT, torch.ones(2))
        before = sys.get_int_max_str_digits() if hasattr(sys, "get_int_max_str_digits") else None
        for limit in (before, 0) if before is not None else (None,):
            try:
                if limit is not None:
                    sys.set_int_max_str_digits(limit)
                with pytest.raises(ValueError, match="at most 4300 digits"):
                    serializer.write_tensor(0, ("b", 10**4300), TensorType.STATE_DICT, torch.ones(2))
            finally:
                if before is not None:
                    sys.set_int_max_str_digits(before)
    with TensorDeserializer(io.BytesIO(target.getvalue()), device="cpu") as found:
        assert [entry.name for entry in found.entries()] == [name]
        assert found.tree(name).tolist() == [1, 1]
