"""write_module, load_into_module and verify_module: names, order, sharing, replacement, buffers, errors."""

from __future__ import annotations

import errno
import io
import itertools
import re
import weakref

import pytest
import reference_format as fmt
import samples
import torch
from samples import assert_same, named_tensor, tensor
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import tensorizer
from tensorizer import FormatError, HashMismatchError, LoadError, TensorDeserializer, TensorSerializer, TensorType
from tensorizer.torch import save_file

pytestmark = pytest.mark.usefixtures("eager_and_lazy")


def module_bytes(module, **flags) -> bytes:
    return samples.write_module(samples.KeptBytesIO(), module, **flags).getvalue()


def open_bytes(data, **options):
    return TensorDeserializer(io.BytesIO(data), device="cpu", **options)


def load_into(module, data, **options):
    with open_bytes(data, **options) as deserializer:
        return deserializer.load_into_module(module)


# --- writing --------------------------------------------------------------------------------------------------------


def test_names_order_types_and_indices_are_those_of_the_module_walk():
    model = samples.net()
    modules = [path for path, _ in model.named_modules()]
    data = module_bytes(model)
    assert fmt.rewrite(fmt.read_file(data)) == data
    with open_bytes(data) as deserializer:
        found = list(deserializer.read_tensors())
    names = [name for _, _, name, _ in found]
    assert names == samples.module_names(model)
    for idx, kind, name, value in found:
        path, attribute = name.rsplit(".", 1)
        assert idx == modules.index(path)
        is_parameter = attribute in model.get_submodule(path)._parameters
        assert kind is (TensorType.PARAM if is_parameter else TensorType.BUFFER)
        assert samples.same(value, named_tensor(model, name))
    assert ".scale" in names  # of the root
    assert {"embed.weight", "head.weight"} <= set(names)  # tied weights once per name
    assert "blocks.0.linear.weight" in names  # a module under two names once
    assert not [name for name in names if name.startswith("again.")]


def test_one_parameter_twice_in_one_module_is_written_once():
    module = nn.Module()
    module.first = nn.Parameter(tensor())
    module.second = module.first
    assert [record.path for record in fmt.read_file(module_bytes(module)).records] == [(".first",)]


@pytest.mark.parametrize("persistent_only", [False, True])
def test_non_persistent_buffers_are_written_unless_told_otherwise(persistent_only):
    model = samples.net()
    data = module_bytes(model, include_non_persistent_buffers=not persistent_only)
    names = [record.path[0] for record in fmt.read_file(data).records]
    assert names == samples.module_names(model, persistent_only=persistent_only)
    # persistent buffers of the root stay, whatever the flag says
    assert ".steps" in names
    assert (".cache" in names) is not persistent_only


def test_remove_tensors_strips_the_module_and_changes_nothing_in_the_file():
    model = samples.net()
    wanted = module_bytes(model)
    names = samples.module_names(model)
    alive = [weakref.ref(value) for value in model.parameters()]
    assert module_bytes(model, remove_tensors=True) == wanted
    for name in names:
        path, attribute = name.rsplit(".", 1)
        module = model.get_submodule(path)
        assert getattr(module, attribute) is None
        assert attribute in module._parameters or attribute in module._buffers
    assert samples.module_names(model) == []
    assert [ref() for ref in alive] == [None] * len(alive)


@pytest.mark.parametrize(("ties", "expected"), [("once", [4, 3, 2, 1]), ("twice", [4, 4, 3, 2, 1])])
def test_remove_tensors_frees_each_tensor_before_the_next_one_is_written(monkeypatch, ties, expected):
    from tensorizer import serializer as module
    from tensorizer._save import session

    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(100)) for _ in range(4)])
    tied = torch.nn.Module()
    tied.weight = model[0]  # written last once more, where names are stored twice
    alive = [weakref.ref(tensor) for tensor in model]
    found = []

    def write(*arguments) -> None:
        found.append(sum(ref() is not None for ref in alive))
        session.write_tensors(*arguments)

    monkeypatch.setattr(session, "_COPY_BUDGET_NBYTES", 1)  # a batch is one tensor
    monkeypatch.setattr(module, "write_tensors", write)
    with TensorSerializer(io.BytesIO(), ties=ties) as serializer:
        serializer.write_module(torch.nn.ModuleList([model, tied]), remove_tensors=True)
    assert found == expected
    assert [ref() for ref in alive] == [None] * len(alive)


class Full(io.BytesIO):
    """A file that takes so many writes, and no more."""

    def __init__(self, writes):
        super().__init__()
        self.left = writes

    def write(self, data):
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, "no room")
        return super().write(data)


@pytest.mark.parametrize("ties", ["once", "twice"])
@pytest.mark.parametrize("budget", [1, 900, 256 << 20], ids=["each alone", "two together", "all together"])
def test_remove_tensors_leaves_what_a_failed_write_did_not_store(monkeypatch, budget, ties):
    """And all of it where it fits the budget, whenever the write fails; its end is a part of it."""
    from tensorizer._save import session

    monkeypatch.setattr(session, "_COPY_BUDGET_NBYTES", budget)
    failed = 0
    for writes in range(100):
        model = torch.nn.ParameterList([torch.nn.Parameter(tensor((100,), seed=i)) for i in range(8)])
        model.again = torch.nn.Module()
        model.again.weight = model[0]
        wanted = {name: samples.raw(value) for name, value in model.state_dict().items()}
        file = Full(writes)
        try:
            serializer = TensorSerializer(file, ties=ties)
            serializer.write_module(model, remove_tensors=True)
        except OSError:
            failed += 1
            left = model.state_dict()
            stored = file.getvalue()
            for name, data in wanted.items():
                assert name in left or (budget < 1000 and data in stored), (writes, name)
            assert "7" in left or ties == "twice", writes
            assert "again.weight" in left or ties == "once", writes
        else:
            assert not model.state_dict()
            break
    assert failed >= 4


def test_a_failed_write_leaves_a_module_whole_that_was_to_be_stripped():
    model = samples.net()
    with TensorSerializer(io.BytesIO()) as serializer:
        serializer.write_tensor(0, "head.weight", TensorType.PARAM, tensor())
        with pytest.raises(ValueError):
            serializer.write_module(model, remove_tensors=True)
        for no_module in ({"a": 1}, torch.ones(2), None):
            with pytest.raises((TypeError, AttributeError)):
                serializer.write_module(no_module)
    assert len(samples.module_names(model)) > 10


def test_more_than_65536_modules_saturate_the_stored_index():
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            empty = [nn.Module() for _ in range(65_540)]
            last = nn.Module()
            last.w = nn.Parameter(torch.ones(1))
            self._modules = {str(i): child for i, child in enumerate([*empty, last])}

    (record,) = fmt.read_file(module_bytes(Many())).records
    assert record.header.module_idx == 65_535


# --- loading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_module_comes_back_to_the_bit(device):
    model = samples.net(seed=1)
    with torch.device(device):
        target = samples.Net()
    assert load_into(target, module_bytes(model)) == len(samples.module_names(model))
    for name in samples.module_names(model):
        assert samples.same(named_tensor(target, name), named_tensor(model, name)), name
        assert named_tensor(target, name).device.type == "cpu"


def test_parameters_are_replaced_and_not_copied_into():
    model, target = samples.net(seed=1), samples.net(seed=2)
    old = target.scale
    old_bytes = samples.raw(old)
    load_into(target, module_bytes(model))
    assert target.scale is not old
    assert samples.raw(old) == old_bytes
    assert isinstance(target.scale, nn.Parameter)
    assert target.head.weight.shape == model.head.weight.shape
    assert target.head.weight is target.embed.weight  # the file tells of the tie


def test_buffers_stay_plain_tensors_and_keep_their_persistence():
    model, target = samples.net(seed=1), samples.net(seed=2)
    load_into(target, module_bytes(model))
    for name, value in target.named_buffers():
        assert type(value) is torch.Tensor, name
        assert not value.requires_grad, name
    assert "cache" in target._non_persistent_buffers_set
    assert "steps" not in target._non_persistent_buffers_set
    assert "scratch" in target.blocks[1]._non_persistent_buffers_set
    assert list(target.state_dict()) == list(model.state_dict())


def test_the_loaded_module_computes_what_the_original_computes_and_can_be_trained():
    def make():
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).eval()

    model, x = make(), torch.rand(5, 8)
    with torch.device("meta"):
        target = make()
    load_into(target, module_bytes(model))
    assert torch.equal(model(x), target(x))
    optimizer = torch.optim.SGD(target.parameters(), lr=0.1)
    target(x).sum().backward()
    optimizer.step()
    assert not torch.equal(target[0].weight, model[0].weight)


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_integer_parameters_and_buffers_load_and_dtype_converts_floating_point_parameters_only(dtype):
    model = nn.Module()
    model.w = nn.Parameter(torch.rand(4))
    model.ints = nn.Parameter(tensor((3,), torch.int64), requires_grad=False)
    model.brain = nn.Parameter(torch.rand(3).bfloat16())
    model.register_buffer("mask", tensor((4,), torch.bool))
    model.register_buffer("rotary", torch.view_as_complex(torch.rand(3, 2)))
    target = nn.Module()
    load_into(target, module_bytes(model), dtype=dtype)
    for name in ("w", "brain"):
        wanted = getattr(model, name)
        assert samples.same(getattr(target, name), wanted.to(dtype or wanted.dtype))
        assert getattr(target, name).requires_grad
    for name in ("ints", "mask", "rotary"):
        assert samples.same(getattr(target, name), getattr(model, name))
    assert not target.ints.requires_grad
    assert list(target.state_dict()) == ["w", "ints", "brain", "mask", "rotary"]


def test_a_marker_parameter_on_the_meta_device_is_found_loaded_and_deletable():
    model = samples.net()
    model.register_parameter(
        "marker", nn.Parameter(torch.tensor((1,), device="meta", dtype=torch.int64), requires_grad=False)
    )
    data = module_bytes(model)
    with open_bytes(data, lazy_load=True) as deserializer:
        assert ".marker" in deserializer
    target = samples.net(seed=3)
    load_into(target, data)
    assert target.marker.tolist() == [0]
    del target.marker


def test_tensors_absent_from_the_file_stay_untouched():
    model, target = samples.net(seed=1), samples.net(seed=2)
    before = samples.raw(target.cache)
    load_into(target, module_bytes(model, include_non_persistent_buffers=False))
    assert samples.raw(target.cache) == before
    assert samples.same(target.steps, model.steps)


def test_the_positional_order_of_load_into_module_is_kept():
    model, target = nn.Linear(2, 2), nn.Linear(2, 2)
    with open_bytes(module_bytes(model), lazy_load=True) as deserializer:
        assert deserializer.load_into_module(target, lambda name: name == ".bias", True) == 1
    assert samples.same(target.bias, model.bias)


def test_an_eager_object_loads_several_modules_that_share_the_parameters():
    model, one, two = samples.net(seed=1), samples.net(seed=2), samples.net(seed=3)
    with open_bytes(module_bytes(model)) as deserializer:
        deserializer.load_into_module(one)
        deserializer.load_into_module(two)
        assert one.scale is two.scale
        assert one.scale is deserializer[".scale"]
    assert_same(dict(one.state_dict()), dict(model.state_dict()))


def test_load_into_module_closes_the_file_and_what_was_read_before_is_used():
    model, target = samples.net(seed=1), samples.net(seed=2)
    stream = io.BytesIO(module_bytes(model))
    with TensorDeserializer(stream, device="cpu", lazy_load=True) as deserializer:
        scale = deserializer[".scale"]
        deserializer.load_into_module(target)
        assert stream.closed
        assert target.scale is scale
        assert deserializer["embed.weight"] is target.embed.weight
        nbytes = sum(named_tensor(model, name).nbytes for name in samples.module_names(model))
        assert deserializer.total_tensor_bytes == nbytes
        assert deserializer.total_bytes_read >= nbytes


def test_an_uncached_tensor_is_an_error_after_a_partial_load():
    with open_bytes(module_bytes(nn.Linear(2, 2)), lazy_load=True) as deserializer:
        deserializer.load_into_module(nn.Linear(2, 2), filter_func=lambda name: name == ".bias")
        with pytest.raises((RuntimeError, ValueError)):
            deserializer[".weight"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("absent.weight", TensorType.PARAM),
        ("absent.weight", TensorType.BUFFER),
        ("linear.weight", TensorType.BUFFER),  # a parameter has the name already
        ("norm.running_mean", TensorType.PARAM),
        (".", TensorType.PARAM),  # torch refuses an empty attribute name
    ],
)
def test_what_does_not_fit_the_module_is_refused(name, kind):
    stream = samples.KeptBytesIO()
    with TensorSerializer(stream) as serializer:
        serializer.write_tensor(0, name, kind, torch.ones(2))
    with pytest.raises(KeyError):
        load_into(samples.Block(), stream.getvalue())


# --- what does not fit ------------------------------------------------------------------------------------------------


def test_real_tensors_of_another_shape_or_kind_are_an_error_that_names_all_before_any_is_touched():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    target = nn.Sequential(nn.Linear(8, 8), nn.Linear(4, 4), nn.BatchNorm1d(4))
    target[1].bias = nn.Parameter(torch.zeros(4, dtype=torch.complex64))
    target[2].num_batches_tracked = torch.tensor(False)
    before = {name: samples.raw(value) for name, value in target.state_dict().items()}
    stream = Counting(module_bytes(model))
    with TensorDeserializer(stream, device="cpu", lazy_load=True) as deserializer:
        stream.nbytes = 0
        with pytest.raises(LoadError) as caught:
            deserializer.load_into_module(target)
        assert stream.nbytes == 0  # no payload is read
    assert isinstance(caught.value, RuntimeError)
    assert [(row.name, row.what) for row in caught.value.report.mismatched] == [
        ("0.weight", "shape"),
        ("0.bias", "shape"),
        ("1.bias", "kind"),
        ("2.num_batches_tracked", "kind"),
    ]
    for part in ("size mismatch for 0.weight", "torch.Size([4, 4])", "torch.Size([8, 8])", "1.bias", "complex64"):
        assert part in str(caught.value)
    assert {name: samples.raw(value) for name, value in target.state_dict().items()} == before
    assert deserializer.report is caught.value.report


class Counting(io.BytesIO):
    """Counts what is read of it."""

    nbytes = 0

    def readinto(self, buffer):
        count = super().readinto(buffer)
        self.nbytes += count
        return count


def test_tensors_of_other_precision_fit():
    target = nn.Linear(3, 3).half()
    assert load_into(target, module_bytes(nn.Linear(3, 3))) == 2
    assert target.weight.dtype == torch.float32
    assert load_into(nn.Linear(3, 3), module_bytes(nn.Linear(3, 3)), dtype=torch.bfloat16) == 2


def test_meta_tensors_of_another_shape_are_replaced_and_one_warning_names_them():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.device("meta"):
        target = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 4, dtype=torch.complex64), nn.Linear(2, 2))
    with pytest.warns(UserWarning, match="0.weight") as caught, open_bytes(module_bytes(model)) as deserializer:
        count = deserializer.load_into_module(target)
    (warning,) = caught
    for part in (
        "1.weight",
        "1.bias",
        "torch.Size([4, 4])",
        "torch.Size([4, 8])",
        "complex64",
        "no '2.weight', '2.bias'",
    ):
        assert part in str(warning.message)
    assert warning.filename == __file__
    assert samples.same(target[0].weight, model[0].weight)
    assert samples.same(target[0].bias, model[0].bias)
    assert count == 4
    assert [row.name for row in deserializer.report.mismatched] == ["0.weight", "1.weight", "1.bias"]
    assert deserializer.report.missing == ("2.weight", "2.bias")
    assert deserializer.report.unexpected == ("0.bias",)
    assert deserializer.report.loaded == ("0.weight", "0.bias", "1.weight", "1.bias")


def test_names_that_stay_on_the_meta_device_are_logged(caplog):
    with torch.device("meta"):
        target = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with (
        open_bytes(module_bytes(nn.Sequential(nn.Linear(4, 4)))) as deserializer,
        caplog.at_level("WARNING", "tensorizer"),
        pytest.warns(UserWarning, match="stay as they are"),
    ):
        deserializer.load_into_module(target)
    (record,) = caplog.records
    assert "1.weight" in record.getMessage()
    assert "1.bias" in record.getMessage()
    assert "0.weight" not in record.getMessage()
    assert deserializer.report.missing == ("1.weight", "1.bias")


def test_a_module_that_is_there_twice_is_filled_by_either_path_and_no_warning_says_otherwise(caplog):
    def twice():
        shared = nn.Linear(4, 4)
        return nn.ModuleDict({"shared": shared, "encoder": nn.ModuleDict({"embed": shared})})

    with torch.device("meta"):
        target = twice()
    with open_bytes(module_bytes(twice())) as deserializer, caplog.at_level("WARNING", "tensorizer"):
        deserializer.load_into_module(target)
    assert not caplog.records
    assert deserializer.report.missing == ()
    assert not any(t.is_meta for t in target.state_dict().values())


def test_lazy_parameters_take_the_shape_of_the_file():
    model = nn.Sequential(nn.Linear(3, 4))
    rows = torch.ones(2, 3)
    target = nn.Sequential(nn.LazyLinear(4))
    assert load_into(target, module_bytes(model)) == 2
    assert torch.equal(target(rows), model(rows))


def torchs_words(target, model, strict=True) -> str:
    with pytest.raises(RuntimeError) as caught:
        target.load_state_dict(model.state_dict(), strict=strict)
    return str(caught.value)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_strict_loads_refuse_what_load_state_dict_refuses_in_the_same_words(device):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.BatchNorm1d(3))
    cases = [
        nn.Sequential(nn.Linear(8, 8), nn.Linear(4, 4), nn.BatchNorm1d(3)),
        nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.BatchNorm1d(3)),
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False)),
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.BatchNorm1d(3), nn.Linear(1, 1)),
    ]
    for target in cases:
        words = torchs_words(target, model)
        target = target.to(device)
        before = dict([*target.named_parameters(), *target.named_buffers()])
        with open_bytes(module_bytes(model)) as deserializer, pytest.raises(LoadError) as caught:
            deserializer.load_into_module(target, strict=True)
        assert str(caught.value) == words
        assert caught.value.report is deserializer.report
        after = dict([*target.named_parameters(), *target.named_buffers()])
        assert after.keys() == before.keys()
        assert all(after[name] is value for name, value in before.items())


def test_strict_loads_pass_where_everything_fits():
    model, target = samples.net(seed=1), samples.net(seed=2)
    with open_bytes(module_bytes(model)) as deserializer:
        count = deserializer.load_into_module(target, strict=True)
    report = deserializer.report
    assert count == len(report.loaded) == len(samples.module_names(model))
    assert report.ok
    assert report.nbytes == sum(named_tensor(model, name).nbytes for name in samples.module_names(model))
    assert report.seconds > 0
    assert re.fullmatch(r"<LoadReport: \d+ tensors, .* of .* into Net: all names match>", repr(report)), repr(report)
    assert list(report) == [[], []]
    # what is not persistent may be absent
    with open_bytes(module_bytes(model, include_non_persistent_buffers=False)) as deserializer:
        deserializer.load_into_module(target, strict=True)
        assert deserializer.report.missing == ()


def test_a_filter_is_asked_about_names_of_the_file_and_narrows_both_sides_of_strict_loads():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wider = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(9, 9))
    asked = []

    def second(name):
        asked.append(name)
        return name.startswith("1.")

    with open_bytes(module_bytes(model), lazy_load=True) as deserializer:
        deserializer.load_into_module(wider, second)
    assert asked == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert deserializer.report.loaded == ("1.weight", "1.bias")
    assert deserializer.report.missing == ("2.weight", "2.bias")
    with open_bytes(module_bytes(model), lazy_load=True) as deserializer:
        deserializer.load_into_module(wider, second, strict=True)
        assert deserializer.report.loaded == ("1.weight", "1.bias")
    assert deserializer.report.ok
    with open_bytes(module_bytes(model), lazy_load=True) as deserializer, pytest.raises(LoadError, match=r"2\.weight"):
        deserializer.load_into_module(wider, lambda name: name[0] in "12", strict=True)


def test_a_name_that_the_file_lacks_follows_the_one_it_is_tied_to():
    model, target = samples.net(seed=1), samples.net(seed=2)
    with open_bytes(module_bytes(model), filter_func=lambda name: name != "head.weight") as deserializer:
        deserializer.load_into_module(target, strict=True)
    assert deserializer.report.missing == ()
    assert deserializer.report.tied == {"head.weight": "embed.weight"}
    assert target.head.weight is target.embed.weight
    assert samples.same(target.head.weight, model.embed.weight)


def test_the_report_joins_names_that_differ_in_one_number():
    target = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(40))
    model = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
    with open_bytes(module_bytes(model)) as deserializer, pytest.warns(UserWarning, match="37 parameters"):
        count = deserializer.load_into_module(target)
    assert "{3...39}.weight" in repr(deserializer.report)
    assert len(repr(deserializer.report).splitlines()) == 3
    assert (type(count), count) == (int, 3)


def test_what_does_not_fit_is_refused_before_a_payload_is_read(tmp_path):
    path = tmp_path / "model.tensors"
    samples.write_module(path, nn.Sequential(nn.Linear(64, 64)))
    content = bytearray(path.read_bytes())
    content[-70] ^= 1  # of a payload: whoever reads and verifies it raises HashMismatchError
    path.write_bytes(content)
    target = nn.ModuleList()  # without the submodule
    with pytest.raises(HashMismatchError):
        tensorizer.torch.load_model(nn.Sequential(nn.Linear(64, 64)), path, verify=True)
    with pytest.raises(LoadError, match="Unexpected key"):
        tensorizer.torch.load_model(target, path, verify=True)
    with TensorDeserializer(path, device="cpu", lazy_load=True) as file, pytest.raises(KeyError, match="submodule"):
        file.load_into_module(target, verify_hash=True)


def test_nothing_is_replaced_where_one_name_cannot_be_placed():
    data = module_bytes(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    smaller, other = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    del other[1].bias
    other[1].register_buffer("bias", torch.zeros(2))
    for target, words in ((smaller, "1"), (other, r"1\.bias")):
        before = target[0].weight
        with pytest.raises(KeyError, match=words):
            load_into(target, data)
        assert target[0].weight is before


# --- requires_grad ----------------------------------------------------------------------------------------------------


def test_parameters_need_gradients_where_those_of_the_module_do():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)).requires_grad_(False)
    for device in ("cpu", "meta"):
        target = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)).to(device)
        target[0].weight.requires_grad_(False)
        target[1].requires_grad_(False)
        wanted = {name: value.requires_grad for name, value in target.named_parameters()}
        with open_bytes(module_bytes(model)) as deserializer:
            deserializer.load_into_module(target)
            assert {name: value.requires_grad for name, value in target.named_parameters()} == wanted
            assert deserializer["0.weight"].requires_grad
            other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
            deserializer.load_into_module(other)
            assert all(value.requires_grad for value in other.parameters())
        assert target[0].weight.data_ptr() == other[0].weight.data_ptr()


# --- verify_module --------------------------------------------------------------------------------------------------


def test_a_module_verifies_tensor_by_tensor_and_what_was_changed_is_named():
    model, target = samples.net(seed=1), samples.net(seed=2)
    with open_bytes(module_bytes(model)) as deserializer:
        deserializer.load_into_module(target)
        wanted = dict.fromkeys(samples.module_names(model), True)
        assert "head.weight" in wanted  # tied weights under each name
        assert deserializer.verify_module(target) == (True, list(wanted.items()))
        with torch.no_grad():
            target.blocks[1].linear.bias[0] += 1
            target.scale.mul_(2)
        wanted |= {"blocks.1.linear.bias": False, ".scale": False}
        assert deserializer.verify_module(target) == (False, list(wanted.items()))


def test_names_missing_from_the_module_fail_once_and_surplus_names_are_ignored():
    model = samples.net(seed=1)
    deserializer = open_bytes(module_bytes(model), lazy_load=False)
    deserializer.close()
    partial = nn.Module()
    partial.scale = model.scale
    partial.surplus = nn.Parameter(torch.ones(1))
    intact, results = deserializer.verify_module(partial)
    assert intact is False
    assert sorted(name for name, _ in results) == sorted(samples.module_names(model))
    assert [name for name, result in results if result] == [".scale"]


def test_verification_compares_bytes_of_any_layout_and_dtype():
    model, other = nn.Module(), nn.Module()
    model.w = nn.Parameter(tensor((4, 6), seed=5))
    value = model.w.detach()
    assert not value.t().contiguous().t().is_contiguous()
    with open_bytes(module_bytes(model), lazy_load=False) as deserializer:
        for alike in (value.t().contiguous().t(), value.reshape(24), value.view(torch.int32)):
            other.w = nn.Parameter(alike, requires_grad=False)
            assert deserializer.verify_module(other)[0] is True
        other.w = nn.Parameter(value.double())
        assert deserializer.verify_module(other)[0] is False


def test_verification_of_a_lazy_object_needs_the_tensors_to_be_read_first():
    model = samples.net()
    with open_bytes(module_bytes(model), lazy_load=True) as deserializer:
        with pytest.raises(RuntimeError):
            deserializer.verify_module(model)
        deserializer.load_into_module(samples.net(seed=2))
        assert deserializer.verify_module(model)[0] is True


def test_verification_of_a_converted_module_fails_and_is_not_possible_on_the_meta_device():
    model, target = nn.Linear(3, 3), nn.Linear(3, 3)
    with open_bytes(module_bytes(model), dtype=torch.float16) as deserializer:
        deserializer.load_into_module(target)
        assert deserializer.verify_module(target)[0] is False
        assert deserializer.verify_module(model)[0] is True
        with pytest.raises(NotImplementedError):
            deserializer.verify_module(nn.Linear(3, 3, device="meta"))


def test_verification_names_a_tensor_that_has_no_memory_to_compare():
    freed = torch.ones(300, 300)
    freed.untyped_storage().resize_(0)
    with FakeTensorMode():
        fake = torch.ones(300, 300)
    model = nn.Module()
    model.register_buffer("mask", torch.ones(300, 300))
    with open_bytes(module_bytes(model), lazy_load=False) as deserializer:
        for value in (samples.Wrapper(torch.ones(300, 300)), fake, freed):
            model.mask = value
            with pytest.raises(NotImplementedError, match=r"'\.mask' cannot be verified"):
                deserializer.verify_module(model)


# --- classes that override what modules do ---------------------------------------------------------------------------


class OldRegisterBuffer(nn.BatchNorm1d):
    """Overrides register_buffer as it was before buffers could be non-persistent."""

    def register_buffer(self, name, tensor):
        nn.Module.register_buffer(self, name, tensor)


def test_a_register_buffer_without_the_argument_persistent_is_called_without_it():
    model = nn.BatchNorm1d(3)
    model.__class__ = OldRegisterBuffer
    written = nn.BatchNorm1d(3)
    written.running_mean.fill_(4)
    assert load_into(model, module_bytes(written)) == 5
    assert model.running_mean.tolist() == [4, 4, 4]


class FewerArguments(nn.BatchNorm1d):
    def state_dict(self):
        return super().state_dict()

    def named_buffers(self, prefix="", recurse=True):
        return super().named_buffers(prefix, recurse)

    def named_parameters(self, prefix="", recurse=True):
        return super().named_parameters(prefix, recurse)


def test_verify_module_takes_modules_whose_overrides_have_fewer_arguments():
    model = FewerArguments(3)
    with open_bytes(module_bytes(model), lazy_load=False) as deserializer:
        assert deserializer.verify_module(model)[0] is True
        model.running_mean.add_(1)
        assert deserializer.verify_module(model)[0] is False


class Facade:
    """No module itself, but answers what is asked of one."""

    def __init__(self, model):
        self.model = model

    def named_modules(self):
        return self.model.named_modules()


def test_an_object_that_names_modules_is_written_and_loaded_like_one():
    model = samples.net()
    assert module_bytes(Facade(model)) == module_bytes(model)
    other = samples.net(seed=5)
    assert load_into(Facade(other), module_bytes(model)) == len(samples.module_names(model))
    with open_bytes(module_bytes(model), lazy_load=False) as deserializer:
        assert deserializer.verify_module(other)[0] is True


# -- files that were written from a state dict -------------------------------------------------------------------------


class WithBuffers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.root = torch.nn.Parameter(torch.randn(3))
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5))
        self.head = torch.nn.Linear(4, 5)
        self.head.weight = self.layers[0].weight
        self.register_buffer("mask", torch.arange(6))


def test_files_of_state_dicts_fill_modules_by_their_names(tmp_path):
    model = WithBuffers()
    state = model.state_dict()
    save_file(state, tmp_path / "a.safetensors")
    tensorizer.convert(tmp_path / "a.safetensors", tmp_path / "b.tensors")
    samples.write_state_dict(tmp_path / "c.tensors", {k: v for k, v in state.items() if k != "head.weight"})
    for name, device in itertools.product(("a.safetensors", "b.tensors", "c.tensors"), ("cpu", "meta")):
        with torch.device(device):
            target = WithBuffers()
        with TensorDeserializer(tmp_path / name, device="cpu") as file:
            count = file.load_into_module(target, strict=True)
        assert file.report.ok
        assert int(count) >= len(state) - 1
        assert_same(dict(target.state_dict()), dict(state))
        assert target.head.weight is target.layers[0].weight
        assert type(target.mask) is torch.Tensor
        assert type(target.root) is torch.nn.Parameter
        assert target.root.requires_grad


def test_what_a_state_dict_has_beside_a_module_is_reported_and_not_placed(tmp_path):
    model = WithBuffers()
    state = {**model.state_dict(), "more.than.that": torch.ones(2), "extra": torch.ones(2)}
    del state["mask"]
    path = samples.write_state_dict(tmp_path / "f.tensors", state)
    target = WithBuffers()
    with TensorDeserializer(path, device="cpu") as file:
        file.load_into_module(target)
    assert set(file.report.unexpected) == {"more.than.that", "extra"}
    assert file.report.missing == ("mask",)
    assert not hasattr(target, "extra")
    assert_same(target.root.detach(), model.root.detach())
    with TensorDeserializer(path, device="cpu") as file, pytest.raises(LoadError, match=r"more\.than\.that"):
        file.load_into_module(target, strict=True)
    nested = samples.write_state_dict(tmp_path / "nested.tensors", {"model": model.state_dict()})
    with TensorDeserializer(nested, device="cpu") as file, pytest.raises(NotImplementedError, match="tree"):
        file.load_into_module(target)


def test_two_tensors_of_one_name_are_refused_and_a_filter_chooses_one():
    module = nn.Linear(2, 1, bias=False)
    values = {".weight": b"\0\0\x80\x3f" * 2, "weight": b"\0\0\0\x40" * 2}  # 1 and 2
    for names, chosen in (((".weight", "weight"), 1.0), (("weight", ".weight"), 2.0)):
        data = fmt.write_file([fmt.Tensor((name,), "<f4", (1, 2), values[name], kind=0) for name in names])
        before = module.weight
        for strict in (False, True):
            with open_bytes(data) as deserializer, pytest.raises(FormatError) as caught:
                deserializer.load_into_module(module, strict=strict)
            assert f"tensors {names[0]!r} and {names[1]!r} would both be named 'weight'" in str(caught.value)
            assert str(caught.value).startswith(f"{caught.value.source}: ")
            assert module.weight is before
        with open_bytes(data) as deserializer:
            assert deserializer.load_into_module(module, filter_func=names[0].__eq__, strict=True) == 1
        assert module.weight.tolist() == [[chosen, chosen]]


class SharesWithin(torch.nn.Module):
    """Names of one module for one tensor, which the file lists once."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(2))
        self.same = self.weight
        self.register_buffer("scale", torch.rand(2))
        self.register_buffer("same_scale", self.scale)
        self.listed = torch.nn.ParameterList([torch.nn.Parameter(torch.rand(3))] * 3)
        self.rnn = torch.nn.LSTM(2, 2, num_layers=2)
        self.rnn.weight_hh_l1 = self.rnn.weight_hh_l0


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_names_of_one_module_for_one_tensor_all_get_it(tmp_path, device):
    model = SharesWithin()
    samples.write_module(tmp_path / "m.tensors", model)
    with torch.device(device):
        target = SharesWithin()
    with TensorDeserializer(tmp_path / "m.tensors", device="cpu") as found:
        found.load_into_module(target, strict=True)
    assert found.report.missing == ()
    samples.assert_same(target.state_dict(), model.state_dict())
    assert target.same is target.weight
    assert target.same_scale.data_ptr() == target.scale.data_ptr()
    assert target.listed[2] is target.listed[0]
    assert target.rnn.weight_hh_l1 is target.rnn.weight_hh_l0


@pytest.mark.parametrize("compile", [torch.jit.script, lambda model: torch.jit.trace(model, torch.ones(2, 3))])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_torchscript_module_is_filled(tmp_path, compile):
    def make():
        return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)).eval()

    model, filled = make(), compile(make())
    model[1].running_mean += 2
    samples.write_module(tmp_path / "f", model)
    with TensorDeserializer(tmp_path / "f", device="cpu") as file:
        assert file.load_into_module(filled, strict=True) == 7
    assert_same(dict(filled.state_dict()), dict(model.state_dict()))
    assert torch.equal(filled(torch.ones(2, 3)), model(torch.ones(2, 3)))


# -- modules that change state dicts ---------------------------------------------------------------------------------


def weight_norm(module):
    return torch.nn.utils.parametrizations.weight_norm(module)


def with_old_names(state):
    """A state dict as ``torch.nn.utils.weight_norm`` wrote it."""
    new = ("parametrizations.weight.original0", "parametrizations.weight.original1")
    return {name.replace(new[0], "weight_g").replace(new[1], "weight_v"): value for name, value in state.items()}


@pytest.mark.parametrize("format", ["tensors", "safetensors"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_load_into_module_runs_the_hooks_that_rename_what_is_in_a_state_dict(tmp_path, format, device):
    def make():
        return nn.Sequential(weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2))

    model, target = make(), make().to(device)
    state = with_old_names(model.state_dict())
    assert "0.weight_g" in state
    save_file(state, tmp_path / "m", format=format)
    target[1].bias.requires_grad_(False)
    with TensorDeserializer(tmp_path / "m", device="cpu") as deserializer:
        count = deserializer.load_into_module(target, strict=True)
    assert (count, deserializer.report.missing, deserializer.report.unexpected) == (5, (), ())
    assert_same(dict(target.state_dict()), dict(model.state_dict()))
    assert [value.requires_grad for value in target.parameters()] == [True, True, True, True, False]
    report = tensorizer.torch.load_model(make(), tmp_path / "m")
    assert set(report.loaded) == set(deserializer.report.loaded)


class Resizes(nn.Module):
    """Changes the shape of its buffer to that of the file, as observers of quantized models do."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("seen", torch.zeros(size))

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.seen = self.seen.new_zeros(state_dict[prefix + "seen"].shape)
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_load_into_module_gives_modules_that_load_themselves_what_is_in_a_state_dict(tmp_path):
    model = nn.Sequential(Resizes(5), nn.Linear(2, 2))
    model[0].seen.fill_(3)
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    target = nn.Sequential(Resizes(1), nn.Linear(2, 2))
    with TensorDeserializer(tmp_path / "m.safetensors", device="cpu") as deserializer:
        assert deserializer.load_into_module(target, strict=True) == 3
    assert_same(dict(target.state_dict()), dict(model.state_dict()))
    wrong = nn.Sequential(Resizes(1), nn.Linear(3, 2))
    with TensorDeserializer(tmp_path / "m.safetensors", device="cpu") as deserializer, pytest.raises(LoadError):
        deserializer.load_into_module(wrong)
    with TensorDeserializer(tmp_path / "m.safetensors", device="cpu") as deserializer:
        deserializer.load_into_module(target, lambda name: name != "1.bias", strict=True)
    assert deserializer.report.missing == ()


@pytest.mark.parametrize("takes_assign", [False, True])
def test_a_load_state_dict_of_the_class_is_called_where_it_can_replace_tensors(tmp_path, takes_assign):
    asked = []

    class Own(nn.Linear):
        if takes_assign:

            def load_state_dict(self, state_dict, strict=True, assign=False):
                asked.append(sorted(state_dict))
                return super().load_state_dict(state_dict, strict, assign)
        else:

            def load_state_dict(self, state_dict, strict=True):
                raise AssertionError("it cannot replace tensors")

    model, target = nn.Linear(2, 2), Own(2, 2)
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    with TensorDeserializer(tmp_path / "m.safetensors", device="cpu") as deserializer:
        assert deserializer.load_into_module(target, strict=True) == 2
    assert_same(dict(target.state_dict()), dict(model.state_dict()))
    assert asked == [["bias", "weight"]] * takes_assign


@pytest.mark.parametrize("format", ["tensors", "safetensors"])
def test_ties_and_extra_state_survive_a_load_through_hooks(tmp_path, format):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = weight_norm(nn.Linear(3, 3))
            self.embed, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
            self.scaled = Scaled(2, 2)

    class Scaled(nn.Linear):
        def get_extra_state(self):
            return torch.tensor([3.0])

        def set_extra_state(self, state):
            self.got = state

    model, target = Model(), Model()
    model.head.weight = model.embed.weight
    save_file(with_old_names(model.state_dict()), tmp_path / "m", format=format)
    with TensorDeserializer(tmp_path / "m", device="cpu") as deserializer:
        deserializer.load_into_module(target, strict=True)
    assert_same(dict(target.state_dict()), dict(model.state_dict()))
    assert target.scaled.got.tolist() == [3.0]
    assert "scaled._extra_state" not in deserializer.report.loaded
    assert target.head.weight is target.embed.weight


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_torchscript_module_is_filled_from_a_state_dict(tmp_path):
    plain = nn.Sequential(nn.Linear(3, 3), torch.nn.InstanceNorm1d(3, affine=True))
    save_file(plain.state_dict(), tmp_path / "m.safetensors")
    filled = torch.jit.script(nn.Sequential(nn.Linear(3, 3), torch.nn.InstanceNorm1d(3, affine=True)))
    with TensorDeserializer(tmp_path / "m.safetensors", device="cpu") as file:
        assert file.load_into_module(filled, strict=True) == 4
    assert_same(dict(filled.state_dict()), dict(plain.state_dict()))


# -- what stays as it was --------------------------------------------------------------------------------------------


def one_warning(call) -> str:
    with pytest.warns(UserWarning, match="loaded|stay") as caught:
        call()
    (warning,) = caught
    assert warning.filename == __file__
    return str(warning.message)


def test_load_into_module_warns_of_parameters_that_stay_as_they_are(tmp_path):
    model, target = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    samples.write_module(tmp_path / "m.tensors", model)
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    for path in (tmp_path / "m.tensors", tmp_path / "m.safetensors"):
        words = "6 parameters of Sequential stay as they are: the file has no '1.weight', '1.bias', '2.weight', …"
        with TensorDeserializer(path, device="cpu") as file:
            assert one_warning(lambda: file.load_into_module(target)) == f"{path}: {words}"
        assert tensorizer.torch.load_model(target, path, strict=False).missing  # a report, which says it


def test_load_into_module_warns_where_it_places_nothing_and_names_the_prefix(tmp_path):
    head, bare = {"lm_head.weight": torch.ones(2, 2)}, nn.ModuleDict({"lm_head": nn.Linear(2, 2, bias=False)})
    wrapped, path = {f"model.{name}": value for name, value in head.items()}, tmp_path / "wrapped.tensors"
    save_file(wrapped, path)
    save_file(head, tmp_path / "bare.tensors")
    with TensorDeserializer(path, device="cpu") as file:
        words = (
            "nothing is loaded into ModuleDict: the file has no 'lm_head.weight'; the file has 'model.lm_head.weight', "
        )
        words += "the module 'lm_head.weight': load_into_module(..., prefix='model.')?"
        assert one_warning(lambda: file.load_into_module(bare)) == f"{path}: {words}"
    only_buffers = nn.Module()
    only_buffers.register_buffer("seen", torch.ones(2))
    others = {
        "the module 'model.lm_head.weight': load into its submodule 'model'": nn.ModuleDict({"model": bare}),
        "nothing is loaded into Module: the file has no 'seen'": only_buffers,
        "nothing is loaded into ReLU": nn.ReLU(),
    }
    with TensorDeserializer(tmp_path / "bare.tensors", device="cpu", lazy_load=False) as file:
        for words, module in others.items():
            assert words in one_warning(lambda: file.load_into_module(module))  # noqa: B023
    samples.write_module(tmp_path / "m.tensors", nn.ModuleDict({"model": bare}))
    with (
        TensorDeserializer(tmp_path / "m.tensors", device="cpu") as file,
        pytest.raises(KeyError, match=r"no submodule 'model.lm_head'.*prefix='model\.'"),
    ):
        file.load_into_module(bare)


def test_load_into_module_is_silent_where_somebody_chose_or_only_buffers_are_missing(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    save_file(dict(model.named_parameters()), tmp_path / "m.tensors")
    for options in ({}, {"filter_func": lambda name: name == "0.bias"}):
        with TensorDeserializer(tmp_path / "m.tensors", device="cpu") as deserializer:
            deserializer.load_into_module(model, **options)
        assert deserializer.report.missing
    save_file({}, tmp_path / "empty.safetensors")
    with TensorDeserializer(tmp_path / "empty.safetensors", device="cpu") as deserializer:
        assert deserializer.load_into_module(nn.ReLU()) == 0


def test_load_into_module_takes_a_prefix_off_the_names_of_the_file(tmp_path):
    class Keeper(nn.Linear):
        def get_extra_state(self):
            return torch.ones(3)

        def set_extra_state(self, state):
            self.got = state

    def make():
        return nn.Sequential(Keeper(2, 2), nn.Linear(2, 2), weight_norm(nn.Linear(2, 2)))

    model = make()
    whole = nn.ModuleDict({"trained": nn.ModuleDict({"model": model}), "other": nn.Linear(2, 2)})
    samples.write_module(tmp_path / "module.tensors", whole, include_extra_state=True)
    save_file(with_old_names(whole.state_dict()), tmp_path / "m.safetensors")
    samples.write_state_dict(
        tmp_path / "nested.tensors", {"trained": {"model": dict(model.state_dict())}, "n": torch.ones(1)}
    )
    for name in ("module.tensors", "m.safetensors", "nested.tensors"):
        target = make()
        with TensorDeserializer(tmp_path / name, device="cpu") as deserializer:
            count = deserializer.load_into_module(target, strict=True, prefix="trained.model.")
        assert (count, deserializer.report.missing, deserializer.report.unexpected) == (7, (), ()), name
        assert_same(dict(target.state_dict()), dict(model.state_dict()))
        assert target[0].got.tolist() == [1, 1, 1]
    with TensorDeserializer(tmp_path / "m.safetensors", device="cpu", lazy_load=True) as deserializer:
        with pytest.raises(ValueError, match=r"begins with 'model\.'; they begin with 'other\.', 'trained\.'"):
            deserializer.load_into_module(model, prefix="model.")
        with pytest.raises(TypeError, match="prefix"):
            deserializer.load_into_module(model, prefix=("trained",))
        asked = []
        count = deserializer.load_into_module(
            make(), lambda name: asked.append(name) or "model.1." in name, prefix="trained.model.", strict=True
        )
        assert sorted(deserializer.report.loaded) == ["1.bias", "1.weight"]
        assert "trained.model.1.weight" in asked
        assert deserializer.report.missing == ()


def test_load_state_dict_that_assigns_plain_tensors_keeps_buffers(tmp_path):
    """docs/troubleshooting.md"""
    original = nn.Sequential(nn.BatchNorm1d(3))
    with TensorSerializer(tmp_path / "m.tensors") as serializer:
        serializer.write_module(original)
    module = nn.Sequential(nn.BatchNorm1d(3))
    module.load_state_dict(tensorizer.load_file(tmp_path / "m.tensors"), assign=True)
    assert dict(module.named_buffers()).keys() == dict(original.named_buffers()).keys()
    assert all(type(parameter) is nn.Parameter and parameter.requires_grad for parameter in module.parameters())
    module = nn.Sequential(nn.BatchNorm1d(3))
    with open_bytes((tmp_path / "m.tensors").read_bytes()) as file:
        module.load_state_dict(file, assign=True)
    assert not dict(module.named_buffers())  # as in 2.12.1


# --- in place ---------------------------------------------------------------------------------------------------------


def in_place_models():
    torch.manual_seed(4)
    return [torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)) for _ in range(2)]


@pytest.mark.parametrize("from_state_dict", [False, True])
@pytest.mark.parametrize("lazy_load", [False, True])
def test_load_into_module_in_place_keeps_tensors_where_they_are(tmp_path, from_state_dict, lazy_load):
    written, module = in_place_models()
    with TensorSerializer(tmp_path / "m.tensors") as serializer:
        serializer.write_state_dict(written.state_dict()) if from_state_dict else serializer.write_module(written)
    before = {name: (id(p), p.data_ptr()) for name, p in module.state_dict(keep_vars=True).items()}
    with TensorDeserializer(tmp_path / "m.tensors", device="cpu", lazy_load=lazy_load) as file:
        assert file.load_into_module(module, verify_hash=True, in_place=True) == len(before)
    after = module.state_dict(keep_vars=True)
    assert {name: (id(p), p.data_ptr()) for name, p in after.items()} == before
    assert all(torch.equal(after[name], tensor) for name, tensor in written.state_dict().items())


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda m: m.append(torch.nn.Linear(2, 2)), "Missing key"),
        (lambda m: m.pop(1), "Unexpected key"),
        (lambda m: setattr(m[0], "weight", torch.nn.Parameter(torch.zeros(4, 3))), "0.weight"),
        (lambda m: m[0].half(), "expected torch.float32, got torch.float16"),
        (lambda m: m[0].to("meta"), "meta device"),
    ],
    ids=["missing", "unexpected", "shape", "dtype", "meta"],
)
def test_load_into_module_in_place_refuses_what_differs_before_it_writes(tmp_path, spoil, problem):
    written, module = in_place_models()
    with TensorSerializer(tmp_path / "m.tensors") as serializer:
        serializer.write_module(written)
    spoil(module)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    file = TensorDeserializer(tmp_path / "m.tensors", device="cpu", lazy_load=True)
    with file, pytest.raises(LoadError, match=problem):
        file.load_into_module(module, in_place=True)
    assert all(t.is_meta or torch.equal(t, before[name]) for name, t in module.state_dict().items())


def test_load_into_module_in_place_compares_digests_before_it_writes(tmp_path):
    written, module = in_place_models()
    with TensorSerializer(tmp_path / "m.tensors") as serializer:
        serializer.write_module(written)
    data = bytearray((tmp_path / "m.tensors").read_bytes())
    data[-10] ^= 1  # of the last payload
    (tmp_path / "m.tensors").write_bytes(data)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    file = TensorDeserializer(tmp_path / "m.tensors", device="cpu", lazy_load=True)
    with file, pytest.raises(HashMismatchError):
        file.load_into_module(module, verify_hash=True, in_place=True)
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())


def test_load_into_module_in_place_keeps_ties(tmp_path):
    written, module = in_place_models()
    for one in (written, module):
        one.add_module("2", torch.nn.Linear(4, 3))
        one[2].weight = one[0].weight
    with TensorSerializer(tmp_path / "m.tensors") as serializer:
        serializer.write_module(written)
    weight = module[0].weight
    with TensorDeserializer(tmp_path / "m.tensors", device="cpu", lazy_load=True) as file:
        file.load_into_module(module, in_place=True)
    assert module[0].weight is module[2].weight is weight
    assert torch.equal(weight, written[0].weight)


def test_load_into_module_in_place_writes_only_what_a_filter_accepts(tmp_path):
    written, module = in_place_models()
    with TensorSerializer(tmp_path / "m.tensors") as serializer:
        serializer.write_module(written)
    bias = module[0].bias.clone()
    with TensorDeserializer(tmp_path / "m.tensors", device="cpu", lazy_load=True) as file:
        assert file.load_into_module(module, filter_func=lambda name: name == "0.weight", in_place=True) == 1
    assert torch.equal(module[0].weight, written[0].weight)
    assert torch.equal(module[0].bias, bias)
