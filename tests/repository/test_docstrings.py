"""Every public function and class has an example in its docstring, and every example runs."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
import shutil
from pathlib import Path

import pytest
import torch
from servers.file_server import serve_folder
from servers.redis_server import RedisServer, redis_is_installed

import tensorizer
from tensorizer import TensorDeserializer, TensorSerializer

# Classes whose methods users call themselves; of others a library calls them, or they only hold what was found.
CALLED = (
    *("TensorSerializer", "TensorDeserializer", "safe_open"),
    *("EncryptionParams", "DecryptionParams", "SigningKey", "PublicKey"),
)
RESULTS = {"DiffReport", "FileInfo", "LoadReport", "TensorInfo", "TensorType", "VerifyReport"}


def public_modules():
    names = [module.name for module in pkgutil.walk_packages(tensorizer.__path__, "tensorizer.")]
    listed = [name for name in names if not any(part.startswith("_") for part in name.split("."))]
    return [tensorizer, *(importlib.import_module(name) for name in listed if not name.startswith("tensorizer.cli"))]


def public_callables():
    """Functions, classes, and methods of :data:`CALLED`, by name."""
    found = {}
    for module in public_modules():
        of_protobuf = [name for name in vars(module) if "serialize_" in name]  # published without a list
        for name in getattr(module, "__all__", of_protobuf):
            value = getattr(module, name)
            of_package = getattr(value, "__module__", "").startswith("tensorizer")
            is_error = inspect.isclass(value) and issubclass(value, Exception)
            if not callable(value) or not of_package or is_error or name in RESULTS:
                continue
            found.setdefault(f"{value.__module__}.{value.__qualname__}", value)
            for method in vars(value) if name in CALLED else ():
                function = getattr(value, method)
                if not method.startswith("_") and inspect.isroutine(function):
                    found[f"{value.__module__}.{value.__qualname__}.{method}"] = function
    return found


PACKAGE = Path(tensorizer.__file__).parent

CALLABLES = public_callables()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with ``model.tensors``, and its URL."""
    folder = tmp_path_factory.mktemp("site")
    tensorizer.save_file({"weight": torch.ones(2, 4), "bias": torch.zeros(2)}, folder / "model.tensors")
    with serve_folder(folder, tells_version=True) as url:
        yield folder, url


@pytest.fixture(scope="module")
def redis_port():
    if not redis_is_installed():
        pytest.skip("redis-server is not installed")
    with RedisServer() as server:
        yield server.port


def test_every_public_function_and_class_has_an_example():
    assert len(CALLABLES) > 70
    assert not [name for name, value in CALLABLES.items() if ">>> " not in (inspect.getdoc(value) or "")]


@pytest.mark.filterwarnings("ignore:torch.distributed is .*uninitialized", "ignore:.*is deprecated")
@pytest.mark.parametrize("name", CALLABLES)
def test_the_examples_of_docstrings_run(name, site, request, tmp_path, monkeypatch):
    text = inspect.getdoc(CALLABLES[name]) or ""
    for library in ("peft", "transformers", "lightning", "cryptography", "vllm"):
        if f"from {library}" in text or f".{library} import" in text:
            pytest.importorskip(library)
    folder, url = site
    shutil.copy(folder / "model.tensors", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TENSORIZER_CACHE", raising=False)
    monkeypatch.setenv("TENSORIZER_CACHE_MIN_FREE", "0")
    text = text.replace("https://models.example", url)
    if "localhost" in text:
        port = str(request.getfixturevalue("redis_port"))
        text = text.replace("localhost", "127.0.0.1").replace("6379", port)
    known = {"torch": torch, "tensorizer": tensorizer}
    known.update(TensorSerializer=TensorSerializer, TensorDeserializer=TensorDeserializer)
    test = doctest.DocTestParser().get_doctest(text, known, name, None, 0)
    said = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert not said, "".join(said)


# Whatever gives a model the tensors of a file, each with a job of its own. (`protobuf.deserialize_model` is published,
# and reads messages.)
WAYS_TO_FILL = {
    "tensorizer.deserializer.TensorDeserializer.load_into_module": "a module that you built",
    "tensorizer.torch.load_model": "the same, by the function of safetensors",
    "tensorizer.integrations.huggingface.from_pretrained": "a model of Hugging Face",
    "tensorizer.integrations.lightning.load_from_checkpoint": "a module of Lightning",
    "tensorizer.distributed._checkpoint.reader.TensorizerReader": "many ranks, planned by torch",
    "tensorizer.legacy.load_model": "published with 1.0",
}
# Not whole models, or called by an engine.
OTHERS = {
    "tensorizer.integrations.huggingface.load_adapter",
    "tensorizer.integrations.sglang.load_weights",
}


def test_there_are_at_most_110_public_names():
    """A name in two lists counts twice, but for the errors, whose list the package takes over."""
    listed = [(module, name) for module in public_modules() for name in getattr(module, "__all__", ())]
    taken_over = [name for module, name in listed if module is tensorizer and name in tensorizer.errors.__all__]
    assert 50 < len(listed) - (len(taken_over) - 1) <= 110  # the package lists one itself, as published


def test_threads_have_one_name_for_reads_and_one_for_writes():
    """``num_readers``, and ``limit_cpu_concurrency`` as published."""
    functions = [value for name, value in CALLABLES.items() if not name.endswith(".dcp_default")]  # has a reader
    arguments = {argument for function in functions for argument in inspect.signature(function).parameters}
    found = {argument for argument in arguments if re.search("thread|worker|reader|concurrency", argument)}
    assert found == {"num_readers", "limit_cpu_concurrency"}


def test_no_text_of_the_package_has_phrases_that_nobody_says():
    phrases = re.compile(
        r"a value that is none|a place that cannot be|nobody knows the scheme|out of reach"
        r"|\blikewise\b|\bthat (is|are) none\b",
        re.IGNORECASE,
    )
    files = [path for path in PACKAGE.rglob("*.py*") if path.suffix in (".py", ".pyi")]
    assert not [path.name for path in files if phrases.search(path.read_text(encoding="utf-8"))]


def test_there_are_six_ways_to_fill_a_module():
    begins = (
        r"(Fills|Loads?|Makes|Replaces|Reads|Puts?) .*\b(modules?|models?|LightningModule|parameters and buffers)\b"
    )
    firsts = {name: (inspect.getdoc(value) or "").splitlines()[0].replace("`", "") for name, value in CALLABLES.items()}
    found = {name for name, first in firsts.items() if re.match(begins, first) and "message" not in first}
    assert found - OTHERS == WAYS_TO_FILL.keys()
    assert len(WAYS_TO_FILL) <= 6
