"""Checkpoints that are damaged, hostile, encrypted or signed: right values, or an error that says what is wrong."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import json
import os
import pickle
import re
import tracemalloc
import zlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_tools import MARKS, cause_of, load, marker_in, save, write_marker
from torch.distributed.checkpoint.api import CheckpointException

import tensorizer
import tensorizer.distributed as td
from tensorizer import (
    AuthenticationError,
    DecryptionParams,
    EncryptionParams,
    FormatError,
    HashMismatchError,
    SigningKey,
)

pytestmark = MARKS


class Canary:
    """Unpickling it leaves a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_hostile_pickles_in_leaves_and_markers_are_never_executed(tmp_path):
    sign = tmp_path / "executed"
    folder = tmp_path / "checkpoint"
    save({"w": torch.ones(2), "evil": Canary(sign)}, folder, allow_pickle=True)
    target = {"w": torch.zeros(2), "evil": None}
    with pytest.raises(CheckpointException) as caught:
        load(target, folder)
    refused = cause_of(caught.value)
    assert isinstance(refused, pickle.UnpicklingError)
    assert "'evil'" in str(refused)
    assert "allow_pickle" in str(refused)
    assert td.verify(folder).ok
    assert not sign.exists()
    load(target, folder, allow_pickle=True)  # the canary is alive
    assert sign.exists()
    sign.rmdir()

    (folder / ".metadata").write_bytes(pickle.dumps(Canary(sign)))
    with pytest.raises(CheckpointException, match="FileSystemReader"):
        load(target, folder)
    assert not td.verify(folder).ok
    assert not td.is_complete(folder)
    with pytest.raises(CheckpointException) as caught:
        save({"evil": Canary(sign)}, folder)
    assert isinstance(cause_of(caught.value), TypeError)
    assert "'evil'" in str(cause_of(caught.value))
    assert not sign.exists()


def test_damage_is_named_and_never_becomes_a_tensor_where_it_is_verified(tmp_path):
    state = {"a": torch.arange(1000.0), "b": torch.arange(1000.0) + 1}
    save(state, tmp_path / "one")
    save({"a": state["b"], "b": state["a"]}, tmp_path / "two")
    (file,) = (tmp_path / "one").glob("*.tensors")
    (other,) = (tmp_path / "two").glob("*.tensors")
    marker = tmp_path / "one" / ".metadata"
    whole, swapped, text = file.read_bytes(), other.read_bytes(), marker.read_bytes()

    def fails(kind, *words):
        target = {name: torch.full((1000,), -1.0) for name in state}
        with pytest.raises(CheckpointException) as caught:
            load(target, tmp_path / "one", verify_hash=True)
        if kind is not None:
            failure = cause_of(caught.value)
            assert isinstance(failure, kind), failure
            assert all(word in str(failure) for word in words), failure
        report = td.verify(tmp_path / "one")
        assert not report.ok
        return report

    offset = json.loads(text.split(b"\n", 1)[1])["boxes"]["offset"][1]
    file.write_bytes(whole[: offset + 5] + bytes([whole[offset + 5] ^ 1]) + whole[offset + 6 :])
    report = fails(HashMismatchError, "'b'")
    assert len(report.mismatched) == 1
    assert "'b'" in report.mismatched[0].reason
    file.write_bytes(swapped)
    report = fails(HashMismatchError, "'a'", "marker")
    assert len(report.mismatched) == 2
    file.write_bytes(whole[:-100])
    fails(FormatError, file.name)
    file.unlink()
    fails(FileNotFoundError, file.name)
    assert not td.is_complete(tmp_path / "one")
    file.write_bytes(whole)
    for at in range(0, len(text), 7):
        marker.write_bytes(text[:at] + bytes([text[at] ^ 0x04]) + text[at + 1 :])
        assert not td.verify(tmp_path / "one").ok, at
    for end in range(0, len(text), 50):
        marker.write_bytes(text[:end])
        assert not td.is_complete(tmp_path / "one")
    marker.write_bytes(text)
    assert td.is_complete(tmp_path / "one")
    load({name: torch.zeros(1000) for name in state}, tmp_path / "one", verify_hash=True)


def test_planner_data_that_are_nested_hundreds_of_times_are_read_or_refused(tmp_path):
    save({"a": torch.arange(10.0)}, tmp_path)
    head, changed = marker_in(tmp_path)
    changed["planner"] = functools.reduce(lambda inner, _: [inner], range(600), [])
    write_marker(tmp_path, head, changed)
    if td.is_complete(tmp_path):  # how deep Python goes is a matter of its version
        assert td.TensorizerReader(tmp_path).read_metadata().planner_data
        return
    with pytest.raises(FormatError, match="metadata: "):
        td.TensorizerReader(tmp_path).read_metadata()


def test_planner_data_of_any_kind_come_back_and_those_that_could_not_are_refused_by_the_save(tmp_path):
    class Told(dcp.DefaultSavePlanner):
        def create_global_plan(self, all_plans):
            plans, metadata = super().create_global_plan(all_plans)
            return plans, dataclasses.replace(metadata, planner_data=self.told)

    for name, told in (
        ("sizes", {"sizes": [10**12], "lr": [0.1], "a": [50_257, 4096], "b": {"x": None}}),
        ("sparse", {"a": ("list", 20_000)}),
        ("text", "anything"),
    ):
        planner = Told(flatten_state_dict=False)
        planner.told = told
        dcp.save({"a": torch.arange(10.0)}, storage_writer=td.TensorizerWriter(tmp_path / name), planner=planner)
        assert td.TensorizerReader(tmp_path / name).read_metadata().planner_data == told
    planner.told = {"a": ("list", 10**9)}
    with pytest.raises(CheckpointException, match="planner data: 'a' is in lists"):
        dcp.save({"a": torch.arange(10.0)}, storage_writer=td.TensorizerWriter(tmp_path / "huge"), planner=planner)


@pytest.mark.parametrize(
    ("place", "key", "value"),
    [
        (["boxes", "file"], 0, 1),
        (["boxes", "file"], 0, -2),
        (["boxes", "file"], 0, -1),
        (["boxes", "offset"], 1, -1),
        (["boxes", "nbytes"], -1, None),
        (["boxes", "crc32"], -1, None),
        (["boxes"], "record", None),
        (["boxes", "record"], 0, "x"),
        (["bounds"], -1, None),
        (["tensors", 0], 3, 2),
        (["tensors", 0], 1, 7),
        (["leaves", 0], 3, 5),
        (["files", 0], 0, "../x.tensors"),
        ([], "planner", {"d": [["a", {"t": ["list", 10_000_000]}]]}),
        ([], "planner", {"d": [["a", {"t": ["list", -10_000_000]}]]}),
        ([], "planner", {"d": [["a", ["list", 9_000_000, "inner", 2_000_000]]]}),
        ([], "planner", {"d": [["a", {"t": ["list"] * 2000}]]}),
        (["tensors", 0], 2, [0, 2**70]),
        (["tensors", 0], 2, ["10"]),
        (["boxes", "file"], 0, 0.0),
        (["boxes", "record"], 0, 0.5),
        (["boxes", "offset"], 0, 2**63),
        (["boxes", "crc32"], 0, 2**32),
        (["boxes", "crc32"], 0, "0"),
        (["leaves", 0], 4, 0.0),
        (["leaves", 0], 0, -1),
        (["leaves", 0], 0, "a"),
        (["leaves", 0], 1, "foo"),
        (["leaves", 0], 1, {}),
        (["tensors", 0], 0, -1),
        (["leaves", 0], 3, -1),
        (["bounds"], 1, 2**63),
        (["bounds"], 1, 10.0),
        (["properties", 0], 0, "qint8"),
        ([], "planner", {"s": ["", 2**70]}),
        ([], "planner", {"n": []}),
        ([], "world_size", 10**30),
        ([], "world_size", 0),
    ],
    ids=lambda value: "-".join(map(str, value)) or "body" if isinstance(value, list) else None,
)
def test_a_marker_whose_columns_cannot_be_true_is_refused_although_its_digest_is_right(tmp_path, place, key, value):
    save({"a": torch.arange(10.0), "b": torch.arange(6.0).view(2, 3), "leaf": list(range(3000))}, tmp_path)
    head, changed = marker_in(tmp_path)
    write_marker(tmp_path, head, changed)
    assert td.is_complete(tmp_path)
    column = functools.reduce(lambda inner, step: inner[step], place, changed)
    if value is None:
        column.pop(key)
    else:
        column[key] = value
    write_marker(tmp_path, head, changed)
    assert not td.is_complete(tmp_path)
    with pytest.raises(FormatError, match="metadata: "):
        td.TensorizerReader(tmp_path).read_metadata()


def test_verify_reports_boxes_that_are_no_whole_tensor_and_values_that_are_none(tmp_path):
    save({"a": torch.arange(10.0), "step": 7}, tmp_path)
    head, body = marker_in(tmp_path)
    body["tensors"][0][2] = [11]
    write_marker(tmp_path, head, body)
    (found,) = [wrong.reason for wrong in td.verify(tmp_path).mismatched]
    assert found.startswith(f"{tmp_path}: tensor 'a' of shape [11]: its boxes leave a hole")
    for read in (
        lambda: td.TensorizerReader(tmp_path).read_metadata(),
        lambda: td.dcp_to_files(tmp_path, io.BytesIO()),
    ):
        with pytest.raises(FormatError, match=re.escape(f"{tmp_path}: tensor 'a'")):
            read()
    body["tensors"][0][2] = [10]
    body["leaves"][0][2] = "{"
    write_marker(tmp_path, head, body)
    (found,) = [wrong.reason for wrong in td.verify(tmp_path).mismatched]
    assert found.startswith(f"{tmp_path}: 'step': ")


@pytest.mark.parametrize("digest", [{}, [], 7, "zz"], ids=str)
def test_verify_reports_digests_of_indexes_that_are_none(tmp_path, digest):
    import reference_auth as auth

    key = EncryptionParams.random()
    save({"a": torch.arange(10.0)}, tmp_path, encryption=key)
    head, body = marker_in(tmp_path)
    body["index_digests"][0] = digest
    tag = hashlib.blake2b(json.dumps(body).encode(), digest_size=32, key=auth.subkey(key.key, 3)).hexdigest()
    write_marker(tmp_path, {**head, "tag": tag}, body)
    (found,) = [wrong.reason for wrong in td.verify(tmp_path, encryption=DecryptionParams.from_key(key.key)).mismatched]
    assert "expected the digest of an index" in found


def test_a_head_without_sizes_that_can_be_is_no_marker(tmp_path):
    save({"a": torch.zeros(1)}, tmp_path)
    head, _, body = (tmp_path / ".metadata").read_bytes().partition(b"\n")
    for key in ("nbytes", "content_nbytes"):
        for value in (float("inf"), float("nan"), None, []):
            (tmp_path / ".metadata").write_bytes(json.dumps({**json.loads(head), key: value}).encode() + b"\n" + body)
            with pytest.raises(FormatError, match="metadata: expected a marker of TensorizerWriter"):
                td.TensorizerReader(tmp_path).read_metadata()


def test_a_value_that_is_none_is_a_format_error_that_names_it(tmp_path):
    from tensorizer.distributed._checkpoint.json_values import from_json

    for text in (
        '{"n":["<i8",""]}',
        '{"n":[]}',
        '{"n":["i4,(","AAAA"]}',
        '{"n":["O","AAAAAAAAAAA="]}',
        '{"n":[5,"AAAA"]}',
        '{"s":[]}',
        '{"s":["",1180591620717411303424]}',
        '{"s":["",-1]}',
        '{"t":5}',
        '{"i":5}',
        "{}",
    ):
        with pytest.raises(FormatError, match="expected a value in JSON"):
            from_json(text)
    with pytest.raises(FormatError, match="expected a value in JSON"):
        from_json(b'"\xff"')

    save({"step": 1}, tmp_path)
    head, body = marker_in(tmp_path)
    for text in ('{"n":["<i8",""]}', 5):
        body["leaves"][0][2] = text
        write_marker(tmp_path, head, body)
        with pytest.raises(CheckpointException) as caught:
            load({"step": 0}, tmp_path)
        assert isinstance(cause_of(caught.value), FormatError)
        assert f"{tmp_path}: 'step': expected a value in JSON" in str(cause_of(caught.value))


def test_a_marker_takes_no_memory_for_boxes_that_it_has_no_places_for(tmp_path):
    from tensorizer.distributed._checkpoint.marker import unpack_marker

    save({"s": torch.tensor(5.0), "w": torch.zeros(3)}, tmp_path)
    head, body = marker_in(tmp_path)
    for row in body["tensors"]:
        right = row[3]
        for count in (10**6, -1, 10**30, True, 1.0):
            row[3] = count
            write_marker(tmp_path, head, body)
            tracemalloc.start()
            with pytest.raises(FormatError, match=f"the marker.*tensor '{row[0]}' of .* boxes: expected as many"):
                unpack_marker((tmp_path / ".metadata").read_bytes(), "the marker")
            assert tracemalloc.get_traced_memory()[1] < 1 << 20, count
            tracemalloc.stop()
        row[3] = right


def test_boxes_cover_a_tensor_exactly_once_or_are_refused_by_name(tmp_path):
    """An overlap and a hole of the same size leave the count of elements right."""
    from tensorizer.distributed._boxes import check_cover

    halves = [((0, 2), (0, 6)), ((2, 4), (0, 6))]
    check_cover("w", (4, 6), halves, "folder")
    check_cover("w", (4, 6), [((0, 2), (0, 3)), ((0, 2), (3, 6)), ((2, 4), (0, 5)), ((2, 4), (5, 6))], "folder")
    check_cover("w", (), [()], "folder")
    check_cover("w", (0, 3), [], "folder")
    for boxes, text in (
        ([halves[0], ((1, 3), (0, 6))], r"tensor 'w'.*\[0:2, 0:6\] and \[1:3, 0:6\] overlap"),
        ([halves[0], ((0, 2), (0, 6))], "overlap"),
        ([halves[0]], "tensor 'w'.*leave a hole: expected 24 elements, got 12 in .0:2, 0:6"),
        ([halves[0], ((2, 5), (0, 6))], "within"),
        ([], "hole"),
    ):
        with pytest.raises(FormatError, match=text):
            check_cover("w", (4, 6), boxes, "folder")
    with pytest.raises(FormatError, match="hole"):
        check_cover("w", (), [], "folder")

    save({"w": torch.arange(24.0).view(4, 6)}, tmp_path)
    head, content = marker_in(tmp_path)
    (row,) = content["tensors"]
    row[2] = [8, 6]  # twice as large as its one box
    write_marker(tmp_path, head, content)
    with pytest.raises(FormatError, match=r"tensor 'w'.*hole"):
        td.dcp_to_files(tmp_path, tmp_path / "one.tensors")
    with pytest.raises((FormatError, CheckpointException), match=r"tensor 'w'.*hole"):
        load({"w": torch.zeros(8, 6)}, tmp_path)
    assert not (tmp_path / "one.tensors").exists()


def test_a_marker_unpacks_to_what_it_says_and_no_further(tmp_path):
    from tensorizer.distributed._checkpoint.marker import unpack_marker

    save({"w": torch.zeros(3)}, tmp_path)
    known = json.loads((tmp_path / ".metadata").read_bytes().split(b"\n", 1)[0])
    bomb = b'{"a":"' + b"x" * (100 << 20) + b'"}'
    packed = zlib.compress(bomb, 9)
    head = {"format": known["format"], "version": known["version"], "body": "zlib", "nbytes": len(packed)}
    head["sha256"] = hashlib.sha256(packed).hexdigest()
    for nbytes in (0, -1, 1000, len(bomb), len(bomb) + 1):
        data = json.dumps({**head, "content_nbytes": nbytes}).encode() + b"\n" + packed
        tracemalloc.start()
        with pytest.raises(FormatError, match=r"damaged marker.*(unpack|bytes)"):
            unpack_marker(data, "marker")
        assert tracemalloc.get_traced_memory()[1] < 50 << 20, nbytes
        tracemalloc.stop()


def test_the_marker_of_an_encrypted_checkpoint_vouches_for_its_body_and_its_files(tmp_path):
    import reference_auth as auth

    from tensorizer.distributed._checkpoint.marker import unpack_marker

    key = EncryptionParams.from_string("open sesame", 1, 8192)
    unlock = DecryptionParams.from_string("open sesame")
    save({"w": torch.arange(1000.0)}, tmp_path, encryption=key)
    head, _, body = (tmp_path / ".metadata").read_bytes().partition(b"\n")
    known, content = json.loads(head), json.loads(body)
    tag = hashlib.blake2b(body, digest_size=32, key=auth.subkey(key.key, 3)).hexdigest()
    assert known["tag"] == tag
    (file,) = tmp_path.glob("*.tensors")
    assert content["index_digests"] == [auth.digest_of(file.read_bytes()).hex()]
    for params in (unlock, DecryptionParams.from_key(key.key)):
        target = {"w": torch.zeros(1000)}
        load(target, tmp_path, encryption=params, require_authenticated=True)
        assert torch.equal(target["w"], torch.arange(1000.0))
        assert td.verify(tmp_path, encryption=params).ok
    # An earlier release's marker and file are read as before, and refused where they have to be authenticated.
    old = {name: value for name, value in known.items() if name not in ("tag", "derivation")}
    (tmp_path / ".metadata").write_bytes(json.dumps(old).encode() + b"\n" + body)
    with pytest.raises((AuthenticationError, CheckpointException), match="marker is not"):
        load({"w": torch.zeros(1000)}, tmp_path, encryption=unlock)
    assert not td.verify(tmp_path, encryption=unlock).ok
    with pytest.raises(AuthenticationError):
        td.dcp_to_files(tmp_path, tmp_path / "one.tensors", decryption=unlock)
    file.write_bytes(auth.as_before(file.read_bytes(), key.key))
    load({"w": torch.zeros(1000)}, tmp_path, encryption=unlock)
    with pytest.raises(AuthenticationError, match="not authenticated"):
        td.TensorizerReader(tmp_path, encryption=unlock, require_authenticated=True).read_metadata()
    for wrong in ({"tag": 7}, {"tag": "zz"}, {"tag": "00"}, {"tag": tag, "derivation": "00"}):
        data = json.dumps({**known, "derivation": known["derivation"], **wrong}).encode() + b"\n" + body
        with pytest.raises((AuthenticationError, FormatError)):
            unpack_marker(data, "marker", unlock)


def test_with_the_key_a_marker_without_its_tag_gives_no_values(tmp_path):
    key = EncryptionParams.random()
    unlock = DecryptionParams.from_key(key.key)
    save({"w": torch.arange(3.0), "run": {"step": 10, "lr": 0.1}}, tmp_path, encryption=key)
    head, body = marker_in(tmp_path)
    del head["tag"]
    (step,) = (leaf for leaf in body["leaves"] if leaf[0] == "run.step")
    forged = ["run.step", "json", "666"]
    step[:] = forged
    nothing_else = {
        "leaves": [forged],
        "files": [],
        "tensors": [],
        "bounds": [],
        "boxes": {column: [] for column in body["boxes"]},
    }
    for changes in ({}, nothing_else):
        write_marker(tmp_path, head, {**body, **changes})
        target = {"run": {"step": 0}}
        with pytest.raises(CheckpointException, match=r"'run.step'.*not authenticated"):
            load(target, tmp_path, encryption=unlock)
        assert target == {"run": {"step": 0}}
        assert not td.verify(tmp_path, encryption=unlock).ok
        with pytest.raises(AuthenticationError):
            td.dcp_to_files(tmp_path, tmp_path / "one.tensors", decryption=unlock)


def test_a_checkpoint_is_loaded_from_files_that_a_wanted_key_has_signed_alone(tmp_path):
    import reference_auth as auth

    signer = SigningKey.from_bytes(bytes(range(32)))
    save({"w": torch.arange(1000.0), "text": "x"}, tmp_path, hashes="sha256")
    (file,) = tmp_path.glob("*.tensors")
    content = file.read_bytes()

    def loaded(key):
        target = {"w": torch.zeros(1000), "text": ""}
        load(target, tmp_path, public_key=key)
        return target

    with pytest.raises(CheckpointException, match="not signed") as caught:
        loaded(signer.public_key)
    assert isinstance(cause_of(caught.value), AuthenticationError)
    tensorizer.sign(file, signer)
    target = loaded(signer.public_key)
    assert torch.equal(target["w"], torch.arange(1000.0))
    assert target["text"] == "x"
    with pytest.raises(CheckpointException, match="signed by other keys"):
        loaded(SigningKey.generate().public_key)
    forged = auth.rehashed(content, lambda record: bytes(len(record.payload)) if record.path == ("w",) else None)
    file.write_bytes(forged)
    load({"w": torch.zeros(1000), "text": ""}, tmp_path)
    with pytest.raises(CheckpointException, match="its record is not the one") as caught:
        loaded(signer.public_key)
    assert isinstance(cause_of(caught.value), AuthenticationError)
    flipped = bytearray(content)
    flipped[-20] ^= 1
    file.write_bytes(bytes(flipped))
    with pytest.raises(CheckpointException) as caught:
        loaded(signer.public_key)
    assert isinstance(cause_of(caught.value), HashMismatchError)


def test_an_encrypted_checkpoint_shows_no_value_and_needs_its_key(tmp_path):
    key = EncryptionParams.random()
    state = {"w": torch.arange(100_000.0), "secret": "open sesame", "step": 3}
    save(state, tmp_path, encryption=lambda: key)
    assert all(b"sesame" not in path.read_bytes() for path in tmp_path.iterdir())
    unlock = DecryptionParams.from_key(key.key)
    target = {"w": torch.zeros(100_000), "secret": "", "step": 0}
    load(target, tmp_path, encryption=unlock, verify_hash=True)
    assert torch.equal(target["w"], state["w"])
    assert (target["secret"], target["step"]) == ("open sesame", 3)
    assert td.verify(tmp_path, encryption=unlock).ok
    for wrong in (None, DecryptionParams.from_key(EncryptionParams.random().key)):
        with pytest.raises(CheckpointException, match=r"(?i)encrypt|key"):
            load(dict(target), tmp_path, encryption=wrong)
    pickle.loads(pickle.dumps(td.TensorizerWriter(tmp_path, encryption=key)))
    assert str(key.key) not in repr(td.TensorizerWriter(tmp_path, encryption=key))
