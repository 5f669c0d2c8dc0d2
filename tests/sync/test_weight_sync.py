"""Publishing and following weights in folders: what is written, what followers end with, and what they refuse."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import threading

import pytest
import torch
from paths import ROOT
from sync_tools import (
    anchor,
    change,
    copy_of,
    delta,
    files_in,
    pointer_of,
    positions_of,
    same,
    state_of,
    sum_of,
    write_pointer,
)

from tensorizer import TensorDeserializer, TensorSerializer
from tensorizer.errors import (
    ConflictError,
    FormatError,
    HashMismatchError,
    LoadError,
    StateMismatchError,
    StreamError,
    StreamNotFoundError,
    TensorizerError,
)
from tensorizer.weight_sync import Applied, Published, WeightFollower, WeightPublisher


def tensors() -> dict:
    torch.manual_seed(1)
    return {"a.weight": torch.randn(300, 50).bfloat16(), "b.bias": torch.randn(77), "c": torch.tensor(3)}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "weights"


@pytest.fixture
def publisher(folder):
    with WeightPublisher(folder, anchor_every=4) as made:
        yield made


# --- publishing -------------------------------------------------------------------------------------------------------


def test_the_first_publish_writes_an_anchor_that_any_reader_loads(folder, publisher):
    model = tensors()
    assert publisher.publish(model) == Published(0, "anchor", (folder / anchor(0)).stat().st_size, 15078, 15078)
    assert files_in(folder) == [anchor(0)]
    with TensorDeserializer(folder / anchor(0), device="cpu", verify_hash=True) as file:
        assert same({name: file[name] for name in file}, model)
        assert file.metadata == {
            "weight_sync": "1",
            "run": pointer_of(folder)["run"],
            "version": "0",
            "state": state_of(model),
        }


def test_the_pointer_says_what_the_store_has(folder, publisher):
    model = tensors()
    publisher.publish(model)
    first = pointer_of(folder)
    states = {"0": state_of(model)}
    change(model["a.weight"])
    published = publisher.publish(model, metadata={"step": "7"})
    states["1"] = state_of(model)
    pointer = pointer_of(folder)
    assert list(pointer) == [
        "weight_sync", "run", "version", "state", "anchors", "deltas", "nbytes", "index_digest", "states",
    ]  # fmt: skip
    assert (pointer["weight_sync"], pointer["version"], pointer["state"]) == (1, 1, states["1"])
    assert pointer["run"] == first["run"]
    assert len(bytes.fromhex(pointer["run"])) == 16
    assert (pointer["anchors"], pointer["deltas"], pointer["states"]) == ([0], [1], states)
    assert pointer["nbytes"] == {name: (folder / name).stat().st_size for name in (anchor(0), delta(1))}
    assert published.nbytes == pointer["nbytes"][delta(1)]
    for name, digest in pointer["index_digest"].items():
        with TensorDeserializer(folder / name, device="cpu") as file:
            assert file.index_digest == digest


def test_a_delta_holds_what_changed_and_the_sums(folder, publisher):
    model = tensors()
    publisher.publish(model)
    before = copy_of(model)
    count = change(model["a.weight"])
    model["c"] += 1
    published = publisher.publish(model, metadata={"step": "1"})
    assert (published.kind, published.changed, published.total) == ("delta", count + 1, 15078)
    text, values = positions_of(before["a.weight"], model["a.weight"])
    with TensorDeserializer(folder / delta(1), device="cpu") as file:
        assert list(file) == ["positions", "values", "whole", "sums"]
        assert bytes(file["positions"]["a.weight"].tolist()) == text
        assert torch.equal(file["values"]["a.weight"], values)
        assert file["whole"]["c"].item() == 4  # whose position and value would be nine bytes
        assert [value & (1 << 64) - 1 for value in file["sums"].tolist()] == [sum_of(t) for t in model.values()]
        pointer = pointer_of(folder)
        assert file.metadata == {
            "weight_sync": "1", "run": pointer["run"], "version": "1", "state": state_of(model), "base": "0",
            "base_state": state_of(before), "step": "1",
        }  # fmt: skip


def test_nothing_that_changed_is_sums_alone(folder, publisher):
    publisher.publish(tensors())
    assert publisher.publish(tensors())[1::2] == ("delta", 0)
    with TensorDeserializer(folder / delta(1), device="cpu") as file:
        assert list(file) == ["sums"]


def test_everything_that_changed_is_whole_tensors(folder, publisher):
    model = tensors()
    publisher.publish(model)
    changed = {name: tensor + 1 for name, tensor in model.items()}
    assert publisher.publish(changed).changed == 15078
    with TensorDeserializer(folder / delta(1), device="cpu") as file:
        assert list(file) == ["whole", "sums"]
        assert same(dict(file["whole"]), changed)


def test_anchors_come_every_so_many_versions_with_a_delta_beside(folder, publisher):
    model = tensors()
    kinds = []
    for _ in range(9):
        kinds.append(publisher.publish(model).kind[0])
        change(model["a.weight"])
    assert "".join(kinds) == "adddaddda"
    pointer = pointer_of(folder)
    assert (pointer["anchors"], pointer["deltas"]) == ([4, 8], [5, 6, 7, 8])
    assert files_in(folder) == sorted([anchor(4), anchor(8), *map(delta, (5, 6, 7, 8))])
    assert set(pointer["states"]) == set("45678")
    assert set(pointer["nbytes"]) == set(pointer["index_digest"]) == set(files_in(folder))


def test_the_bytes_of_an_anchor_count_its_delta(folder):
    with WeightPublisher(folder, anchor_every=1) as publisher:
        model = tensors()
        publisher.publish(model)
        count = change(model["a.weight"])
        published = publisher.publish(model)
        assert published.changed == count
        assert published.nbytes == sum((folder / name).stat().st_size for name in (anchor(1), delta(1)))


def test_versions_are_numbers_above_the_last_one(folder, publisher):
    model = tensors()
    assert publisher.publish(model, 5).version == 5
    assert publisher.publish(model).version == 6
    for version in (6, 0, -1, 10**12):
        with pytest.raises(ValueError, match="version"):
            publisher.publish(model, version)
    with pytest.raises(TypeError):
        publisher.publish(model, "7")
    assert publisher.publish(model, 10**12 - 1).kind == "delta"
    with pytest.raises(ValueError, match="version"):
        publisher.publish(model)


@pytest.mark.parametrize("key", ["weight_sync", "run", "version", "state", "base", "base_state"])
def test_metadata_may_not_use_keys_of_the_library(publisher, key):
    with pytest.raises(ValueError, match=key):
        publisher.publish(tensors(), metadata={key: "x"})


def test_arguments_of_a_publisher_are_checked(tmp_path):
    for location in ("http://host/x", "gs://bucket/x", "redis://host/x"):
        with pytest.raises(ValueError, match="location"):
            WeightPublisher(location)
    for arguments in ({"anchor_every": 0}, {"keep": 0}, {"hashes": "crc32"}, {"hashes": None}, {"hashes": "md5"}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            WeightPublisher(tmp_path, **arguments)
    with pytest.raises(TypeError):
        WeightPublisher(tmp_path, stream_options={"colour": 1})
    with WeightPublisher(f"file://{tmp_path}", hashes=["sha256"]) as publisher:
        with pytest.raises(TypeError, match="tensors"):
            publisher.publish([torch.zeros(1)])
        with pytest.raises(TypeError, match="'x'"):
            publisher.publish({"x": 1})
        with pytest.raises(ValueError, match="at least one"):
            publisher.publish({})
        with pytest.raises(ValueError, match="meta"):
            publisher.publish({"x": torch.zeros(1, device="meta")})
        assert publisher.publish({"x": torch.zeros(1)}).version == 0
    with pytest.raises(ValueError, match="closed"):
        publisher.publish({"x": torch.zeros(1)})


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.zeros(4)},
        {"a": torch.zeros(4), "b": torch.zeros(3, dtype=torch.float16)},
        {"a": torch.zeros(4), "b": torch.zeros(1, 3)},
        {"a": torch.zeros(4), "b": torch.zeros(3), "c": torch.zeros(1)},
    ],
    ids=["names", "dtype", "shape", "more"],
)
def test_another_form_is_an_anchor_without_a_delta(folder, publisher, other):
    publisher.publish({"a": torch.zeros(4), "b": torch.zeros(3)})
    publisher.publish(other)
    assert files_in(folder) == [anchor(0), anchor(1)]
    assert pointer_of(folder)["deltas"] == []


def test_other_ties_are_another_form(folder, publisher):
    one = torch.zeros(8)
    publisher.publish({"a": one, "b": one})
    publisher.publish({"a": one, "b": one})
    publisher.publish({"a": one, "b": one.clone()})
    assert (pointer_of(folder)["anchors"], pointer_of(folder)["deltas"]) == ([0, 2], [1])


def test_a_publisher_goes_on_above_the_versions_that_are_there(folder):
    model = tensors()
    with WeightPublisher(folder, anchor_every=9) as publisher:
        for _ in range(3):
            publisher.publish(model)
    run = pointer_of(folder)["run"]
    (folder / delta(7)).write_bytes(b"left behind")
    (folder / anchor(3)).write_bytes(b"left behind")
    (folder / "notes.txt").write_text("mine")
    with WeightPublisher(folder, anchor_every=9) as publisher:
        assert publisher.publish(model)[:2] == (3, "anchor")
        assert publisher.publish(model)[:2] == (4, "delta")
    pointer = pointer_of(folder)
    assert (pointer["run"], pointer["anchors"], pointer["deltas"]) == (run, [0, 3], [1, 2, 4])
    assert files_in(folder) == sorted(pointer["nbytes"])
    assert (folder / "notes.txt").exists()


def test_a_new_run_lists_nothing_old_and_has_higher_numbers(folder):
    with WeightPublisher(folder) as publisher:
        publisher.publish(tensors(), 41)
    run = pointer_of(folder)["run"]
    with WeightPublisher(folder, new_run=True) as publisher:
        assert publisher.publish(tensors()).version == 42
        publisher.publish(tensors())
    pointer = pointer_of(folder)
    assert pointer["run"] != run
    assert (pointer["anchors"], pointer["deltas"], set(pointer["states"])) == ([42], [43], {"42", "43"})
    assert files_in(folder) == [anchor(42), delta(43)]


def test_a_second_publisher_of_a_folder_is_a_conflict(folder, publisher):
    publisher.publish(tensors())
    second = WeightPublisher(folder)
    for _ in range(2):
        with pytest.raises(ConflictError):
            second.publish(tensors())
    publisher.publish(tensors())
    publisher.close()
    with pytest.raises(ConflictError):
        second.publish(tensors())
    with WeightPublisher(folder) as third:
        assert third.publish(tensors()).version == 2


def test_a_publisher_that_is_dropped_lets_others_publish(folder):
    publisher = WeightPublisher(folder)
    publisher.publish(tensors())
    del publisher
    with WeightPublisher(folder) as publisher:
        assert publisher.publish(tensors()).version == 1


def test_a_publish_that_fails_leaves_the_version_before_and_the_next_one_is_an_anchor(folder, publisher, monkeypatch):
    from tensorizer._sync.stores import FolderStore

    model = tensors()
    publisher.publish(model)
    follower = WeightFollower(folder, None)
    before = pointer_of(folder)
    change(model["a.weight"])
    with monkeypatch.context() as patch:
        patch.setattr(FolderStore, "write_pointer", lambda *_: (_ for _ in ()).throw(StreamError("no")))
        with pytest.raises(StreamError):
            publisher.publish(model, 7)
    assert pointer_of(folder) == before
    assert files_in(folder) == [anchor(0)]
    assert follower.update() == Applied(0, 0, 0)
    assert publisher.publish(model)[:2] == (1, "anchor")
    assert follower.update().version == 1
    assert same(follower.tensors, model)


# --- following --------------------------------------------------------------------------------------------------------

KINDS = {
    "bfloat16": torch.bfloat16, "float32": torch.float32, "float8": torch.float8_e4m3fn, "int8": torch.int8,
    "bool": torch.bool, "complex64": torch.complex64, "complex128": torch.complex128, "float64": torch.float64,
}  # fmt: skip


def of_kind(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return data.view(dtype).view(shape)


@pytest.mark.parametrize("kind", KINDS)
def test_followers_are_bit_equal_whatever_the_dtype(folder, publisher, kind):
    torch.manual_seed(2)
    model = {"w": of_kind(KINDS[kind], 100, 300), "s": of_kind(KINDS[kind]), "e": of_kind(KINDS[kind], 0, 3)}
    publisher.publish(model)
    target = {name: torch.zeros(tensor.shape).to(tensor.dtype) for name, tensor in model.items()}
    follower = WeightFollower(folder, target)
    assert same(target, model)
    pointers = [tensor.data_ptr() for tensor in target.values()]
    for _ in range(5):
        count = change(model["w"], 0.01)
        published = publisher.publish(model)
        assert published.changed == count
        assert follower.update() == Applied(published.version, 1, count)
        assert same(target, model)
        assert follower.changed == ("w",)
    change(model["s"])
    publisher.publish(model)
    follower.update()
    assert same(target, model)
    assert follower.verify() is True
    assert [tensor.data_ptr() for tensor in target.values()] == pointers


def test_a_delta_of_one_percent_of_bfloat16_is_at_most_a_sixtieth(folder, publisher):
    model = {"w": torch.randn(2000, 3000).bfloat16()}
    publisher.publish(model)
    change(model["w"], 0.01)
    assert publisher.publish(model).nbytes <= 0.017 * model["w"].nbytes + 65536


def test_sources_that_are_not_contiguous_are_published_as_what_they_are(folder, publisher):
    base = torch.randn(40, 60)
    publisher.publish({"t": base.t(), "c": torch.randn(3, dtype=torch.complex64).conj()})
    follower = WeightFollower(folder, None)
    assert torch.equal(follower.tensors["t"], base.t())
    base[3, 5] += 1
    publisher.publish({"t": base.t(), "c": torch.zeros(3, dtype=torch.complex64).conj()})
    follower.update()
    assert torch.equal(follower.tensors["t"], base.t())


def test_targets_that_are_not_contiguous_are_filled(folder, publisher):
    model = {"t": torch.randn(40, 60), "z": torch.randn(30).to(torch.complex128)}
    publisher.publish(model)
    target = {"t": torch.zeros(60, 40).t(), "z": torch.zeros(60, dtype=torch.complex128)[::2]}
    follower = WeightFollower(folder, target)
    assert same(target, model)
    change(model["t"])
    model["z"][4] = 2j
    publisher.publish(model)
    assert follower.update().tensors == 2
    assert same(target, model)
    target["t"][0, 0] += 1
    change(model["t"], 1.0)
    publisher.publish(model)
    follower.update()
    assert same(target, model)


def test_an_expanded_target_is_refused_before_a_byte(folder, publisher):
    publisher.publish({"t": torch.randn(4, 6)})
    with pytest.raises(LoadError, match="expanded"):
        WeightFollower(folder, {"t": torch.zeros(6).expand(4, 6)})


def test_ties_are_one_tensor_in_the_store_and_all_their_names_are_filled(folder, publisher):
    one = torch.randn(50)
    model = {"z": one, "a": one, "own": torch.randn(3)}
    assert publisher.publish(model).total == 53
    apart = {name: torch.zeros(tensor.shape).to(tensor.dtype) for name, tensor in model.items()}
    tied = {"own": torch.zeros(3), **dict.fromkeys("az", torch.zeros(50))}
    followers = [WeightFollower(folder, target) for target in (apart, tied, None)]
    assert followers[2].tensors["a"] is followers[2].tensors["z"]
    one[7] = 5
    assert publisher.publish(model).changed == 1
    with TensorDeserializer(folder / delta(1), device="cpu") as file:
        assert list(file["positions"]) == ["a"]
    for follower in followers:
        assert follower.update() == Applied(1, 1, 1)
        assert follower.changed == ("a", "z")
        assert same(follower.tensors, model)
    apart["z"][0] += 1
    with pytest.raises(StateMismatchError, match="'a'"):
        followers[0].verify()


def test_a_module_is_followed_in_place(folder, publisher):
    torch.manual_seed(3)
    model, served = (torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)) for _ in range(2))
    publisher.publish(model)
    follower = WeightFollower(folder, served)
    pointers = [tensor.data_ptr() for tensor in served.state_dict().values()]
    assert follower.changed == tuple(sorted(served.state_dict()))
    model(torch.randn(5, 8))
    with torch.no_grad():
        model[0].weight[2] += 1
    publisher.publish(model.state_dict(), metadata={"step": "1"})
    assert follower.fetch()
    assert not same(dict(served.state_dict()), dict(model.state_dict()))
    follower.apply()
    assert same(dict(served.state_dict()), dict(model.state_dict()))
    assert [tensor.data_ptr() for tensor in served.state_dict().values()] == pointers
    assert (follower.version, follower.metadata) == (1, {"step": "1"})


def test_inference_tensors_are_followed(folder, publisher):
    model = tensors()
    publisher.publish(model)
    with torch.inference_mode():
        target = {name: torch.zeros_like(tensor).contiguous() for name, tensor in model.items()}
        target["b.bias"] = torch.zeros(154)[::2]
    follower = WeightFollower(folder, target)
    change(model["b.bias"])
    model["c"] += 1
    publisher.publish(model)
    follower.update()
    assert same(copy_of(target), model)


def test_nothing_staged_is_nothing_applied(folder, publisher):
    publisher.publish(tensors())
    follower = WeightFollower(folder, tensors())
    assert follower.changed == ("a.weight", "b.bias", "c")
    assert follower.fetch() is False
    assert follower.apply() == Applied(0, 0, 0)
    assert follower.changed == ()


def test_latest_and_wait_look_at_the_pointer(folder, publisher):
    publisher.publish(tensors())
    follower = WeightFollower(folder, None)
    assert follower.latest() == 0
    assert follower.wait(0) is False
    publisher.publish(tensors(), 9)
    assert follower.latest() == 9
    assert follower.wait(0) is True
    assert follower.version == 0


def test_a_follower_waits_for_the_first_version(folder):
    with pytest.raises(StreamNotFoundError, match="no version"):
        WeightFollower(folder, None)
    with WeightPublisher(folder) as publisher:
        later = threading.Timer(0.1, publisher.publish, [tensors()])
        later.start()
        assert WeightFollower(folder, None, timeout=30).version == 0
        later.join()


def test_versions_can_be_chosen(folder, publisher):
    model, published = tensors(), []
    for _ in range(10):
        published.append(copy_of(model))
        publisher.publish(model)
        change(model["a.weight"])
    follower = WeightFollower(folder, None, version=6)
    assert (follower.version, same(follower.tensors, published[6])) == (6, True)
    for version in (8, 5, 9, 4):
        assert follower.fetch(version)
        assert follower.apply().version == version
        assert same(follower.tensors, published[version])
    assert follower.fetch(4) is False
    for version in (3, 10):
        with pytest.raises(LookupError, match=f"no version {version}"):
            follower.fetch(version)
        with pytest.raises(LookupError):
            WeightFollower(folder, None, version=version)
    assert follower.version == 4


def test_a_newer_fetch_replaces_an_older_one(folder, publisher):
    model = tensors()
    publisher.publish(model)
    follower = WeightFollower(folder, None)
    for _ in range(2):
        change(model["a.weight"])
        publisher.publish(model)
        assert follower.fetch()
    assert follower.apply().version == 2
    assert same(follower.tensors, model)


def test_a_target_that_holds_a_version_goes_on_from_there(folder, publisher, monkeypatch):
    model = tensors()
    publisher.publish(model)
    publisher.publish(model, metadata={"step": "1"})
    target = copy_of(model)
    change(model["a.weight"])
    publisher.publish(model, metadata={"step": "2"})
    from tensorizer._sync.target import Target

    monkeypatch.delattr(Target, "fill")  # which reads anchors
    follower = WeightFollower(folder, target)
    assert same(target, model)
    assert (follower.version, follower.metadata) == (2, {"step": "2"})
    assert follower.changed == ("a.weight", "b.bias", "c")
    assert WeightFollower(folder, target).metadata == {"step": "2"}


def test_a_follower_that_is_far_behind_reads_an_anchor_and_what_follows(folder, tmp_path):
    model = {"w": torch.randn(1000)}
    with WeightPublisher(folder, anchor_every=5, keep=100) as publisher:
        publisher.publish(model)
        follower = WeightFollower(folder, None)
        for _ in range(52):
            change(model["w"], 0.2)
            publisher.publish(model)
    for name in files_in(folder):  # what it needs
        if name not in (anchor(50), delta(51), delta(52)):
            (folder / name).unlink()
    assert follower.update().version == 52
    assert same(follower.tensors, model)


def test_a_follower_that_keeps_up_never_reads_anchors(folder, publisher):
    model = tensors()
    publisher.publish(model)
    follower = WeightFollower(folder, None)
    for version in range(1, 10):
        change(model["a.weight"])
        publisher.publish(model)
        for number in pointer_of(folder)["anchors"]:
            (folder / anchor(number)).write_bytes(b"")
        assert follower.update().version == version
        assert same(follower.tensors, model)


def test_a_follower_of_some_tensors_joins_at_an_anchor_by_the_sums_of_the_delta_beside(folder, publisher):
    model = tensors()
    for _ in range(5):
        change(model["a.weight"])
        change(model["b.bias"])
        publisher.publish(model)
    assert pointer_of(folder)["anchors"][-1] == 4
    target = {"b.bias": torch.zeros(77)}
    follower = WeightFollower(folder, target, strict=False)
    assert torch.equal(target["b.bias"], model["b.bias"])
    target["b.bias"][3] += 1
    with pytest.raises(StateMismatchError, match=r"b\.bias"):
        follower.verify()
    assert follower.update().version == 4
    assert torch.equal(target["b.bias"], model["b.bias"])


def test_a_target_whose_ties_differ_does_not_go_on_from_there(folder, publisher):
    one = torch.randn(9)
    publisher.publish({"a": one, "b": one})
    target = {"a": one.clone(), "b": torch.zeros(9)}
    assert WeightFollower(folder, target).version == 0
    assert same(target, {"a": one, "b": one})


def test_several_deltas_are_merged_and_the_newest_value_is_written(folder):
    model = tensors()
    with WeightPublisher(folder, anchor_every=100) as publisher:
        publisher.publish(model)
        follower = WeightFollower(folder, None)
        for step in range(20):
            if step == 7:
                model["b.bias"] += 1
            change(model["a.weight"], 0.02)
            change(model["b.bias"], 0.02)
            publisher.publish(model)
        applied = follower.update()
        assert applied.version == 20
        assert applied.elements <= 15077
        assert same(follower.tensors, model)
        follower.verify()


# --- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ({"a": torch.zeros(4)}, "no 'b'"),
        ({"a": torch.zeros(4), "b": torch.zeros(4)}, r"'b': expected shape \[3\], got \[4\]"),
        ({"a": torch.zeros(4), "b": torch.zeros(3).half()}, "'b': expected torch.float32, got torch.float16"),
        ({"a": torch.zeros(4), "b": torch.zeros(3, device="meta")}, "'b': .*meta"),
    ],
    ids=["name", "shape", "dtype", "meta"],
)
def test_a_target_that_does_not_fit_is_refused_before_tensors_are_read(folder, publisher, target, problem):
    publisher.publish({"a": torch.ones(4), "b": torch.ones(3)})
    with pytest.raises(LoadError, match=problem):
        WeightFollower(folder, target)
    assert not target["a"].any()


def test_names_that_only_the_target_has_are_left_alone(folder, publisher):
    publisher.publish({"a": torch.ones(4)})
    target = {"a": torch.zeros(4), "more": torch.zeros(2)}
    follower = WeightFollower(folder, target)
    assert target["more"].tolist() == [0, 0]
    assert follower.changed == ("a",)


def test_names_that_the_target_lacks_can_be_left_out(folder, publisher):
    model = tensors()
    publisher.publish(model)
    target = {"b.bias": torch.zeros(77)}
    follower = WeightFollower(folder, target, strict=False)
    change(model["a.weight"])
    change(model["b.bias"])
    publisher.publish(model)
    assert follower.update() == Applied(1, 1, 1)
    assert torch.equal(target["b.bias"], model["b.bias"])
    assert follower.verify()


def test_a_target_with_only_a_second_name_of_a_tie_is_filled(folder, publisher):
    one = torch.randn(9)
    publisher.publish({"a": one, "b": one})
    target = {"b": torch.zeros(9)}
    follower = WeightFollower(folder, target, strict=False)
    one[4] += 1
    publisher.publish({"a": one, "b": one})
    follower.update()
    assert torch.equal(target["b"], one)
    assert follower.changed == ("b",)


def test_an_anchor_of_another_form_is_an_error_of_modules_and_the_new_form_of_copies(folder, publisher):
    publisher.publish({"a": torch.ones(4)})
    target = {"a": torch.zeros(4)}
    follower, copy = WeightFollower(folder, target), WeightFollower(folder, None)
    publisher.publish({"a": torch.ones(5), "b": torch.ones(1)})
    with pytest.raises(LoadError, match="'a'"):
        follower.fetch()
    assert (follower.version, target["a"].tolist()) == (0, [1.0] * 4)
    copy.update()
    assert same(copy.tensors, {"a": torch.ones(5), "b": torch.ones(1)})
    assert copy.changed == ("a", "b")


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def followed(folder):
    """A publisher with anchors at 0 and 4, a follower at version 5, and the model."""
    model = tensors()
    with WeightPublisher(folder, anchor_every=4) as publisher:
        for _ in range(6):
            publisher.publish(model)
            change(model["a.weight"])
        target = {name: torch.zeros(tensor.shape).to(tensor.dtype) for name, tensor in model.items()}
        yield publisher, WeightFollower(folder, target), model, target


def altered(path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def altered_consistently(path) -> None:
    with TensorDeserializer(path, device="cpu") as file:
        content, metadata = {key: dict(file[key]) if key != "sums" else file[key] for key in file}, file.metadata
    content["values"]["a.weight"] = content["values"]["a.weight"] + 1
    with TensorSerializer(path, metadata=metadata) as file:
        file.write_state_dict(content)


def cut(path) -> None:
    os.truncate(path, path.stat().st_size - 200)


def swapped(path) -> None:
    shutil.copy(path.with_name(delta(5)), path)


def gone(path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [altered, altered_consistently, cut, swapped, gone], ids=lambda f: f.__name__)
def test_a_damaged_delta_is_an_error_that_leaves_the_target_and_an_anchor_repairs_it(folder, followed, damage):
    publisher, follower, model, target = followed
    before = copy_of(target)
    publisher.publish(model)
    damage(folder / delta(6))
    with pytest.raises((FormatError, HashMismatchError, StreamNotFoundError)):
        follower.fetch()
    assert (follower.version, same(target, before)) == (5, True)
    assert follower.apply() == Applied(5, 0, 0)
    for _ in range(2):
        change(model["b.bias"])
        publisher.publish(model)
    assert pointer_of(folder)["anchors"] == [4, 8]
    assert follower.update().version == 8
    assert same(target, model)
    follower.verify()


@pytest.mark.parametrize("damage", [altered, cut, gone], ids=lambda f: f.__name__)
def test_a_damaged_newest_anchor_is_replaced_by_the_one_before_it(folder, followed, damage):
    _, _, model, _ = followed
    with WeightPublisher(folder, anchor_every=1) as publisher, pytest.raises(ConflictError):
        publisher.publish(model)
    publisher, *_ = followed
    for _ in range(3):
        publisher.publish(model)
    damage(folder / anchor(8))
    follower = WeightFollower(folder, None)
    assert follower.version == 8
    assert same(follower.tensors, model)


def forged(folder, name, change_content, **metadata) -> None:
    """Writes a file anew, section 5 included, and has the pointer name it."""
    from tensorizer import _C  # noqa: F401
    from tensorizer._save.records import Record
    from tensorizer._save.session import memory_of, tensors_file

    with TensorDeserializer(folder / name, device="cpu") as file:
        entries = {tuple(e.name) if isinstance(e.name, tuple) else (e.name,): None for e in file.entries()}
        content = {path: (file[path[0]][path[1]] if len(path) > 1 else file[path[0]]).detach() for path in entries}
        texts = {**file.metadata, **metadata}
    content = change_content(content) or content
    records = [Record(path, tensor.dtype, tuple(tensor.shape)) for path, tensor in content.items()]
    with tensors_file(folder / name, records, hashes={"sha256"}, metadata=texts, binds_records=True) as session:
        session.write_payloads([memory_of(tensor) for tensor in content.values()])
    pointer = pointer_of(folder)
    pointer["index_digest"][name] = session.index_digest.hex()
    pointer["nbytes"][name] = (folder / name).stat().st_size
    write_pointer(folder, pointer)


POSITIONS, VALUES = ("positions", "a.weight"), ("values", "a.weight")


@pytest.mark.parametrize(
    ("change_content", "metadata"),
    [
        (lambda c: c.update({POSITIONS: torch.cat([c[POSITIONS], torch.tensor([0x80], dtype=torch.uint8)])}), {}),
        (lambda c: c.update({POSITIONS: torch.full((10,), 0xFF, dtype=torch.uint8)}), {}),
        (lambda c: c.update({VALUES: c[VALUES][1:].clone()}), {}),
        (lambda c: c.update({VALUES: c[VALUES].float()}), {}),
        (lambda c: c.update({VALUES: c[VALUES].reshape(1, -1)}), {}),
        (lambda c: c.pop(POSITIONS) is None or None, {}),
        (lambda c: c.update({POSITIONS: c[POSITIONS][:0], VALUES: c[VALUES][:0]}), {}),
        (lambda c: c.update({("positions", "x"): c[POSITIONS], ("values", "x"): c[VALUES]}), {}),
        (lambda c: c.update({("whole", "a.weight"): torch.zeros(300, 50).bfloat16()}), {}),
        (lambda c: c.update({("whole", "b.bias"): torch.zeros(76)}), {}),
        (lambda c: c.update({("whole", "b.bias"): torch.ones(77)}), {}),
        (lambda c: c.update({("else",): torch.zeros(1)}), {}),
        (lambda c: c.update({("sums",): c[("sums",)] + 1}), {}),
        (lambda c: c.update({("sums",): c[("sums",)][1:].clone()}), {}),
        (lambda c: c.pop(("sums",)) is None or None, {}),
        (lambda c: None, {"run": "0" * 32}),
        (lambda c: None, {"version": "5"}),
        (lambda c: None, {"state": "0" * 64}),
        (lambda c: None, {"base": "4"}),
        (lambda c: None, {"base_state": "0" * 64}),
        (lambda c: None, {"weight_sync": "2"}),
    ],
)
def test_a_delta_that_contradicts_itself_is_a_format_error(folder, followed, change_content, metadata):
    publisher, follower, model, target = followed
    before = copy_of(target)
    publisher.publish(model)
    forged(folder, delta(6), change_content, **metadata)
    with pytest.raises(FormatError, match=delta(6)):
        follower.fetch()
    assert (follower.version, same(target, before)) == (5, True)


def test_an_old_anchor_under_a_new_number_is_refused(folder, followed):
    publisher, _follower, model, _target = followed
    for _ in range(3):
        publisher.publish(model)
    shutil.copy(folder / anchor(4), folder / anchor(8))
    pointer = pointer_of(folder)
    for key in ("nbytes", "index_digest"):
        pointer[key][anchor(8)] = pointer[key][anchor(4)]
    pointer["anchors"] = [8]
    write_pointer(folder, pointer)
    with pytest.raises(FormatError, match="version"):
        WeightFollower(folder, None)


def test_a_file_that_does_not_bind_its_record_headers_is_refused(folder, followed):
    publisher, follower, model, _ = followed
    publisher.publish(model)
    altered_consistently(folder / delta(6))
    pointer = pointer_of(folder)
    with TensorDeserializer(folder / delta(6), device="cpu") as file:
        pointer["index_digest"][delta(6)] = file.index_digest
    write_pointer(folder, pointer)
    with pytest.raises(FormatError, match="record headers"):
        follower.fetch()


@pytest.mark.parametrize(
    "change_pointer",
    [
        lambda p: p.pop("run"),
        lambda p: p.update(weight_sync=2),
        lambda p: p.update(version="5"),
        lambda p: p.update(version=6),
        lambda p: p.update(state="0" * 64),
        lambda p: p.update(anchors=[4, 0]),
        lambda p: p["nbytes"].clear(),
        lambda p: p["index_digest"].update({anchor(4): "x"}),
        lambda p: p["states"].pop("4"),
    ],
)
def test_a_pointer_that_contradicts_itself_is_a_format_error(folder, followed, change_pointer):
    _, follower, _, _ = followed
    pointer = pointer_of(folder)
    change_pointer(pointer)
    write_pointer(folder, pointer)
    with pytest.raises(FormatError, match=str(folder)):
        follower.fetch()
    (folder / "latest.json").write_bytes(b"{")
    with pytest.raises(FormatError):
        WeightFollower(folder, None)


# --- a target that something else changed -----------------------------------------------------------------------------


def test_a_weight_that_was_changed_behind_the_followers_back_is_found_and_repaired(folder, followed):
    publisher, follower, model, target = followed
    change(model["b.bias"], 1.0)
    change(model["a.weight"], 0.5)
    publisher.publish(model)
    target["a.weight"][:] += 1
    before = copy_of(target)
    assert follower.fetch()
    with pytest.raises(StateMismatchError, match=r"a\.weight"):
        follower.apply()
    assert same(target, before)
    assert follower.version is None
    assert follower.update().version == 6
    assert same(target, model)
    follower.verify()


def test_a_target_is_repaired_to_the_version_that_it_should_hold(folder, followed):
    _, follower, _model, target = followed
    target["c"] += 1
    with pytest.raises(StateMismatchError, match="'c'"):
        follower.verify()
    assert follower.version is None
    assert follower.update().version == 5
    follower.verify()


def test_an_apply_that_was_interrupted_is_completed_by_the_next(folder, followed, monkeypatch):
    from tensorizer._sync.target import Target

    publisher, follower, model, target = followed
    change(model["b.bias"], 1.0)
    publisher.publish(model)
    assert follower.fetch()
    write = Target.write

    def half(self, changes):
        write(self, changes._replace(pairs={}))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Target, "write", half)
        with pytest.raises(KeyboardInterrupt):
            follower.apply()
    assert follower.version is None
    with monkeypatch.context() as patch:
        patch.delattr(Target, "differing")
        assert follower.apply().version == 6
    assert same(target, model)
    assert follower.version == 6


def test_a_fetch_after_an_interrupted_apply_covers_what_was_written(folder, followed, monkeypatch):
    from tensorizer._sync.target import Target

    publisher, follower, model, target = followed
    publisher.publish(model)
    follower.fetch()
    with monkeypatch.context() as patch:
        patch.setattr(Target, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            follower.apply()
    target["a.weight"].view(-1)[:100] = model["a.weight"].view(-1)[:100]  # as a part of the write
    change(model["a.weight"])
    publisher.publish(model)
    assert follower.update().version == 7
    assert same(target, model)
    follower.verify()


# --- runs -------------------------------------------------------------------------------------------------------------


def test_an_older_pointer_is_ignored_with_a_warning(folder, followed, caplog):
    publisher, follower, model, _ = followed
    old = pointer_of(folder)
    publisher.publish(model)
    follower.update()
    write_pointer(folder, old)
    with caplog.at_level(logging.WARNING, "tensorizer.weight_sync"):
        assert follower.fetch() is False
    assert "older" in caplog.text
    assert (follower.version, follower.latest()) == (6, 6)


def test_a_new_run_is_followed_by_its_anchor_with_a_warning(folder, followed, caplog):
    publisher, follower, model, target = followed
    run = pointer_of(folder)["run"]
    pinned = WeightFollower(folder, None, run=run)
    publisher.close()
    shutil.rmtree(folder)
    with WeightPublisher(folder) as other:
        change(model["a.weight"])
        other.publish(model)
        assert follower.wait(0) is True
        with caplog.at_level(logging.WARNING, "tensorizer.weight_sync"):
            assert follower.update().version == 0
        assert same(target, model)
        assert "replaced by run" in caplog.text
        assert pinned.fetch() is False
        assert "expected run" in caplog.text
        with pytest.raises(StreamNotFoundError, match=run):
            WeightFollower(folder, None, run=run)


def test_fetch_leaves_what_the_model_computes(folder):
    torch.manual_seed(5)
    model, served = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    with WeightPublisher(folder) as publisher:
        publisher.publish(model)
        follower = WeightFollower(folder, served)
        x = torch.randn(4, 64)
        old, results, done = served(x), [], threading.Event()

        def compute():
            while not done.is_set():
                results.append(torch.equal(served(x), old))

        thread = threading.Thread(target=compute)
        thread.start()
        with torch.no_grad():
            model.weight += 1
        publisher.publish(model)
        assert follower.fetch()
        done.set()
        thread.join()
        assert all(results)
        follower.apply()
        assert torch.equal(served(x), model(x))


def test_a_closed_follower_and_publisher_say_so(folder, followed):
    _publisher, follower, _model, _ = followed
    follower.close()
    for call in (follower.fetch, follower.apply, follower.latest, follower.verify):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_errors_are_those_of_the_package():
    for kind in (ConflictError, StateMismatchError):
        assert issubclass(kind, TensorizerError)
    assert issubclass(ConflictError, StreamError)
    assert json.dumps(Published(1, "delta", 2, 3, 4)._asdict())


# --- what the documentation says --------------------------------------------------------------------------------------


def test_a_delta_is_that_of_the_format_to_the_byte(folder, monkeypatch):
    text = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
    monkeypatch.setattr("secrets.token_hex", lambda nbytes: "00112233445566778899aabbccddeeff")
    model = {"a": torch.tensor([1.0, -2.5]).bfloat16(), "b": torch.zeros(0)}
    with WeightPublisher(folder) as publisher:
        publisher.publish(model)
        model["a"][1] = 3.0
        publisher.publish(model, metadata={"step": "1"})
    pointer, data = pointer_of(folder), (folder / delta(1)).read_bytes()
    assert f"has {len(data)} bytes" in text
    for digest in (hashlib.sha256(data).hexdigest(), pointer["index_digest"][delta(1)], *pointer["states"].values()):
        assert f"`{digest}`" in text
    with TensorDeserializer(folder / delta(1), device="cpu") as file:
        assert file["positions"]["a"].tolist() == [1]
        assert bytes(file["values"]["a"].view(torch.uint8).tolist()).hex(" ") == "40 40"
        assert bytes(file["sums"].view(torch.uint8).tolist()).hex() == "7ac5225c63855baf" + "0" * 16


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.tensor([1.0, -2.5]).bfloat16(), "726f92c4f5398979"),
        (torch.tensor([1.0, -2.5]), "65033e04a3dc3fc9"),
        (torch.tensor([1 + 2j], dtype=torch.complex128), "1111ac5d8c82bd68"),
    ],
)
def test_sums_are_those_of_the_format(tensor, expected):
    from tensorizer._sync.forms import sums_of

    assert f"{sums_of([tensor])[0]:016x}" == expected == f"{sum_of(tensor):016x}"


@pytest.mark.parametrize("kind", KINDS)
def test_sums_agree_with_the_twin(kind):
    from tensorizer._sync.forms import sums_of

    tensors = [of_kind(KINDS[kind], *shape) for shape in ((), (0,), (1,), (7, 9), (3000,))]
    assert sums_of(tensors) == [sum_of(tensor) for tensor in tensors]
    assert sums_of([tensors[3].t()]) == [sum_of(tensors[3].t())]


def documented(number: int) -> str:
    """A snippet of the guide that needs an engine."""
    text = (ROOT / "docs" / "weight-sync.md").read_text(encoding="utf-8")
    return text.split("<!-- not executed")[number].partition("```python\n")[2].partition("```")[0]


class Engine:
    """A stub of the documented interfaces of vLLM and SGLang: tensors by name, which it copies."""

    def __init__(self, worker=None) -> None:
        self.weights, self.loads, self.worker = {}, [], worker
        self.model_runner = self.model = self

    def load_weights(self, weights) -> None:
        weights = dict(weights)
        self.loads.append(sorted(weights))
        self.weights.update(copy_of(weights))

    update_weights_from_tensor = load_weights

    def collective_rpc(self, method, args=()):
        return [getattr(self.worker, method)(*args)]


def test_the_worker_extension_for_vllm_gives_the_engine_what_changed(folder, publisher):
    model = tensors()
    publisher.publish(model)
    namespace = {"WeightFollower": WeightFollower}
    exec(documented(1), namespace)
    worker = namespace["FollowWeights"]()
    engine = Engine(worker)
    worker.model_runner = engine
    exec(documented(2).replace("s3://bucket/run-7/weights", str(folder)), {**namespace, "llm": engine})
    assert same(engine.weights, model)
    change(model["b.bias"])
    publisher.publish(model)
    assert engine.collective_rpc("fetch_weights", (1,)) == [True]
    assert engine.collective_rpc("apply_weights") == [1]
    assert engine.loads == [sorted(model), [], ["b.bias"]]
    assert same(engine.weights, model)


def test_the_loop_for_sglang_gives_the_engine_what_changed(folder, publisher):
    model = tensors()
    publisher.publish(model)
    engine, rounds = Engine(), []

    def serving():
        rounds.append(True)
        change(model["a.weight"])
        publisher.publish(model)
        return len(rounds) < 3

    code = documented(3).replace("s3://bucket/run-7/weights", str(folder))
    exec(code, {"WeightFollower": WeightFollower, "engine": engine, "serving": serving})
    assert engine.loads == [sorted(model), ["a.weight"], ["a.weight"]]
