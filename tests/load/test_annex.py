"""Metadata and ties inside ``.tensors`` files: what is written, what comes back, what is refused."""

from __future__ import annotations

import io
import json
import os

import pytest
import reference_auth as auth
import reference_format as fmt
import samples
import torch
from samples import KeptBytesIO, same, tensor
from torch import nn

from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer, TensorType
from tensorizer.errors import CryptographyError, FormatError, HashMismatchError

METADATA, TIES, SEALED, DIGEST = 1, 2, 3, 4


def module_bytes(module, **options) -> bytes:
    stream = KeptBytesIO()
    samples.write_module(stream, module, options=options)
    return stream.getvalue()


def opened(data, **options):
    return TensorDeserializer(io.BytesIO(data), device="cpu", **options)


both_ties = pytest.mark.parametrize("ties", ["once", "twice"])


# --- what is written -------------------------------------------------------------------------------------------------


def test_files_without_ties_and_metadata_have_no_annex_and_are_the_bytes_they_always_were():
    content = {"a": tensor((3,)), "b": tensor((4,), torch.bfloat16)}
    plain = samples.state_dict_bytes(content)
    assert samples.state_dict_bytes(content, metadata={}, ties="once") == plain
    file = fmt.read_file(plain)
    assert not any(file.index_slack)
    assert fmt.rewrite(file) == plain


def test_the_annex_is_the_oracles_to_the_byte():
    shared = tensor((5,))
    metadata = {"a": "1", 'q"\\\n\x01é': "\U0001f600\t", "": ""}
    for ties in ("twice", "once"):
        data = samples.state_dict_bytes({"x": shared, "y": {"z": shared}}, metadata=metadata, ties=ties)
        file = fmt.read_file(data)
        assert fmt.rewrite(file) == data
        assert [kind for kind, _, _ in file.annex] == [METADATA, TIES, DIGEST]
        assert json.loads(file.annex[0][2]) == metadata
        assert json.loads(file.annex[1][2]) == {'\x1e["y","z"]': "x"}
        assert len(file.records) == (2 if ties == "twice" else 1)


def test_ties_are_tensors_over_the_same_memory_in_the_same_layout_and_nothing_else():
    base = torch.arange(12.0)
    content = {
        "a": base,
        "same": base.view(12),
        "shape": base.view(3, 4),
        "part": base[:6],
        "strided": base[::2],
        "bits": base.view(torch.int32),
        "equal": base.clone(),
        "empty": base[:0],
        "empty too": base[:0],
        "meta": torch.empty(12, device="meta"),
        "meta too": torch.empty(12, device="meta"),
    }
    with opened(samples.state_dict_bytes(content)) as found:
        assert found.ties == {"same": "a"}
    module = nn.Module()
    module.first, module.second = nn.Linear(2, 2), nn.Linear(2, 2)
    module.second.register_buffer("alias", module.first.weight.detach())  # a buffer is no parameter
    with opened(module_bytes(module)) as found:
        assert found.ties == {}


@both_ties
def test_once_writes_one_copy_and_twice_two(ties):
    model = samples.net()
    file = fmt.read_file(module_bytes(model, ties=ties))
    tied = [record for record in file.records if record.path[0] in ("embed.weight", "head.weight")]
    assert [record.path[0] for record in tied] == ["embed.weight", "head.weight"][: 1 if ties == "once" else 2]
    assert {len(record.payload) for record in tied} == {model.embed.weight.nbytes}
    assert all(record.hashes_hold() for record in file.records)


def test_a_file_that_grows_keeps_its_annex_complete(tmp_path):
    path = tmp_path / "grown.tensors"
    with TensorSerializer(path, metadata={"step": "x" * 5000}, ties="once") as serializer:
        for step in range(4):
            shared = tensor((step + 1,), seed=step)
            serializer.write_state_dict({f"{step}.a": shared, f"{step}.b": shared})
            serializer.write_tensor(0, f"{step}.c", TensorType.PARAM, tensor((2,)))
    data = path.read_bytes()
    assert fmt.rewrite(fmt.read_file(data)) == data
    with TensorDeserializer(path, device="cpu", verify_hash=True) as found:
        assert found.ties == {f"{step}.b": f"{step}.a" for step in range(4)}
        assert found.metadata == {"step": "x" * 5000}


def test_an_alias_keeps_its_name_from_other_tensors():
    shared = tensor((3,))
    with TensorSerializer(KeptBytesIO(), ties="once") as serializer:
        serializer.write_state_dict({"a": shared, "b": shared})
        with pytest.raises(ValueError, match="b"):
            serializer.write_state_dict({"b": tensor((1,))})
        serializer.write_state_dict({"c": tensor((1,))})


def test_a_failed_call_leaves_no_tie_behind():
    stream, shared = KeptBytesIO(), tensor((3,))
    with TensorSerializer(stream, ties="once") as serializer:
        serializer.write_state_dict({"a": shared})
        with pytest.raises(ValueError, match="a"):
            serializer.write_state_dict({"x": shared, "y": shared, "a": shared[:1]})
        serializer.write_state_dict({"y": tensor((1,))})
    with opened(stream.getvalue()) as found:
        assert (found.ties, list(found)) == ({}, ["a", "y"])


@both_ties
def test_removed_tensors_are_removed_under_all_their_names(ties):
    model = samples.net()
    samples.write_module(KeptBytesIO(), model, options={"ties": ties}, remove_tensors=True)
    assert not list(model.parameters())
    assert model.head.weight is None


# --- what comes back -------------------------------------------------------------------------------------------------

WAYS = {
    "eager": {},
    "verified": {"verify_hash": True},
    "lazy": {"lazy_load": True},
    "one reader": {"num_readers": 1},
    "cast": {"dtype": torch.float64},
}


@both_ties
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("eager_and_lazy")
def test_tied_names_are_one_tensor_and_tied_again_in_a_module(ties, way):
    model = samples.net()
    data = module_bytes(model, ties=ties)
    with opened(data, **WAYS[way]) as found:
        assert set(found) == set(samples.module_names(model))
        assert found["head.weight"] is found["embed.weight"]
        assert found.tree()["head.weight"] is found["head.weight"]
        rows = {name: value for _, _, name, value in found.read_tensors()}
        assert rows["head.weight"] is rows["embed.weight"]
        assert {entry.name for entry in found.entries()} == set(found)
    target = samples.Net()
    assert opened(data, **WAYS[way]).load_into_module(target) == len(samples.module_names(model))
    assert target.head.weight is target.embed.weight
    assert torch.equal(target.head.weight, model.head.weight)


@pytest.mark.usefixtures("eager_and_lazy")
def test_modules_that_were_not_tied_are_tied_by_the_file_on_the_meta_device_too():
    data = module_bytes(samples.net(), ties="once")
    target = samples.Net()
    target.head.weight = nn.Parameter(torch.zeros(6, 4))
    opened(data).load_into_module(target)
    assert target.head.weight is target.embed.weight
    with torch.device("meta"):
        empty = samples.Net()
    opened(data).load_into_module(empty)
    assert empty.head.weight is empty.embed.weight
    assert not [name for name, value in empty.named_parameters() if value.is_meta]


@both_ties
def test_a_tied_name_alone_brings_the_data_and_is_verified(ties):
    model = samples.net()
    data = module_bytes(model, ties=ties)
    with opened(data, filter_func="head.weight".__eq__) as found:
        assert list(found) == ["head.weight"]
        assert same(found["head.weight"], model.embed.weight)
    with opened(data, lazy_load=True) as found:
        arrays = {row[2]: row[3] for row in found.read_numpy_arrays("head.weight".__eq__)}
        assert arrays["head.weight"].tobytes() == samples.raw(model.embed.weight)
    with opened(data, lazy_load=True) as found:
        streamed = {row[2]: row[3] for row in found.read_tensors(cache=False)}
        assert same(streamed["head.weight"], model.embed.weight)
    with opened(data) as found:
        assert found.verify_module(model) == (True, [(name, True) for name in found])


def test_metadata_of_encrypted_files_is_sealed_and_ties_are_not():
    encryption = EncryptionParams.random()
    data = module_bytes(samples.net(), metadata={"secret": "words"}, encryption=encryption)
    file = fmt.read_file(data)
    assert [kind for kind, _, _ in file.annex] == [TIES, SEALED, auth.RECORDS, DIGEST, auth.TAG]
    assert b"words" not in data
    key = DecryptionParams.from_key(encryption.key)
    for lazy in (True, False):
        found = opened(data, encryption=key, lazy_load=lazy)
        assert found.metadata == {"secret": "words"}
        assert found.ties == {"head.weight": "embed.weight"}
        found.close()
        assert found.metadata == {"secret": "words"}
    closed = opened(data, encryption=key, lazy_load=True)
    closed.close()
    with pytest.raises(RuntimeError, match="closed"):
        closed.metadata  # noqa: B018
    wrong = DecryptionParams.from_key(os.urandom(32))
    data = auth.as_before(data, encryption.key)
    with opened(data, encryption=wrong, lazy_load=True) as found, pytest.raises(CryptographyError, match="metadata"):
        found.metadata  # noqa: B018


def test_metadata_is_sealed_with_the_key_of_a_passphrase_too():
    encryption = EncryptionParams.from_string("open sesame")
    data = samples.state_dict_bytes({"a": tensor((3,))}, metadata={"k": "v"}, encryption=encryption)
    with opened(data, encryption=DecryptionParams.from_string("open sesame")) as found:
        assert found.metadata == {"k": "v"}


def test_each_sealing_has_a_nonce_of_its_own(tmp_path):
    nonces = set()
    path = tmp_path / "f.tensors"
    with TensorSerializer(path, metadata={"k": "v"}, encryption=EncryptionParams.random()) as serializer:
        for step in range(5):
            serializer.write_state_dict({str(step): tensor((1,))})
            (sealed,) = (body for kind, _, body in fmt.read_file(path.read_bytes()).annex if kind == SEALED)
            nonces.add(sealed[20:44])
    assert len(nonces) == 5


# --- what is refused -------------------------------------------------------------------------------------------------


def text(value) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def entry(name, data=b"abcd", **fields):
    return fmt.Tensor((name,) if isinstance(name, str) else name, "|u1", (4,), data, **fields)


def with_sections(sections, tensors=None) -> bytes:
    return fmt.write_file(tensors or [entry("a"), entry("b")], index_nbytes=4096, annex=sections)


BAD = {
    "alias to nothing": ([(TIES, 0, text({"x": "y"}))], "no tensor 'y'"),
    "alias chain": ([(TIES, 0, text({"x": "a", "z": "x"}))], "no tensor 'x'"),
    "chain of listed names": ([(TIES, 0, text({"a": "b", "x": "a"}))], "an alias itself"),
    "alias of itself": ([(TIES, 0, text({"a": "a"}))], "an alias itself"),
    "alias twice": ([(TIES, 0, b'{"x":"a","x":"b"}')], "twice"),
    "alias twice in two spellings": ([(TIES, 0, b'{"x":"a","\\u001e[\\"x\\"]":"b"}')], "twice"),
    "alias below a tensor": ([(TIES, 0, text({'\x1e["a","b"]': "b"}))], "a"),
    "alias that is no name": ([(TIES, 0, text({"": "a"}))], ""),
    "ties that are a list": ([(TIES, 0, b"[]")], "expected '{'"),
    "ties of numbers": ([(TIES, 0, b'{"x":1}')], "ties"),
    "metadata that is cut": ([(METADATA, 0, b'{"a":"b"')], "metadata"),
    "metadata twice": ([(METADATA, 0, b"{}"), (METADATA, 0, b"{}")], "twice"),
    "unknown section that must be known": ([(9, 1, b"")], "type 9"),
    "sealed and clear metadata": ([(METADATA, 0, b"{}"), (SEALED, 0, b"x" * 80)], "both"),
    "an empty seal": ([(SEALED, 0, b"")], "without content"),
    "a digest of 31 bytes": ([(DIGEST, 0, bytes(31))], "31 bytes"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_wrong_annex_is_refused_with_a_reason(what):
    sections, words = BAD[what]
    with pytest.raises(FormatError) as caught:
        opened(with_sections(sections))
    assert words in str(caught.value)


def test_an_alias_that_is_listed_must_be_what_its_target_is():
    tie = [(TIES, 0, text({"b": "a"}))]
    for other in (
        entry("b", None),
        fmt.Tensor(("b",), "|i1", (4,), b"abcd"),
        fmt.Tensor(("b",), "|u1", (2, 2), b"abcd"),
        fmt.Tensor(("b",), "|u1", (3,), b"abc"),
        entry("b", kind=1),
    ):
        with pytest.raises(FormatError, match="b"):
            opened(with_sections(tie, [entry("a"), other]))
    with opened(with_sections(tie)) as found:
        assert found["a"] is found["b"]


def test_a_flipped_bit_anywhere_in_an_annex_is_noticed():
    data = with_sections([(METADATA, 0, text({"k": "v"})), (TIES, 0, text({"x": "a"}))])
    begin = data.index(b"TZRANNX1")
    end = begin + len(fmt.encode_annex(fmt.read_file(data).annex))
    for at in range(begin + 8, end):
        for bit in (1, 128):
            flipped = bytearray(data)
            flipped[at] ^= bit
            with pytest.raises(FormatError, match="annex"):
                opened(bytes(flipped))
    damaged = bytearray(data)
    damaged[begin] ^= 1  # without its magic it is slack, as for every earlier reader
    with opened(bytes(damaged)) as found:
        assert (found.ties, found.metadata) == ({}, {})


def in_slack(annex) -> bytes:
    data = bytearray(with_sections([]))
    at = 73 + 4096 - len(fmt.read_file(bytes(data)).index_slack)
    data[at : at + len(annex)] = annex
    return bytes(data)


def test_a_wrong_length_is_refused():
    good = fmt.encode_annex([(METADATA, 0, b"{}")])
    for length in (0, 1, len(good), 1 << 31, (1 << 32) - 1):
        with pytest.raises(FormatError, match="annex"):
            opened(in_slack(good[:8] + length.to_bytes(4, "little") + good[12:]))


def test_sections_that_nobody_must_know_are_skipped_and_an_annex_needs_no_digest():
    clear = (METADATA, 0, text({"k": "v"}))
    for data in (with_sections([(77, 0, b"later"), clear, (78, 2, b"")]), in_slack(fmt.encode_annex([clear]))):
        with opened(data, verify_hash=True) as found:
            assert found.metadata == {"k": "v"}


def test_an_index_that_was_changed_does_not_match_its_digest_and_its_file_is_named(tmp_path):
    data = bytearray(with_sections([(METADATA, 0, b"{}")], [entry("aa"), entry("bb")]))
    at = data.index(b"bb", 73)
    data[at : at + 2] = b"cc"
    record = data.index(b"bb", at)
    data[record : record + 2] = b"cc"
    with opened(bytes(data), lazy_load=True) as found:  # nothing else tells
        assert list(found) == ["aa", "cc"]
    (tmp_path / "one.tensors").write_bytes(data)
    (tmp_path / "one.tensors.index.json").write_text('{"weight_map": {"aa": "one.tensors"}}')
    for source in (tmp_path / "one.tensors", tmp_path / "one.tensors.index.json"):
        with pytest.raises(HashMismatchError, match=r"one\.tensors: the index") as caught:
            TensorDeserializer(source, device="cpu", verify_hash=True)
        assert caught.value.source == str(tmp_path / "one.tensors")


def test_an_annex_of_two_mebibytes_is_kept():
    metadata = {f"key {i}": "v" * 100 for i in range(20_000)}
    with opened(samples.state_dict_bytes({"a": tensor((2,))}, metadata=metadata), verify_hash=True) as found:
        assert found.metadata == metadata
