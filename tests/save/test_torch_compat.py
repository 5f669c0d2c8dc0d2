"""tensorizer.torch_compat: torch.save and torch.load with the tensors in a file of their own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import io
import itertools
import logging
import os
import pickle
import shutil
import threading
import weakref
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import samples
import torch

import tensorizer
from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer, _pairs, torch_compat
from tensorizer._pairs import Target
from tensorizer._sidecar import SaveSession, pickle_for_saving
from tensorizer.errors import FormatError
from tensorizer.torch_compat import tensorizer_loading, tensorizer_saving

torch_save, torch_load = torch.save, torch.load
ONES = torch.ones(3)
# torch 2.1 itself asks a class of typed storages under weights_only, and warns of it.
pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")


@pytest.fixture(autouse=True)
def _originals_return():
    yield
    assert torch.save is torch_save
    assert torch.load is torch_load


@pytest.fixture
def pt(tmp_path) -> Path:
    return tmp_path / "model.pt"


def sidecar_of(pt: Path) -> Path:
    return pt.with_name(pt.name + ".tensors")


def sidecar_entries(path) -> list:
    return samples.load(path)


def save(obj, f, *args, **kwargs):
    with tensorizer_saving(*args, **kwargs):
        torch.save(obj, f)


def load(f, *args, load_kwargs=None, **kwargs):
    kwargs.setdefault("device", "cpu")
    with tensorizer_loading(*args, **kwargs):
        return torch.load(f, **(load_kwargs or {}))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.arange(3))


def rich_object():
    base = torch.randn(6, 4)
    wide = torch.uint16 if hasattr(torch, "uint16") else torch.int16  # torch 2.3 and later
    return {
        "base": base,
        "rows": base[2:4],
        "transposed": base.t(),
        "bits": base.view(torch.int32),
        "parameter": torch.nn.Parameter(torch.randn(3, dtype=torch.bfloat16), requires_grad=False),
        "float8": torch.randn(4).to(torch.float8_e5m2),
        "bool": torch.tensor(True),
        "complex": torch.randn(2, dtype=torch.complex64),
        "uint16": torch.tensor([1, 65535], dtype=torch.int32).to(wide),
        "scalar": torch.tensor(4.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "meta": torch.empty(5, device="meta"),
        "storage": torch.arange(4, dtype=torch.int16).untyped_storage(),
        "others": [1, "text", None, {"nested": (torch.ones(2), 2.5)}],
    }


def assert_rich_object_survived(loaded, original):
    def raw(tensor):
        return tensor.detach().contiguous().view(-1).view(torch.uint8)

    names = ("base", "rows", "transposed", "bits", "parameter", "float8", "bool", "complex", "uint16", "scalar")
    for name in filter(original.__contains__, names):
        assert loaded[name].dtype == original[name].dtype, name
        assert loaded[name].shape == original[name].shape, name
        assert loaded[name].stride() == original[name].stride(), name
        assert torch.equal(raw(loaded[name]), raw(original[name])), name
    if "parameter" in original:
        assert isinstance(loaded["parameter"], torch.nn.Parameter)
        assert not loaded["parameter"].requires_grad
    assert loaded["empty"].shape == (0, 3)
    assert loaded["meta"].is_meta
    assert loaded["meta"].shape == (5,)
    if "storage" in original:
        assert loaded["storage"]._untyped_storage.tolist() == original["storage"].tolist()
    assert loaded["others"][:3] == [1, "text", None]
    assert torch.equal(loaded["others"][3]["nested"][0], torch.ones(2))
    assert loaded["others"][3]["nested"][1] == 2.5
    pointer = loaded["base"].untyped_storage().data_ptr()
    assert all(loaded[name].untyped_storage().data_ptr() == pointer for name in ("rows", "transposed", "bits"))
    assert loaded["bits"].view(torch.float32).is_set_to(loaded["base"])


# --- round trips ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{}, {"weights_only": True}, {"weights_only": False}, {"mmap": True}], ids=str)
def test_objects_survive_with_their_views_ties_and_types(pt, arguments):
    original = rich_object()
    if arguments.get("weights_only"):
        del original["storage"]  # torch takes an UntypedStorage under weights_only no more than any other object
        # torch 2.1 knows no bfloat16, bool and float8 there, torch 2.5 no uint16
        known = torch._weights_only_unpickler._get_allowed_globals()
        original = {
            name: value for name, value in original.items() if str(getattr(value, "dtype", "torch.int8")) in known
        }
    save(original, pt)
    # torch 2.1 wants the name as a text for mmap
    assert_rich_object_survived(load(str(pt) if arguments.get("mmap") else pt, load_kwargs=arguments), original)


@pytest.mark.parametrize(
    "arguments",
    [{"_use_new_zipfile_serialization": False}, *({"pickle_protocol": protocol} for protocol in (2, 3, 4, 5))],
    ids=str,
)
def test_the_older_file_format_of_torch_and_every_pickle_protocol_work(pt, arguments):
    original = rich_object()
    with tensorizer_saving():
        torch.save(original, pt, **arguments)
    assert zipfile.is_zipfile(pt) == ("pickle_protocol" in arguments)
    assert_rich_object_survived(load(pt, load_kwargs={"weights_only": False}), original)


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_whole_module_and_its_state_dict_keep_tied_weights(pt, weights_only):
    net = Net()
    save(net.state_dict() if weights_only else net, pt)
    back = load(pt, load_kwargs={"weights_only": weights_only})
    assert len(sidecar_entries(sidecar_of(pt))) == 2
    if weights_only:
        assert isinstance(back, type(net.state_dict()))
        assert back["head.weight"].is_set_to(back["embed.weight"])
    else:
        assert isinstance(back, Net)
        assert back.head.weight is back.embed.weight
        back = back.state_dict()
    samples.assert_same(back, net.state_dict())


def test_whole_storages_are_in_the_sidecar_as_bytes_and_not_in_the_other_file(pt):
    tensor = torch.randn(100_000)
    save({"view": tensor[10:12]}, pt)
    assert pt.stat().st_size < 10_000
    (stored,) = sidecar_entries(sidecar_of(pt))
    assert stored.dtype == torch.uint8
    assert stored.dim() == 1
    assert torch.equal(stored.view(torch.float32), tensor)
    assert torch.equal(load(pt)["view"], tensor[10:12])


def test_the_file_holds_the_published_persistent_ids(pt):
    tensor = torch.ones(3, dtype=torch.float64)
    save([tensor, tensor[1:], torch.zeros(2), tensor.untyped_storage()], pt)
    ids = []

    class Reader(pickle.Unpickler):
        def persistent_load(self, pid):
            ids.append(pid)
            dtype = pid[4] or torch.uint8
            return torch.storage.TypedStorage(wrap_storage=torch.UntypedStorage(24), dtype=dtype, _internal=True)

    with zipfile.ZipFile(pt) as archive:
        Reader(archive.open(next(name for name in archive.namelist() if name.endswith("data.pkl")))).load()
    assert ids == [
        ("TensorizerPickler", 0, "storage", 0, torch.float64),
        ("TensorizerPickler", 0, "storage", 0, torch.float64),
        ("TensorizerPickler", 0, "storage", 1, torch.float32),
        ("TensorizerPickler", 0, "storage", 0, None),
    ]


def test_without_tensor_data_there_is_no_sidecar(pt):
    for obj in ({"a": 1}, torch.empty(3, device="meta"), [torch.empty(0)]):
        save(obj, pt)
        assert not sidecar_of(pt).exists()
        load(pt)


def result_of(function, *args, **kwargs):
    """What it returns, or the kind of error."""
    try:
        return function(*args, **kwargs)
    except (pickle.UnpicklingError, RuntimeError) as error:
        return pickle.UnpicklingError if "Weights only" in str(error) else type(error)


WEIGHTS_ONLY = [
    *({}, {"weights_only": None}, {"weights_only": False}, {"weights_only": True}, {"pickle_module": pickle}),
    {"pickle_module": pickle, "weights_only": True},
]
VARIABLES = [{}, {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}, {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}]


@pytest.mark.filterwarnings(
    "ignore:Environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "ignore:You are using `torch"
)
@pytest.mark.parametrize("variables", VARIABLES, ids=str)
@pytest.mark.parametrize("arguments", WEIGHTS_ONLY, ids=str)
def test_what_torch_loads_without_the_block_it_loads_within_and_what_it_refuses_it_refuses(
    pt, arguments, variables, monkeypatch
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if arguments.get("weights_only", False) is None and torch.__version__ < "2.4":
        pytest.skip("torch up to 2.3 does not take None")
    obj = {"a": Fleeting(3), "b": torch.ones(2)}
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    buffer.seek(0)
    torch_save(obj, pt.with_name("plain.pt"))
    save(obj, pt)
    expected = result_of(torch_load, buffer, **arguments)
    expected = expected["a"] if isinstance(expected, dict) else expected
    for f, location in ((buffer, None), (buffer, lambda f: None), (pt.with_name("plain.pt"), None), (pt, None)):
        buffer.seek(0)
        found = result_of(load, f, location, load_kwargs=arguments)
        assert (found["a"] if isinstance(found, dict) else found) == expected
        buffer.seek(0)
        found = result_of(load, f, location, load_kwargs=arguments, suppress_weights_only=True)
        if "TORCH_FORCE_WEIGHTS_ONLY_LOAD" in variables:
            assert found in (pickle.UnpicklingError, RuntimeError)
        else:
            assert found["a"] == 3


def test_picklers_on_which_torch_sets_its_hook_are_served_too(tmp_path):
    """Before 2.4 torch assigns persistent_id to the pickler; later releases define it in a subclass."""
    written, tensor = [], torch.arange(3)
    session = SaveSession(tmp_path / "x", lambda place, tensors, kwargs: written.extend(tensors), {}, Target.of(None))
    pickled = io.BytesIO()
    pickler = pickle_for_saving(session).Pickler(pickled, protocol=2)
    pickler.persistent_id = lambda obj: ("theirs",) if isinstance(obj, Fleeting) else None
    pickler.dump([tensor.untyped_storage(), Fleeting(1)])
    assert [t.numel() for t in written] == [24]

    class Reader(pickle.Unpickler):
        def persistent_load(self, pid):
            return pid

    pickled.seek(0)
    assert Reader(pickled).load() == [("TensorizerPickler", 0, "storage", 0, None), ("theirs",)]


def test_addresses_used_again_while_pickling_are_not_taken_for_one_storage(pt):
    save([Fleeting(i) for i in range(20)], pt)
    assert load(pt, load_kwargs={"weights_only": False}) == list(range(20))


class Fleeting:
    """Makes its tensor only while it is pickled, so that its memory is free again right afterwards."""

    def __init__(self, number):
        self.number = number

    def __reduce__(self):
        return (tensor_to_int, (torch.full((1000,), self.number),))


def tensor_to_int(tensor):
    assert (tensor == tensor[0]).all()
    return int(tensor[0])


# --- where the sidecar goes ----------------------------------------------------------------------------------------


def test_the_default_name_follows_the_file(tmp_path):
    tensor = torch.randn(3)
    for name, f in (
        ("str", str(tmp_path / "str")),
        ("path", tmp_path / "path"),
        ("open", (tmp_path / "open").open("wb+")),
    ):
        save(tensor, f)
        if hasattr(f, "close"):
            f.close()
        assert (tmp_path / f"{name}.tensors").exists()
        with (tmp_path / name).open("rb") as file:
            assert torch.equal(load(file), tensor)
        assert torch.equal(load(tmp_path / name), tensor)


def test_memory_without_a_location_is_plain_torch_with_a_warning(caplog):
    buffer = io.BytesIO()
    save(ONES, buffer)
    for read in (torch.load, load):
        assert [record.name for record in caplog.records] == ["tensorizer.torch_compat"]
        assert caplog.records[0].levelno == logging.WARNING
        buffer.seek(0)
        if read is load:
            caplog.clear()
        assert torch.equal(read(buffer), ONES)
    assert len(caplog.records) == 1


def test_a_file_without_a_usable_name_is_refused(tmp_path):
    class Nameless:
        def write(self, data):
            return len(data)

        def read(self, size=-1):
            return b""

    numbered = open(tmp_path / "file", "wb")  # noqa: SIM115
    with open(numbered.fileno(), "wb", closefd=False) as file:
        assert isinstance(file.name, int)
        for f in (file, Nameless()):
            with pytest.raises(TypeError, match="file_obj"):
                save(torch.ones(1), f)
    numbered.close()
    with pytest.raises(TypeError, match="file_obj"):
        load(Nameless())


@pytest.mark.parametrize("kind", [str, Path])
def test_a_fixed_path_is_used(tmp_path, pt, kind):
    elsewhere = kind(tmp_path / "deep" / "elsewhere.bin")
    save(ONES, pt, elsewhere)
    assert not sidecar_of(pt).exists()
    assert torch.equal(load(pt, elsewhere), ONES)
    with pytest.raises(FileNotFoundError):
        load(pt)


def test_a_stream_is_used_and_closed_and_memory_can_hold_both_halves(tmp_path, pt):
    class Kept(io.BytesIO):
        def close(self):
            self.seek(0)

    half, sidecar, stream = io.BytesIO(), Kept(), (tmp_path / "stream").open("wb+")
    save(ONES, pt, stream)
    assert stream.closed
    save(ONES, half, sidecar)
    half.seek(0)
    assert torch.equal(load(half, sidecar), ONES)
    with (tmp_path / "stream").open("rb") as stream:
        assert torch.equal(load(pt, stream), ONES)


def test_a_function_names_the_place_for_each_file(tmp_path):
    asked = []

    def beside(f):
        asked.append(f)
        return tmp_path / (Path(f).stem + ".weights")

    with tensorizer_saving(beside):
        torch.save(torch.zeros(1), tmp_path / "a.pt")
        torch.save(torch.ones(1), tmp_path / "b.pt")
    assert asked == [tmp_path / "a.pt", tmp_path / "b.pt"]
    assert {file.name for file in tmp_path.iterdir()} == {"a.pt", "a.weights", "b.pt", "b.weights"}
    with tensorizer_loading(beside, device="cpu"):
        assert torch.load(tmp_path / "b.pt").item() == 1
        assert torch.load(tmp_path / "a.pt").item() == 0


def test_a_function_that_returns_none_means_plain_torch(pt):
    save(torch.ones(3), pt, lambda f: None)
    assert not sidecar_of(pt).exists()
    assert torch.equal(torch.load(pt), torch.ones(3))
    assert torch.equal(load(pt, lambda f: None), torch.ones(3))
    save(torch.ones(3), pt)
    with pytest.raises((AssertionError, pickle.UnpicklingError)):
        load(pt, lambda f: None)


def test_a_list_gives_each_file_its_own_place_in_order(tmp_path):
    places = [tmp_path / "one", lambda f: tmp_path / "two", None, (tmp_path / "four").open("wb+")]
    with tensorizer_saving(places):
        for i in range(4):
            torch.save(torch.tensor([i]), tmp_path / f"{i}.pt")
        with pytest.raises(ValueError, match="all 4 locations"):
            torch.save(torch.tensor([4]), tmp_path / "4.pt")
    assert (tmp_path / "2.pt.tensors").exists()
    with tensorizer_loading([tmp_path / "one", tmp_path / "two", None, tmp_path / "four"], device="cpu"):
        assert [torch.load(tmp_path / f"{i}.pt").item() for i in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("stream", [False, True])
def test_a_second_save_to_a_fixed_place_is_refused_before_anything_is_written(tmp_path, stream):
    place = tmp_path / "fixed"
    with tensorizer_saving(place.open("wb+") if stream else place):
        torch.save(torch.zeros(3), tmp_path / "a.pt")
        with pytest.raises(ValueError, match="already holds the tensors"):
            torch.save(torch.ones(3), tmp_path / "b.pt")
    assert not (tmp_path / "b.pt").exists()
    assert torch.equal(load(tmp_path / "a.pt", place), torch.zeros(3))


class SavesOthers:
    """An object that saves a tensor of its own while it is pickled."""

    def __init__(self, path):
        self.path = path

    def __getstate__(self):
        torch.save(torch.zeros(3), self.path)
        return {"path": self.path}


def test_a_save_inside_another_never_loses_its_tensors_to_it(tmp_path):
    place, inner, outer = tmp_path / "fixed", tmp_path / "inner.pt", tmp_path / "outer.pt"
    for value in ([SavesOthers(inner), torch.ones(3)], [torch.ones(3), SavesOthers(inner)]):
        with tensorizer_saving(place), pytest.raises(ValueError, match="already holds the tensors"):
            torch.save(value, outer)
        assert torch.equal(load(inner, place), torch.zeros(3))
    with tensorizer_saving(place):
        torch.save([SavesOthers(inner)], outer)  # has no tensors of its own
    assert torch.equal(load(inner, place), torch.zeros(3))


def test_a_fixed_place_may_be_used_again_while_it_holds_nothing_and_in_another_block(tmp_path, pt):
    place = tmp_path / "fixed"

    @tensorizer_saving(place)
    def checkpoint(value):
        torch.save({"no": "tensors"}, pt)
        torch.save(value, pt)

    @tensorizer_loading(place, device="cpu")
    def resume():
        return torch.load(pt), torch.load(pt)

    for value in (torch.zeros(2), torch.ones(2)):
        checkpoint(value)  # a block of its own on every call
        assert all(torch.equal(again, value) for again in resume())


# --- functions that replace writing and reading --------------------------------------------------------------------


def test_save_func_gets_the_place_the_storages_and_the_keywords(pt):
    calls = []
    tensor = torch.randn(5)
    save([tensor, tensor[1:], torch.ones(1)], pt, save_func=lambda *arguments: calls.append(arguments), answer=42)
    ((place, tensors, kwargs),) = calls
    assert place == str(sidecar_of(pt))
    assert kwargs == {"answer": 42}
    assert [(t.dtype, t.dim(), t.numel()) for t in tensors] == [(torch.uint8, 1, 20), (torch.uint8, 1, 4)]
    assert tensors[0].data_ptr() == tensor.data_ptr()


def test_save_func_may_use_one_place_many_times_and_its_error_reaches_the_caller(tmp_path):
    places = []

    def save_func(place, *_):
        places.append(place)
        if len(places) == 3:
            raise ConnectionError("no storage today")

    with tensorizer_saving(tmp_path / "fixed", save_func=save_func):
        torch.save(ONES, tmp_path / "a.pt")
        torch.save(ONES, tmp_path / "b.pt")
        with pytest.raises(ConnectionError, match="no storage today"):
            torch.save(ONES, tmp_path / "c.pt")
    assert places == [tmp_path / "fixed"] * 3


def test_load_func_gets_the_place_and_the_keywords_and_may_be_a_generator(pt):
    save([torch.ones(2), torch.zeros(3)], pt)
    calls = []

    def load_func(place, kwargs):
        calls.append((place, kwargs))
        yield from TensorDeserializer(place, device="cpu").tree()

    with tensorizer_loading(load_func=load_func, answer=42):
        loaded = torch.load(pt, weights_only=False)
    assert calls == [(str(sidecar_of(pt)), {"answer": 42})]
    assert [t.tolist() for t in loaded] == [[1, 1], [0, 0, 0]]


def test_checkpoints_can_be_written_in_the_background(tmp_path):
    """The pattern of the published guide: copy to the host, write in a thread, go on training."""
    net, futures = torch.nn.Linear(4, 4), []

    def save_in_background(place, tensors, kwargs):
        copies = [tensor.clone() for tensor in tensors]
        futures.append(pool.submit(samples.write_state_dict, place, copies, **kwargs))

    with (
        ThreadPoolExecutor(max_workers=1) as pool,
        tensorizer_saving(save_func=save_in_background, limit_cpu_concurrency=1),
    ):
        expected = []
        for step in range(3):
            torch.save(net.state_dict(), tmp_path / f"{step}.pt")
            expected.append({name: value.clone() for name, value in net.state_dict().items()})
            with torch.no_grad():
                net.weight.add_(1)
    for step, future in enumerate(futures):
        future.result(60)
        samples.assert_same(load(tmp_path / f"{step}.pt"), expected[step])


# --- keywords ------------------------------------------------------------------------------------------------------


def test_encryption_passes_through_and_a_wrong_key_leaves_the_block_usable(pt):
    key = EncryptionParams.random().key
    save(torch.ones(3), pt, encryption=EncryptionParams(key=key))
    with pytest.raises(tensorizer.CryptographyError):
        load(pt)
    with tensorizer_loading(device="cpu", encryption=DecryptionParams.from_key(bytes(32))):
        with pytest.raises(tensorizer.CryptographyError):
            torch.load(pt)
        torch_save({"plain": torch.zeros(1)}, pt.with_name("plain.pt"))
        for arguments in ({}, {"weights_only": True}):
            assert torch.load(pt.with_name("plain.pt"), **arguments)["plain"].item() == 0
    assert torch.equal(load(pt, encryption=DecryptionParams.from_key(key)), torch.ones(3))


@pytest.mark.parametrize("keyword", [{"num_readers": 2}, {"verify_hash": True}, {"lazy_load": True}], ids=str)
def test_deserializer_keywords_pass_through(pt, keyword):
    save([torch.randn(50), torch.ones(1000)], pt, limit_cpu_concurrency=1)
    assert torch.equal(load(pt, **keyword)[1], torch.ones(1000))
    data = bytearray(sidecar_of(pt).read_bytes())
    data[data.rindex(b"\x00\x00\x80\x3f")] ^= 1
    sidecar_of(pt).write_bytes(data)
    if "verify_hash" in keyword:
        with pytest.raises(tensorizer.serialization.HashMismatchError):
            load(pt, **keyword)
    else:
        assert not torch.equal(load(pt, **keyword)[1], torch.ones(1000))


def test_unknown_keywords_are_refused_and_a_dtype_since_it_would_convert_bytes(pt):
    with pytest.raises(TypeError):
        save(ONES, pt, no_such_option=1)
    save(ONES, pt)
    with pytest.raises(TypeError):
        load(pt, no_such_option=1)
    with pytest.raises(ValueError, match="convert the tensors after"):
        load(pt, dtype=torch.float16)
    assert torch.equal(load(pt, dtype=None), ONES)


# --- map_location --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "map_location", ["cpu", torch.device("cpu"), {"cuda:0": "cpu", "cpu": "cpu"}, lambda storage, tag: storage]
)
def test_map_location_decides_where_tensors_go(pt, map_location, monkeypatch):
    save(torch.ones(3), pt)
    seen = []
    original = TensorDeserializer.__init__

    def spy(self, *args, **kwargs):
        seen.append(kwargs.get("device"))
        original(self, *args, **kwargs)

    monkeypatch.setattr(TensorDeserializer, "__init__", spy)
    with tensorizer_loading():
        loaded = torch.load(pt, map_location=map_location)
    assert loaded.device.type == "cpu"
    assert torch.equal(loaded, torch.ones(3))
    assert seen == [torch.device("cpu")]


def test_map_location_can_send_everything_to_the_meta_device_and_an_explicit_device_wins(pt):
    save(torch.ones(3, 2), pt)
    for map_location in ("meta", {"cpu": "meta"}):
        loaded = load(pt, device=None, load_kwargs={"map_location": map_location})
        assert loaded.is_meta
        assert loaded.shape == (3, 2)
        assert load(pt, device="cpu", load_kwargs={"map_location": map_location}).device.type == "cpu"


def test_a_map_function_sees_each_storage_once_and_its_answer_is_used(pt):
    save([torch.ones(3), torch.zeros(2)], pt)
    seen = []

    def move(storage, tag):
        seen.append((storage.nbytes(), storage.device.type, tag))
        return None if len(seen) == 1 else torch.UntypedStorage(b"\x05" * 8)

    with tensorizer_loading():
        first, second = torch.load(pt, map_location=move)
    assert seen == [(12, "cpu", "cpu"), (8, "cpu", "cpu")]
    assert torch.equal(first, torch.ones(3))
    assert bytes(second.view(torch.uint8).numpy()) == b"\x05" * 8


@pytest.mark.gpu
def test_map_location_and_device_reach_the_gpu(pt):
    save({"a": torch.ones(3, device="cuda")}, pt)
    with tensorizer_loading():
        assert torch.load(pt)["a"].is_cuda
        assert not torch.load(pt, map_location="cpu")["a"].is_cuda
        assert torch.load(pt, map_location={"cuda:0": "cpu"})["a"].device.type == "cpu"
    assert load(pt, device="cuda")["a"].sum().item() == 3


# --- weights_only --------------------------------------------------------------------------------------------------


class Danger:
    ran = False

    def __reduce__(self):
        return (set_danger, ())


def set_danger():
    Danger.ran = True


def test_weights_only_refuses_what_torch_refuses_and_the_environment_can_force_it(pt, monkeypatch):
    save({"tensor": ONES, "danger": Danger()}, pt)
    with pytest.raises(pickle.UnpicklingError, match=r"set_danger|Unsupported"):
        load(pt, load_kwargs={"weights_only": True})
    assert not Danger.ran
    load(pt, load_kwargs={"weights_only": True}, suppress_weights_only=True)
    assert Danger.ran
    Danger.ran = False
    save({"tensor": ONES}, pt.with_name("harmless.pt"))
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    assert torch.equal(load(pt.with_name("harmless.pt"))["tensor"], ONES)
    for suppress in (False, True):
        with pytest.raises(pickle.UnpicklingError):
            load(pt, suppress_weights_only=suppress)
    assert not Danger.ran


def test_weights_only_accepts_what_the_user_declared_safe(pt):
    save({"tensor": torch.ones(1), "path": Path("x")}, pt)
    with pytest.raises(pickle.UnpicklingError):
        load(pt, load_kwargs={"weights_only": True})
    if not hasattr(torch.serialization, "safe_globals"):
        pytest.skip("torch 2.5 and later take such declarations for a block")
    globals_needed = [type(Path("x")), Path]
    with torch.serialization.safe_globals(globals_needed):
        assert load(pt, load_kwargs={"weights_only": True})["path"] == Path("x")


def test_data_that_looks_like_a_reference_stays_data(pt):
    lookalike = ("TensorizerPickler", 0, "storage", 0, torch.float32)
    save({"lookalike": lookalike, "tensor": torch.ones(2)}, pt)
    for weights_only in (True, False):
        loaded = load(pt, load_kwargs={"weights_only": weights_only})
        assert loaded["lookalike"] == lookalike
        assert loaded["lookalike"][0] == "TensorizerPickler"
        assert hash(loaded["lookalike"][0]) == hash("TensorizerPickler")


# --- the pair belongs together -------------------------------------------------------------------------------------


def test_a_sidecar_of_another_save_is_refused_even_with_equal_shapes(tmp_path):
    for name, value in (("old", torch.zeros(3)), ("new", torch.ones(3))):
        save({"w": value, "name": "same"}, tmp_path / f"{name}.pt")
    (tmp_path / "old.pt.tensors").replace(tmp_path / "new.pt.tensors")
    for weights_only in (True, False):
        with pytest.raises(ValueError, match=r"new\.pt\.tensors does not belong to this file"):
            load(tmp_path / "new.pt", load_kwargs={"weights_only": weights_only})


def without_number(path: Path) -> None:
    """What a sidecar looks like that another release or another tool wrote."""
    with path.open("r+b") as file:
        file.seek(49)
        file.write(bytes(8))


def test_without_a_number_count_and_sizes_are_compared(tmp_path):
    save([torch.zeros(3), torch.zeros(4)], tmp_path / "a.pt")
    save([torch.zeros(3), torch.zeros(5)], tmp_path / "b.pt")
    save([torch.zeros(3)], tmp_path / "c.pt")
    for name in "abc":
        without_number(tmp_path / f"{name}.pt.tensors")
    assert load(tmp_path / "a.pt")[1].shape == (4,)
    with pytest.raises(ValueError, match="storage 1: expected 16 bytes, got 20"):
        load(tmp_path / "a.pt", tmp_path / "b.pt.tensors")
    with pytest.raises(ValueError, match="expected 2 storages, got 1"):
        load(tmp_path / "a.pt", tmp_path / "c.pt.tensors")


def test_a_file_of_another_kind_is_no_sidecar(tmp_path, pt):
    save(ONES, pt)
    samples.write_state_dict(tmp_path / "named.tensors", {"weight": ONES})
    with pytest.raises(ValueError, match=r"named\.tensors"):
        load(pt, tmp_path / "named.tensors")


def test_a_reference_beyond_the_sidecar_is_named(tmp_path):
    save([torch.zeros(1), torch.ones(1)], tmp_path / "two.pt")
    save([torch.zeros(1)], tmp_path / "one.pt")
    with pytest.raises(ValueError, match="2 storages"):
        load(tmp_path / "two.pt", load_func=lambda place, kwargs: [torch.zeros(1)])
    strip_note(tmp_path / "two.pt")
    with pytest.raises(ValueError, match="expected storage 1, got 1 storage"):
        load(tmp_path / "two.pt", tmp_path / "one.pt.tensors")


def test_a_sidecar_with_too_short_a_storage_never_yields_what_memory_held(tmp_path):
    pt, forged = tmp_path / "r.pt", tmp_path / "forged.tensors"
    for zipped, weights_only in itertools.product((False, True), repeat=2):
        with tensorizer_saving():
            torch.save({"a": torch.arange(1000.0)}, pt, _use_new_zipfile_serialization=zipped)
        if zipped:
            strip_note(pt)
        asked = {"weights_only": weights_only}
        for nbytes in (0, 8):
            with TensorSerializer(forged) as serializer:
                serializer.write_state_dict([torch.zeros(nbytes, dtype=torch.uint8)])
            for place in ({"map_location": "cpu"}, {"map_location": lambda storage, tag: storage}):
                with pytest.raises(FormatError, match=r"forged\.tensors does not belong to this file: (a )?storage"):
                    load(pt, forged, device=None, load_kwargs={**asked, **place})
        with pytest.raises(FormatError, match="does not belong to this file: storage 0: expected 4000 bytes, got 8"):
            load(pt, load_func=lambda place, kwargs: [torch.zeros(2)], load_kwargs=asked)
        assert load(pt, load_kwargs=asked)["a"][999] == 999


def test_an_empty_tensor_on_an_empty_storage_of_the_sidecar_loads(pt):
    with tensorizer_saving():
        torch.save(torch.arange(3.0)[3:], pt, _use_new_zipfile_serialization=False)
    for nbytes in (0, 12):
        with TensorSerializer(sidecar_of(pt)) as serializer:
            serializer.write_state_dict([torch.zeros(nbytes, dtype=torch.uint8)])
        assert load(pt).shape == (0,)


def rewrite(pt: Path, change) -> None:
    """Puts what ``change`` makes of the pickle in its place."""
    with zipfile.ZipFile(pt) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(pt, "w", zipfile.ZIP_STORED) as archive:
        for name, data in records.items():
            archive.writestr(name, change(data) if name.endswith("data.pkl") else data)


def strip_note(pt: Path) -> None:
    """Cut off what stands behind the pickle: what the file of another release looks like."""

    def strip(data):
        assert data.endswith(b"TZRPAIR1")
        return data[: -24 - 8 * int.from_bytes(data[-16:-8], "little")]

    rewrite(pt, strip)


@pytest.mark.parametrize(
    "pid",
    [
        ("TensorizerPickler", 1, "storage", 0, None),
        ("TensorizerPickler", 0, "tensor", 0, None),
        ("TensorizerPickler", 0, "storage", "0", None),
        ("TensorizerPickler", 0, "storage", 0, "float32"),
        ("TensorizerPickler", 0, "storage"),
    ],
    ids=str,
)
def test_unknown_references_are_unpickling_errors(pt, pid):
    save(ONES, pt)

    class Writer(pickle.Pickler):
        def persistent_id(self, obj):
            return pid if isinstance(obj, Danger) else None

    data = io.BytesIO()
    Writer(data, protocol=2).dump([Danger()])
    rewrite(pt, lambda _: data.getvalue())
    for weights_only in (False, True):
        with pytest.raises(pickle.UnpicklingError):
            load(pt, load_kwargs={"weights_only": weights_only})


def test_a_pipe_in_the_place_of_the_sidecar_is_refused_at_once(pt):
    save(ONES, pt)
    sidecar_of(pt).unlink()
    os.mkfifo(sidecar_of(pt))
    refused = []

    def attempt():
        with pytest.raises(io.UnsupportedOperation, match="named pipe"):
            load(pt)
        refused.append(True)

    thread = threading.Thread(target=attempt, daemon=True)  # it would wait for ever
    thread.start()
    thread.join(20)
    assert refused


def test_plain_torch_refuses_such_a_file(pt):
    save(torch.ones(3), pt)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(pt, weights_only=True)
    with pytest.raises(AssertionError):
        torch.load(pt, weights_only=False)


# --- a pair whose files are renamed, copied, moved or deleted ------------------------------------------------------


def full(number: float) -> dict:
    return {"w": torch.full((50,), float(number)), "number": number}


def assert_full(f, number: float, **kwargs) -> None:
    for weights_only in (True, False):
        loaded = load(f, load_kwargs={"weights_only": weights_only}, **kwargs)
        assert loaded["number"] == number
        assert loaded["w"].unique().tolist() == [number]


def weights_of(f) -> str:
    return os.fspath(f if isinstance(f, os.PathLike) else f.name) + ".weights"


FORMATS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "older format"])


def save_full(number: float, f, zipped: bool, *args, **kwargs) -> None:
    with tensorizer_saving(*args, **kwargs):
        torch.save(full(number), f, _use_new_zipfile_serialization=zipped)


@FORMATS
@pytest.mark.parametrize("is_open", [False, True], ids=["path", "open file"])
@pytest.mark.parametrize("location", [None, lambda f: weights_of(f)], ids=["default", "function"])
def test_checkpoints_that_are_renamed_after_each_save_keep_their_tensors(tmp_path, zipped, is_open, location):
    temporary = tmp_path / "ckpt.tmp"
    for step in range(4):
        if is_open:
            with temporary.open("wb") as file:
                save_full(step, file, zipped, location)
        else:
            save_full(step, temporary, zipped, location)
        temporary.replace(tmp_path / f"step{step}.pt")
    for step in range(4):
        assert_full(tmp_path / f"step{step}.pt", step)
        assert_full(tmp_path / f"step{step}.pt", step, file_obj=location)
        with (tmp_path / f"step{step}.pt").open("rb") as file:
            assert load(file)["number"] == step
    assert len(list(tmp_path.iterdir())) == 8


@FORMATS
def test_a_copy_keeps_its_tensors_while_the_original_is_saved_again(tmp_path, zipped):
    for step in range(6):
        save_full(step, tmp_path / "last.pt", zipped)
        if step == 3:
            shutil.copy2(tmp_path / "last.pt", tmp_path / "best.pt")
    assert_full(tmp_path / "best.pt", 3)
    assert_full(tmp_path / "last.pt", 5)
    # Others are replaced as ever.
    assert sorted(file.name for file in tmp_path.iterdir() if file.suffix == ".pt") == ["best.pt", "last.pt"]
    assert len(list(tmp_path.iterdir())) == 4


def test_a_pair_that_was_copied_again_is_found_by_its_number(tmp_path):
    save(full(1), tmp_path / "last.pt")
    shutil.copy(tmp_path / "last.pt", tmp_path / "best.pt")
    shutil.copy(tmp_path / "last.pt.tensors", tmp_path / "best.pt.tensors")
    save(full(2), tmp_path / "last.pt")
    (tmp_path / "best.pt").replace(tmp_path / "final.pt")
    assert_full(tmp_path / "final.pt", 1)
    assert_full(tmp_path / "last.pt", 2)


@FORMATS
def test_a_pair_that_is_moved_to_another_folder_loads_there_under_any_name(tmp_path, zipped):
    (tmp_path / "there").mkdir()
    save_full(1, tmp_path / "a.pt", zipped)
    shutil.move(tmp_path / "a.pt", tmp_path / "there" / "b.pt")
    shutil.move(tmp_path / "a.pt.tensors", tmp_path / "there" / "a.pt.tensors")
    assert_full(tmp_path / "there" / "b.pt", 1)


def test_tensors_of_a_file_that_was_moved_away_stay_until_it_comes_back(tmp_path):
    (tmp_path / "there").mkdir()
    for step in (1, 2):
        save(full(step), tmp_path / "ckpt.tmp")
        (tmp_path / "ckpt.tmp").replace(tmp_path / "there" / f"{step}.pt")
    for step in (1, 2):
        with pytest.raises(FileNotFoundError, match=r"saved as 'ckpt\.tmp\.tensors', is not beside it") as caught:
            load(tmp_path / "there" / f"{step}.pt")
        for word in ("renamed", "copied", "moved to another folder", "rotation", f"{step}.pt.tensors"):
            assert word in str(caught.value)
    for path in tmp_path.glob("*.tensors"):
        path.replace(tmp_path / "there" / path.name)
    for step in (1, 2):
        assert_full(tmp_path / "there" / f"{step}.pt", step)


@FORMATS
def test_a_copy_never_loads_tensors_of_another_save(tmp_path, zipped):
    (tmp_path / "there").mkdir()
    save_full(1, tmp_path / "last.pt", zipped)
    shutil.copy(tmp_path / "last.pt", tmp_path / "there" / "last.pt")
    save_full(2, tmp_path / "last.pt", zipped)
    shutil.copy(tmp_path / "last.pt.tensors", tmp_path / "there")
    with pytest.raises(
        FormatError, match=r"last\.pt\.tensors does not belong to this file: it was written with"
    ) as caught:
        load(tmp_path / "there" / "last.pt")
    assert "renamed, copied or moved to another folder" in str(caught.value)


def test_a_sidecar_of_an_earlier_release_is_found_for_a_copy(tmp_path):
    """Whose note has no name."""
    save(full(1), tmp_path / "last.pt")

    def without_name(data):
        at = data.rindex(b"TZRNAME.")
        nbytes = int.from_bytes(data[at - 4 : at], "little")
        return data[: at - 4 - nbytes] + data[at + 8 :]

    rewrite(tmp_path / "last.pt", without_name)
    assert_full(tmp_path / "last.pt", 1)
    shutil.copy(tmp_path / "last.pt", tmp_path / "best.pt")
    save(full(2), tmp_path / "last.pt")
    assert_full(tmp_path / "best.pt", 1)


def test_a_name_in_a_file_does_not_lead_to_another_folder(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    save(full(1), folder / "last.pt")
    (folder / "last.pt.tensors").replace(tmp_path / "st.pt.tensors")

    rewrite(folder / "last.pt", lambda data: data.replace(b"last.pt.tensors", b"../st.pt.tensors"[:15]))
    with pytest.raises(FileNotFoundError):
        load(folder / "last.pt")


def test_large_files_beside_it_are_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(_pairs, "_LOOKED_THROUGH_NBYTES", 100)
    save(full(1), tmp_path / "last.pt")
    shutil.copy(tmp_path / "last.pt", tmp_path / "best.pt")
    torch.save(full(9), tmp_path / "plain.pt")
    (tmp_path / "broken.pt").write_bytes(b"PK\x03\x04" + bytes(200))
    save(full(2), tmp_path / "last.pt")
    assert_full(tmp_path / "best.pt", 1)


def test_long_names_are_cut_where_a_sidecar_gets_another_one(tmp_path):
    name = "ü" * 110 + ".pt"
    for step in (1, 2):
        save(full(step), tmp_path / name)
        (tmp_path / name).replace(tmp_path / f"{step}.pt")
    for step in (1, 2):
        assert_full(tmp_path / f"{step}.pt", step)


# --- several objects in one file -----------------------------------------------------------------------------------


@pytest.mark.parametrize("location", [None, lambda f: weights_of(f)], ids=["default", "function"])
@pytest.mark.parametrize("mode", ["one open file", "append mode"])
def test_objects_that_are_appended_to_one_file_keep_their_tensors(tmp_path, mode, location):
    path = tmp_path / "many.pt"
    with contextlib.ExitStack() as stack:
        once = stack.enter_context(path.open("wb")) if mode == "one open file" else None
        for number in range(3):
            with contextlib.nullcontext(once) if once else path.open("ab") as file:
                save_full(number, file, False, location)
    for weights_only, place in itertools.product((True, False), (None, location)):
        with path.open("rb") as file, tensorizer_loading(place, device="cpu"):
            found = [torch.load(file, weights_only=weights_only)["w"][0].item() for _ in range(3)]
        assert found == [0, 1, 2]


def test_objects_in_one_file_whose_tensors_could_not_be_told_apart_are_refused(tmp_path):
    path = tmp_path / "many.pt"
    with path.open("wb") as file:
        save_full(1, file, False, tmp_path / "fixed")
        with pytest.raises(ValueError, match=r"has the tensors of an object that is in .*many\.pt already"):
            save_full(2, file, False, tmp_path / "fixed")
    assert_full(path, 1, file_obj=tmp_path / "fixed")
    for target in (path.open("wb"), io.BytesIO()):
        with target, tensorizer_saving(lambda f: tmp_path / "place", save_func=lambda *_: None):
            torch.save(ONES, target, _use_new_zipfile_serialization=False)
            with pytest.raises(
                ValueError, match="already holds the tensors of an earlier object in the same open file"
            ):
                torch.save(ONES, target, _use_new_zipfile_serialization=False)
            target.seek(0)
            torch.save(ONES, target)  # in place of the first


# --- scope ---------------------------------------------------------------------------------------------------------


def test_the_replacements_look_like_the_originals():
    with tensorizer_saving(), tensorizer_loading():
        assert torch.save.__name__ == "save"
        assert torch.load.__name__ == "load"
        for now, then in ((torch.save, torch_save), (torch.load, torch_load)):
            assert now is not then
            ours = inspect.signature(now, follow_wrapped=False).parameters
            theirs = inspect.signature(then).parameters
            assert list(ours) == list(theirs)
            defaults = {name: p.default for name, p in theirs.items()}
            if "weights_only" in defaults:
                defaults["weights_only"] = None  # torch up to 2.3 says False
            assert {name: p.default for name, p in ours.items()} == defaults
        assert torch.save.__defaults__ == (pickle,)
        assert torch.load.__defaults__ == (None, torch_compat._LOAD_WRAPPER_DEFAULT_MODULE)
        assert torch.load.__kwdefaults__ == {"weights_only": None}


def test_other_pickle_modules_are_refused_inside_and_passed_through_outside(pt):
    class OtherPickle:
        Pickler, Unpickler, dump, load = pickle.Pickler, pickle.Unpickler, pickle.dump, pickle.load

        def __getattr__(self, name):
            return getattr(pickle, name)

    other = OtherPickle()
    other.__name__ = "other"
    with tensorizer_saving(), tensorizer_loading():
        with pytest.raises(ValueError, match="other"):
            torch.save(torch.ones(1), pt, other)
        with pytest.raises(ValueError, match="other"):
            torch.load(pt, pickle_module=other)
        torch.save(torch.ones(1), pt, None)
        torch.save(torch.ones(1), pt, pickle_module=pickle)
        torch.load(pt, pickle_module=pickle)

        def elsewhere():
            torch.save(torch.ones(1), pt, other)
            return torch.load(pt, pickle_module=other, weights_only=False)

        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(elsewhere).result(60).item() == 1


def test_other_threads_are_unaffected_and_may_have_their_own_blocks(tmp_path):
    def in_thread(function):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(function).result(60)

    with tensorizer_saving(), tensorizer_loading(device="cpu"):
        in_thread(lambda: torch.save(torch.ones(1), tmp_path / "plain.pt"))
        assert not (tmp_path / "plain.pt.tensors").exists()
        in_thread(lambda: save(torch.ones(1), tmp_path / "own.pt", tmp_path / "own.place"))
        assert (tmp_path / "own.place").exists()
        torch.save(torch.ones(1), tmp_path / "mine.pt")
        assert (tmp_path / "mine.pt.tensors").exists()
        with pytest.raises((pickle.UnpicklingError, AssertionError)):
            in_thread(lambda: torch.load(tmp_path / "mine.pt"))
        assert in_thread(lambda: torch.load(tmp_path / "plain.pt", weights_only=True)).item() == 1


def test_many_threads_at_once_do_not_mix_up_their_files(tmp_path):
    start = threading.Barrier(8)

    def work(number):
        start.wait(60)
        for turn in range(5):
            file = tmp_path / f"{number}-{turn}.pt"
            value = torch.full((100,), float(number * 10 + turn))
            save({"value": value, "tied": value[3:]}, file)
            loaded = load(file, load_kwargs={"weights_only": turn % 2 == 0})
            assert torch.equal(loaded["value"], value)
            assert loaded["tied"].is_set_to(loaded["value"][3:])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8), timeout=120))


def test_tasks_are_separate(tmp_path):
    async def inside(ready, go):
        with tensorizer_saving():
            ready.set()
            await go.wait()
            torch.save(ONES, tmp_path / "inside.pt")

    async def outside(ready, go):
        await ready.wait()
        torch.save(ONES, tmp_path / "outside.pt")
        go.set()

    async def main():
        events = asyncio.Event(), asyncio.Event()
        await asyncio.gather(inside(*events), outside(*events))

    asyncio.run(main())
    assert {file.name for file in tmp_path.iterdir()} == {"outside.pt", "inside.pt", "inside.pt.tensors"}


def test_inner_blocks_apply_completely_and_outer_ones_return(tmp_path):
    def names():
        return {file.name for file in tmp_path.iterdir()}

    with tensorizer_saving(tmp_path / "outer"):
        with tensorizer_saving():
            torch.save(torch.ones(1), tmp_path / "a.pt")
            assert names() == {"a.pt", "a.pt.tensors"}
        torch.save(torch.ones(1), tmp_path / "b.pt")
        assert names() == {"a.pt", "a.pt.tensors", "b.pt", "outer"}
    with tensorizer_loading(tmp_path / "outer", device="cpu"):
        with tensorizer_loading(device="cpu"):
            assert torch.load(tmp_path / "a.pt").item() == 1
        assert torch.load(tmp_path / "b.pt").item() == 1


def test_saving_and_loading_blocks_may_end_in_any_order_and_are_entered_once(pt):
    saving, loading = tensorizer_saving(), tensorizer_loading(device="cpu")
    saving.__enter__()
    loading.__enter__()
    torch.save(ONES, pt)
    saving.__exit__(None, None, None)
    assert torch.save is torch_save
    assert torch.equal(torch.load(pt), ONES)
    loading.__exit__(None, None, None)
    with pytest.raises((RuntimeError, AttributeError)), saving:
        pass


def test_patches_of_others_are_bypassed_inside_and_back_afterwards(pt):
    calls = []

    @functools.wraps(torch_save)
    def patched(*args, **kwargs):
        calls.append(args)
        return torch_save(*args, **kwargs)

    torch.save = patched
    try:
        save(ONES, pt)
        assert calls == []
        assert torch.save is patched
        torch.save(ONES, pt)
        assert len(calls) == 1
    finally:
        torch.save = torch_save


def test_references_taken_earlier_are_not_affected_and_those_taken_inside_act_like_the_originals_outside(pt):
    with tensorizer_saving(), tensorizer_loading(device="cpu"):
        taken_save, taken_load = torch.save, torch.load
        torch_save(ONES, pt)
        assert not sidecar_of(pt).exists()
    taken_save(ONES, pt)
    assert not sidecar_of(pt).exists()
    assert torch.equal(taken_load(pt, weights_only=True), ONES)
    with tensorizer_saving():
        taken_save(ONES, pt)
    assert sidecar_of(pt).exists()


def test_an_exception_in_the_block_restores_everything(pt):
    with pytest.raises(ZeroDivisionError), tensorizer_saving(), tensorizer_loading():
        raise ZeroDivisionError
    torch.save(ONES, pt)
    assert not sidecar_of(pt).exists()


def test_nothing_is_kept_alive_and_no_descriptor_stays_open(pt, leaves_no_descriptors):
    net = torch.nn.Linear(10, 10)
    alive = weakref.ref(net)
    save(net, pt)
    del net
    gc.collect()
    assert alive() is None
    save([ONES, torch.zeros(2)], pt)
    load(pt)
    load(pt, load_kwargs={"weights_only": True})
    with pytest.raises(ValueError):
        load(pt, dtype=torch.float16)


def test_ambient_devices_and_dtypes_do_not_matter(pt):
    tensor = torch.randn(3)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            save({"tensor": tensor}, pt)
            loaded = load(pt)
    finally:
        torch.set_default_dtype(default)
    assert loaded["tensor"].device.type == "cpu"
    assert torch.equal(loaded["tensor"], tensor)


# --- decorators ----------------------------------------------------------------------------------------------------


def decorated_saves(block):
    """Functions of every kind under the decorator, each of which saves what it is given, as functions of a path."""

    @block
    def function(path):
        torch.save(ONES, path)

    @block
    async def coroutine(path):
        await asyncio.sleep(0)
        torch.save(ONES, path)
        await asyncio.sleep(0)

    @block
    def generator(path):
        yield 1
        torch.save(ONES, path)
        yield 2

    @block
    async def async_generator(path):
        yield 1
        await asyncio.sleep(0)
        torch.save(ONES, path)
        yield 2

    @block
    def hidden_coroutine(path):
        async def inner():
            torch.save(ONES, path)

        return inner()

    class WithMethod:
        @block
        async def method(self, path):
            torch.save(ONES, path)

    async def drain(path):
        assert [number async for number in async_generator(path)] == [1, 2]

    async def apart(path):
        await asyncio.create_task(coroutine(path))

    assert inspect.iscoroutinefunction(coroutine)
    assert inspect.isgeneratorfunction(generator)
    assert inspect.isasyncgenfunction(async_generator)
    assert coroutine.__name__ == "coroutine"
    return {
        "function": function,
        "coroutine": lambda path: asyncio.run(coroutine(path)),
        "task": lambda path: asyncio.run(apart(path)),
        "generator": lambda path: list(generator(path)),
        "async generator": lambda path: asyncio.run(drain(path)),
        "function that returns a coroutine": lambda path: asyncio.run(hidden_coroutine(path)),
        "partial": lambda path: asyncio.run(block(functools.partial(coroutine.__wrapped__, path))()),
        "method": lambda path: asyncio.run(WithMethod().method(path)),
    }


def test_decorated_functions_of_every_kind_save_within_the_block(tmp_path):
    key = EncryptionParams.random()
    for number, (kind, call) in enumerate(decorated_saves(tensorizer_saving(encryption=key)).items()):
        path = tmp_path / f"{number}.pt"
        call(path)
        assert sidecar_of(path).exists(), kind
        assert ONES.numpy().tobytes() not in path.read_bytes() + sidecar_of(path).read_bytes(), kind


def test_decorated_functions_of_every_kind_load_within_the_block(pt):
    save(ONES, pt)

    @tensorizer_loading(device="cpu")
    async def coroutine():
        return torch.load(pt)

    @tensorizer_loading(device="cpu")
    def generator():
        yield torch.load(pt)

    @tensorizer_loading(device="cpu")
    async def async_generator():
        yield torch.load(pt)

    async def drain():
        return [loaded async for loaded in async_generator()]

    for loaded in (asyncio.run(coroutine()), *generator(), *asyncio.run(drain())):
        assert torch.equal(loaded, ONES)


def test_what_others_do_between_the_steps_of_a_decorated_generator_is_not_in_its_block(tmp_path):
    @tensorizer_saving(encryption=EncryptionParams.random())
    def generator():
        got = yield "first"
        torch.save(ONES, tmp_path / f"{got}.pt")
        try:
            yield "second"
        except KeyError:
            torch.save(ONES, tmp_path / "caught.pt")
        yield "third"
        return "end"

    def outer():
        assert (yield from generator()) == "end"

    steps = outer()
    assert next(steps) == "first"
    assert torch.save is torch_save
    torch.save(ONES, tmp_path / "plain.pt")
    assert steps.send("sent") == "second"
    assert steps.throw(KeyError()) == "third"
    torch.save(ONES, tmp_path / "plain too.pt")
    assert next(steps, None) is None
    left = generator()
    next(left)
    left.close()
    assert {file.name for file in tmp_path.iterdir()} == {
        *("sent.pt", "sent.pt.tensors", "caught.pt", "caught.pt.tensors", "plain.pt", "plain too.pt")
    }


def test_a_decorated_async_generator_gets_what_is_sent_and_thrown_and_ends_when_it_is_closed(tmp_path):
    ended = []

    @tensorizer_saving()
    async def generator():
        try:
            got = yield 1
            try:
                yield got
            except KeyError:
                torch.save(ONES, tmp_path / "caught.pt")
            yield 3
        finally:
            await asyncio.sleep(0)
            torch.save(ONES, tmp_path / "end.pt")
            ended.append(True)

    async def main():
        steps = generator()
        assert await steps.__anext__() == 1
        torch.save(ONES, tmp_path / "plain.pt")
        assert await steps.asend(2) == 2
        assert await steps.athrow(KeyError()) == 3
        await steps.aclose()

    asyncio.run(main())
    assert ended == [True]
    assert {file.name for file in tmp_path.iterdir()} == {
        *("caught.pt", "caught.pt.tensors", "end.pt", "end.pt.tensors", "plain.pt")
    }


def test_tasks_beside_a_decorated_coroutine_are_not_in_its_block(tmp_path):
    @tensorizer_saving()
    async def inside(waiting, go):
        waiting.set()
        await go.wait()
        torch.save(ONES, tmp_path / "inside.pt")

    async def main():
        waiting, go = asyncio.Event(), asyncio.Event()
        task = asyncio.ensure_future(inside(waiting, go))
        await waiting.wait()
        torch.save(ONES, tmp_path / "outside.pt")
        go.set()
        await task

    asyncio.run(main())
    assert {file.name for file in tmp_path.iterdir()} == {"outside.pt", "inside.pt", "inside.pt.tensors"}


# --- what is to be encrypted or signed is never stored without -----------------------------------------------------


def protections():
    return [{"encryption": EncryptionParams.random()}, {"signing_key": tensorizer.SigningKey.generate()}]


@pytest.mark.parametrize("keyword", protections(), ids=lambda keyword: next(iter(keyword)))
class TestProtected:
    def test_memory_is_refused(self, keyword):
        buffer = io.BytesIO()
        with tensorizer_saving(**keyword):
            with pytest.raises(ValueError, match=r"ignore \w+= of tensorizer_saving: io.BytesIO has no name"):
                torch.save({"a": [ONES]}, buffer)
            assert buffer.getvalue() == b""
            torch.save({"step": 3}, buffer)  # nothing in it is a tensor's
            assert torch.equal(pickle.loads(pickle.dumps(ONES)), ONES)
        buffer.seek(0)
        assert torch.load(buffer) == {"step": 3}

    @pytest.mark.parametrize("location", [lambda f: None, [lambda f: None]], ids=["function", "list"])
    def test_a_location_that_asks_for_plain_torch_is_refused_before_the_file_is_replaced(self, pt, keyword, location):
        pt.write_bytes(b"old")
        with tensorizer_saving(location, **keyword), pytest.raises(ValueError, match="asks for plain torch"):
            torch.save(ONES, pt)
        assert pt.read_bytes() == b"old"

    def test_other_threads_are_refused_unless_they_have_a_block(self, tmp_path, keyword):
        pt = tmp_path / "a.pt"
        pt.write_bytes(b"old")
        with ThreadPoolExecutor(1) as pool:

            def in_thread(function, *arguments):
                return pool.submit(function, *arguments).result(60)

            in_thread(int)  # so that its thread is older than the block
            with tensorizer_saving(**keyword):
                for function in (torch.save, lambda *arguments: torch.save(*arguments), torch_save):
                    with pytest.raises(RuntimeError, match="a thread or task without a tensorizer_saving block"):
                        in_thread(function, ONES, pt)
                    if function is not torch_save:
                        assert pt.read_bytes() == b"old"
                in_thread(torch.save, {"step": 1}, tmp_path / "step.pt")
                in_thread(save, ONES, tmp_path / "own.pt")
                in_thread(save, ONES, tmp_path / "plain.pt", lambda f: None)
            in_thread(torch.save, ONES, pt)
        assert sidecar_of(tmp_path / "own.pt").exists()
        assert torch.equal(torch.load(tmp_path / "plain.pt"), ONES)
        assert torch.equal(torch.load(pt), ONES)

    def test_threads_that_a_decorated_coroutine_waits_for_are_refused(self, pt, keyword):
        @tensorizer_saving(**keyword)
        async def coroutine():
            await asyncio.get_running_loop().run_in_executor(None, lambda: torch.save(ONES, pt))

        with pytest.raises(RuntimeError, match="a thread or task without"):
            asyncio.run(coroutine())
        assert not pt.exists()

    @pytest.mark.parametrize("zipped", [True, False])
    def test_older_references_to_torch_save_are_refused(self, pt, keyword, zipped):
        with tensorizer_saving(**keyword):
            for function in (torch_save, torch.serialization.save):
                with pytest.raises(ValueError, match="went around the block"):
                    function(ONES, pt, _use_new_zipfile_serialization=zipped)
        assert ONES.numpy().tobytes() not in pt.read_bytes()
        torch_save(ONES, pt)
        assert torch.equal(torch.load(pt), ONES)

    def test_tasks_that_outlive_the_block_are_refused(self, pt, keyword):
        async def later():
            await asyncio.sleep(0)
            torch.save(ONES, pt)

        async def main():
            with tensorizer_saving(**keyword):
                task = asyncio.ensure_future(later())
            await task

        with pytest.raises(ValueError, match="went around the block"):
            asyncio.run(main())

    def test_the_function_does_not_go_to_another_process(self, pt, keyword):
        with tensorizer_saving(**keyword), pytest.raises(pickle.PicklingError):
            pickle.dumps(torch.save)

    def test_an_inner_block_without_keys_decides(self, pt, keyword):
        with tensorizer_saving(**keyword), tensorizer_saving(lambda f: None):
            torch.save(ONES, pt)
            torch.save(ONES, io.BytesIO())
        assert torch.equal(torch.load(pt), ONES)


@pytest.mark.slow
def test_a_storage_of_more_than_4_gib_survives(tmp_path):
    available = tensorizer.utils.CPUMemoryUsage.now().free
    if available < 11 << 30:
        pytest.skip(f"needs 11 GiB of memory, {available >> 30} GiB are available")
    pt = tmp_path / "large.pt"
    nbytes = (1 << 32) + 16
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    tensor[-3:] = torch.tensor([7, 8, 9], dtype=torch.uint8)
    save({"large": tensor, "tail": tensor[-3:]}, pt)
    del tensor
    loaded = load(pt)
    assert loaded["large"].numel() == nbytes
    assert loaded["tail"].tolist() == [7, 8, 9]
    assert loaded["large"][-3:].is_set_to(loaded["tail"])
