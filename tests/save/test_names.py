"""Names and paths: what may be written, how it is spelled in the file, what is refused on either side."""

from __future__ import annotations

import io
import struct

import pytest
import reference_format as fmt
import samples
import torch
from samples import assert_same, load, state_dict_bytes, tensor

from tensorizer import TensorDeserializer, TensorSerializer, TensorType, errors

ODD_NAMES = [
    "a", ".", "..", "a.b.c", ".weight", " ", "\t", "a\nb", "a\r\n", "a\0b", "\0", "\x7f", '"', "\\", "/", "a/b", "[0]",
    "0", "[1,2]", "é", "日本語", "😀", "\ufeff", "\u2028", "e\u0301", "a" * 1000, "𝔘𝔫𝔦", "\x1f", "a\x1e",
    "\x1e", "\x1eabc", '\x1e["x"]', "\x1e[]", "\x1e[0]", "",
]  # fmt: skip


@pytest.mark.parametrize("lazy_load", [False, True], ids=["eager", "lazy"])
def test_any_string_is_a_key_and_comes_back(lazy_load):
    values = {name: torch.full((2,), float(i)) for i, name in enumerate(ODD_NAMES)}
    assert_same(load(io.BytesIO(state_dict_bytes(values)), lazy_load=lazy_load, verify_hash=True), values)
    nested = {"in": values, "list": [values]}
    assert_same(load(io.BytesIO(state_dict_bytes(nested)), lazy_load=lazy_load), nested)


@pytest.mark.parametrize("name", ODD_NAMES, ids=ascii)
def test_the_stored_spelling_is_that_of_the_format_document(name):
    data = state_dict_bytes({name: tensor()})
    (record,) = fmt.read_file(data).records
    assert record.entry.name == record.header.name == fmt.encode_name((name,))
    data = state_dict_bytes({name: [{name: tensor()}]})
    (record,) = fmt.read_file(data).records
    assert record.entry.name == record.header.name == fmt.encode_name((name, 0, name))


def test_a_name_of_65535_bytes_works_and_a_longer_one_is_refused_before_anything_is_written():
    for name in ("n" * 65_535, "é" * 32_767 + "n"):
        assert list(load(io.BytesIO(state_dict_bytes({name: torch.ones(1)})))) == [name]
    for name in ("n" * 65_536, "é" * 32_768):
        stream = samples.KeptBytesIO()
        with TensorSerializer(stream) as serializer:
            before = stream.getvalue()
            with pytest.raises((ValueError, struct.error)):
                serializer.write_tensor(0, name, TensorType.PARAM, torch.ones(1))
            with pytest.raises((ValueError, struct.error)):
                serializer.write_state_dict({"fine": torch.ones(1), name: torch.ones(1)})
            assert stream.getvalue() == before


def test_a_lone_surrogate_is_stored_or_refused_but_never_written_wrong():
    for structure in ({"a\ud800": tensor()}, {"x": [{"a\ud800": tensor()}]}):
        stream = samples.KeptBytesIO()
        with TensorSerializer(stream) as serializer:
            try:
                serializer.write_state_dict(structure)
            except ValueError:
                continue
        assert_same(load(io.BytesIO(stream.getvalue())), structure)


CONFLICTS = {
    "same name twice": ({"a": 0}, {"a": 0}),
    "leaf below a leaf": ({"a": 0}, {"a": {"b": 0}}),
    "leaf that is a branch": ({"a": {"b": 0}}, {"a": 0}),
    "list after dict": ({"a": 0}, [0]),
    "dict after list": ([0], {"a": 0}),
    "dict after list below": ({"a": [0]}, {"a": {"b": 0}}),
    "list position twice": ([0], [0]),
    "deep name twice": ({"a": {"b": [0]}}, {"a": {"b": [0]}}),
    "one of two names twice": ({"a": 0}, {"b": 0, "a": 0}),
}


def fill(structure):
    if isinstance(structure, dict):
        return {key: fill(value) for key, value in structure.items()}
    if isinstance(structure, list):
        return [fill(value) for value in structure]
    return tensor()


@pytest.mark.parametrize("conflict", CONFLICTS)
def test_names_that_do_not_fit_together_are_refused_over_several_calls(conflict):
    first, second = map(fill, CONFLICTS[conflict])
    stream = samples.KeptBytesIO()
    with TensorSerializer(stream) as serializer:
        serializer.write_state_dict(first)
        before = stream.getvalue()
        with pytest.raises(ValueError):
            serializer.write_state_dict(second)
        assert stream.getvalue() == before
        if isinstance(first, dict):  # a call that was refused leaves its names free
            first["b"] = tensor(seed=1)
            serializer.write_state_dict({"b": first["b"]})
    assert_same(load(io.BytesIO(stream.getvalue())), first)


def test_one_name_twice_through_write_tensor_or_write_module_is_refused():
    with TensorSerializer(io.BytesIO()) as serializer:
        serializer.write_tensor(0, ".weight", TensorType.PARAM, tensor())
        with pytest.raises(ValueError, match="weight"):
            serializer.write_tensor(1, ".weight", TensorType.BUFFER, tensor())
        with pytest.raises(ValueError, match="weight"):
            serializer.write_module(torch.nn.Linear(2, 2))


def test_a_later_call_may_add_to_a_branch_and_module_calls_may_be_mixed_with_dicts():
    stream = samples.KeptBytesIO()
    with TensorSerializer(stream) as serializer:
        serializer.write_state_dict({"a": {"x": tensor()}})
        serializer.write_state_dict({"a": {"y": tensor(seed=1)}, "b": tensor(seed=2)})
        serializer.write_module(torch.nn.Linear(2, 2, bias=False))
    found = load(io.BytesIO(stream.getvalue()))
    assert list(found) == ["a", "b", ".weight"]
    assert list(found["a"]) == ["x", "y"]


# --- spellings that only other writers use --------------------------------------------------------------------------


def file_with_names(index_name: bytes, header_name=None, kind=fmt.STATE_DICT) -> bytes:
    """One tensor whose stored names are given as bytes."""
    header_name = index_name if header_name is None else header_name
    payload = bytes(4)

    def name_field(name):
        return struct.pack("<H", len(name)) + name

    tail = struct.pack("<HB", 1, 0) + struct.pack("<q", 4)
    fields = struct.pack("<HB", 0, kind) + name_field(header_name) + b"\3<f4\0"
    header = struct.pack("<Q", 8 + len(fields) + len(tail)) + fields + tail
    entry_size = 29 + len(index_name) + 3
    at = fmt.PROLOGUE_NBYTES + entry_size
    entry = name_field(index_name) + bytes([kind, 3]) + b"<f4\0" + struct.pack("<QQQ", at, at + len(header), 4)
    return fmt.encode_prologue(1, 0, 4, 1, entry_size) + entry + header + payload + bytes(8)


def read_name(data: bytes):
    with TensorDeserializer(io.BytesIO(data), device="cpu") as deserializer:
        ((_, _, name, _),) = deserializer.read_tensors()
    return name


@pytest.mark.parametrize(
    ("stored", "path"),
    [
        (b'\x1e["x"]', "x"),
        (b'\x1e[""]', ""),
        (b'\x1e["\\u001eabc"]', "\x1eabc"),
        (b'\x1e[ "a" , 3 ,\t"b" ]', ("a", 3, "b")),
        ('\x1e["é",0]'.encode(), ("é", 0)),
        (b'\x1e["\\u00e9\\/\\b\\f\\n\\r\\t\\"\\\\",0]', ('é/\b\f\n\r\t"\\', 0)),
        (b'\x1e["\\ud83d\\ude00",0]', ("😀", 0)),
        (b'\x1e["\\uD83D\\uDE00",0]', ("😀", 0)),
        (b"\x1e[3]", (3,)),
        (b"\x1e[0,0,0]", (0, 0, 0)),
        (b"\x1e[123456789012345678901234567890]", (123456789012345678901234567890,)),
        (b"a\0b", "a\0b"),
        (b"[0]", "[0]"),
    ],
    ids=repr,
)
def test_a_spelling_that_the_format_document_accepts_is_accepted(stored, path):
    assert fmt.decode_name(stored) == ((path,) if isinstance(path, str) else path)
    found = read_name(file_with_names(stored))
    assert found == path
    assert type(found) is type(path)


@pytest.mark.parametrize(
    "stored",
    [
        b"", b"\xff", b"a\xc3", b"\xed\xa0\x80", b"\xc0\x80",
        b"\x1e", b"\x1e[", b"\x1e]", b"\x1e[]", b"\x1e[ ]", b'\x1e"a"', b"\x1e3", b'\x1e{"a":1}', b"\x1e[1.0]",
        b"\x1e[1e3]", b"\x1e[-1]", b"\x1e[-0]x", b"\x1e[NaN]", b"\x1e[Infinity]", b"\x1e[null]", b"\x1e[[1]]",
        b'\x1e[{"a":1}]',
        b'\x1e["a"', b'\x1e["a",]', b"\x1e[,]", b'\x1e["a" "b"]', b"\x1e['a']", b"\x1e[a]", b"\x1e[01]", b"\x1e[+1]",
        b"\x1e[0x1]",
        b'\x1e["a"]x', b'\x1e ["a"]', b'\x1e["a"] ', b'\x1e["a\nb"]', b'\x1e["a",\n3]', b'\x1e["a"\r]', b'\x1e["a\tb"]',
        b'\x1e["\x00"]', b'\x1e["\\x41"]', b'\x1e["\\u12"]', b'\x1e["\\u12G4"]', b'\x1e["\\"]', b'\x1e["\xff"]',
        b"\x1e" + b"[" * 30_000 + b"]" * 30_000, b"\x1e[" + b"[" * 60_000 + b"]", b"\x1e[" + b"9" * 65_000 + b",]",
    ],
    ids=lambda stored: ascii(stored[:12]),
)  # fmt: skip
def test_a_spelling_that_the_format_document_refuses_is_refused(stored):
    with pytest.raises(ValueError):
        fmt.decode_name(stored)
    with pytest.raises(errors.FormatError):
        read_name(file_with_names(stored))
    with pytest.raises(errors.FormatError):
        read_name(file_with_names(b"fine", stored))


def test_index_and_header_may_spell_one_name_differently_and_must_name_the_same():
    assert read_name(file_with_names(b"x", b'\x1e["x"]')) == "x"
    assert read_name(file_with_names(b'\x1e["x"]', b"x")) == "x"
    assert read_name(file_with_names(b'\x1e["a",1]', b'\x1e[ "a", 1 ]')) == ("a", 1)
    for one, other in ((b"x", b"y"), (b'\x1e["a",1]', b'\x1e["a",2]'), (b"a", b'\x1e["a",0]'), (b"1", b"\x1e[1]")):
        with pytest.raises(errors.FormatError):
            read_name(file_with_names(one, other))


@pytest.mark.parametrize("kind", [fmt.PARAMETER, fmt.BUFFER])
def test_a_structured_name_needs_a_state_dict_entry_except_for_a_single_string(kind):
    assert read_name(file_with_names(b'\x1e["x"]', kind=kind)) == "x"
    for stored in (b'\x1e["x",0]', b"\x1e[0]"):
        with pytest.raises(errors.FormatError):
            read_name(file_with_names(stored, kind=kind))


def file_of_paths(*paths) -> bytes:
    return fmt.write_file([fmt.Tensor(path, "<f4", (), bytes(4)) for path in paths], index_nbytes=None)


@pytest.mark.parametrize(
    "paths",
    [
        [("a",), ("a",)],
        [("a",), ("b",), ("a",)],
        [("a", 0), ("a", 0)],
        [("a",), ("a", "b")],
        [("a", "b"), ("a",)],
        [("a", "b", "c"), ("a", "b")],
        [("a",), (0,)],
        [(0,), ("a",)],
        [("a", 0), ("a", "b")],
        [("a", "b"), ("a", 0)],
        [("a", "a"), ("a", "a", "a")],
    ],
    ids=repr,
)
def test_an_index_whose_paths_do_not_form_a_tree_is_refused(paths):
    data = file_of_paths(*paths)
    with pytest.raises(errors.FormatError):
        TensorDeserializer(io.BytesIO(data), device="cpu")
    with pytest.raises(fmt.BadFile):
        fmt.read_file(data)


@pytest.mark.parametrize(
    "paths",
    [
        [("a",), ("b", 0), ("b", 1, "c"), ("d", "0")],
        [("a", 3), ("a", 1)],
        [("x", "y"), ("z",), ("x", "z")],
        [(5,), (0, "a")],
    ],
    ids=repr,
)
def test_an_index_whose_paths_form_a_tree_is_read_in_file_order(paths):
    with TensorDeserializer(io.BytesIO(file_of_paths(*paths)), device="cpu") as deserializer:
        names = [name for _, _, name, _ in deserializer.read_tensors()]
        assert [(name,) if isinstance(name, str) else name for name in names] == paths
        if paths[0] == ("a", 3):  # positions with holes close up in the tree
            assert list(deserializer["a"]) == [3, 1]
            found = deserializer.tree()["a"]
            assert len(found) == 2
            assert found[0] is deserializer["a"][1]
            assert found[1] is deserializer["a"][3]
