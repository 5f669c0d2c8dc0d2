"""Common mistakes at the first call: each message says what was found and what to do instead."""

from __future__ import annotations

import io

import pytest
import torch

from tensorizer import TensorDeserializer, TensorSerializer


@pytest.fixture
def path(tmp_path):
    with TensorSerializer(tmp_path / "model.tensors") as serializer:
        serializer.write_module(torch.nn.Linear(2, 2))
    return tmp_path / "model.tensors"


def message(kind, call, *arguments, **keywords) -> str:
    with pytest.raises(kind) as caught:
        call(*arguments, **keywords)
    return str(caught.value)


def assert_words(text: str, *words: str) -> None:
    for word in words:
        assert word in text, text


def test_devices_that_torch_does_not_have_are_named_with_those_that_work(path):
    for device in ("auto", "gpu", "CUDA", "cpuu:0"):
        text = message(RuntimeError, TensorDeserializer, path, device=device)
        assert_words(text, "device", repr(device), "None", "cuda")
    assert_words(message(RuntimeError, TensorDeserializer, path, device="auto"), "mapping")
    assert_words(message(RuntimeError, TensorDeserializer, path, device={"": "auto"}), "'auto'")
    assert_words(message(TypeError, TensorDeserializer, path, device=1.5), "device", "float")


def test_a_dtype_in_the_place_of_another_argument_is_told_its_own(path):
    assert_words(message(TypeError, TensorDeserializer, path, torch.float16), "device", "float16", "dtype=")
    assert_words(message(TypeError, TensorDeserializer, path, "cpu", torch.float16), "filter_func", "dtype=")
    assert_words(message(TypeError, TensorDeserializer, path, "cpu", dtype="float16"), "torch.float16", "str")
    assert_words(message(TypeError, TensorDeserializer, path, "cpu", dtype=float), "torch.dtype", "type")


def test_a_filter_that_is_no_function_says_what_a_filter_is(path):
    for names in (["weight"], {"weight"}, "weight"):
        text = message(TypeError, TensorDeserializer, path, "cpu", names)
        assert_words(text, "filter_func", type(names).__name__, "function")


def test_arguments_that_are_refused_leave_no_file_open(path):
    for keywords in ({"filter_func": torch.float16}, {"dtype": "float16"}):
        stream = io.BytesIO(path.read_bytes())
        message(TypeError, TensorDeserializer, stream, "cpu", **keywords)
        assert stream.closed


def test_a_state_dict_given_for_a_module_is_sent_to_the_method_that_takes_it(tmp_path):
    module = torch.nn.Linear(2, 2)
    with TensorSerializer(tmp_path / "f") as serializer:
        assert_words(
            message(TypeError, serializer.write_module, module.state_dict()), "OrderedDict", "write_state_dict"
        )
        assert_words(message(TypeError, serializer.write_module, torch.ones(1)), "Tensor", "write_tensor")
        assert_words(message(TypeError, serializer.write_module, torch.nn.Linear), "class", "Linear")
        assert_words(message(TypeError, serializer.write_state_dict, module), "Linear", "write_module")
        assert_words(message(TypeError, serializer.write_state_dict, torch.ones(1)), "Tensor", "write_tensor")
        serializer.write_module(module)
    with TensorDeserializer(tmp_path / "f", "cpu", lazy_load=True) as deserializer:
        text = message(TypeError, deserializer.load_into_module, module.state_dict())
        assert_words(text, "OrderedDict", "load_state_dict")


def test_values_of_a_checkpoint_that_are_no_tensors_say_where_to_keep_them(tmp_path):
    weights = {"weight": torch.ones(2)}
    with TensorSerializer(tmp_path / "f") as serializer:

        def refused(**extra) -> str:
            return message(TypeError, serializer.write_state_dict, {"model": weights, **extra})

        for name, value, kind in (("epoch", 3, "int"), ("lr", 0.1, "float"), ("done", True, "bool")):
            assert_words(refused(**{name: value}), name, kind, f"torch.tensor({value!r})", "tensorizer_saving")
        assert_words(refused(scheduler={"last": None}), "scheduler/last", "NoneType", "tensorizer_saving")
        assert_words(refused(name="bert"), "name", "str", "tensorizer_saving")
        assert_words(refused(table=torch.ones(2).numpy()), "table", "ndarray", "torch.from_numpy")
        assert_words(refused(model2=torch.nn.Linear(1, 1)), "model2", "Linear", "state_dict()")
        assert_words(refused(state={0: {"step": torch.ones(1)}}), "state", "int", "(0)", "tensorizer_saving")
        serializer.write_state_dict(weights)  # nothing was written before
    with TensorDeserializer(tmp_path / "f", "cpu") as deserializer:
        assert list(deserializer) == ["weight"]


def test_what_is_no_file_at_all_is_named_with_what_is(path):
    module = torch.nn.Linear(2, 2)
    for value in (None, module, module.state_dict(), 1.5, True):
        for kind in (TensorDeserializer, TensorSerializer):
            assert_words(message(TypeError, kind, value), "path", "file", type(value).__name__)
