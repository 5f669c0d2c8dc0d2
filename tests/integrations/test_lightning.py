"""Lightning's Trainer with checkpoints in ``.tensors`` files: stop, resume, and end with the same losses."""

from __future__ import annotations

import enum
import os
import pickle
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

lightning = pytest.importorskip("lightning")
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO  # noqa: E402
from servers.file_server import serve_folder  # noqa: E402
from servers.s3_recorder import S3Recorder  # noqa: E402

from tensorizer import (  # noqa: E402
    AuthenticationError,
    FormatError,
    SigningKey,
    TensorDeserializer,
    TensorSerializer,
    sign,
)
from tensorizer.integrations.lightning import TensorizerCheckpointIO, load_from_checkpoint  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.xdist_group("transformers")]


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters({"width": 8})
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.losses = []

    def training_step(self, batch, _):
        loss = (self.layers(batch[0]) - batch[1]).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


def fit(folder: Path, epochs: int, plugin=None, resume=None, **arguments):
    torch.manual_seed(0)
    model = Model()
    data = torch.utils.data.TensorDataset(torch.arange(48.0).view(12, 4) / 48, torch.arange(12.0).view(12, 1) / 12)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        plugins=[plugin] if plugin else [],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=bool(plugin),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[lightning.pytorch.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)]
        if plugin
        else [],
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4), ckpt_path=resume, **arguments)
    return trainer, model


def test_training_that_was_stopped_goes_on_with_the_losses_it_would_have_had(tmp_path):
    _, whole = fit(tmp_path / "whole", 4)
    for number, make in enumerate(
        (
            TensorizerCheckpointIO,
            lambda: TensorizerCheckpointIO(async_save=True, verify_hash=True),
            lambda: AsyncCheckpointIO(TensorizerCheckpointIO()),
        )
    ):
        folder = tmp_path / str(number)
        fit(folder, 2, make())
        assert sorted(os.listdir(folder)) == ["epoch=0.ckpt", "epoch=1.ckpt"]
        _, resumed = fit(folder, 4, make(), resume=folder / "epoch=1.ckpt", weights_only=(None, True, False)[number])
        assert resumed.losses == whole.losses[6:]
        assert all(map(torch.equal, resumed.parameters(), whole.parameters()))
        with TensorDeserializer(folder / "epoch=3.ckpt", device="cpu", verify_hash=True) as file:
            assert len(file) >= 4


class Odd:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_checkpoint_comes_back_as_it_was_and_unpickles_nothing_unless_it_is_trusted(tmp_path):
    plugin = TensorizerCheckpointIO()
    weight = torch.arange(6.0).view(2, 3).t()
    checkpoint = {
        "state_dict": {"w": weight, "tied": weight, "h": torch.ones(3, dtype=torch.bfloat16)},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "betas": (0.9, 0.999), "nan": float("nan")},
        "size": torch.Size([2, 3]),
        "none": None,
    }
    path = tmp_path / "deep" / "c.ckpt"
    plugin.save_checkpoint(checkpoint, path)
    for map_location in (None, "cpu", torch.device("cpu"), {"cpu": "cpu"}, lambda storage, _: storage):
        back = plugin.load_checkpoint(path, map_location)
        assert torch.equal(back["state_dict"]["w"], weight)
        assert back["state_dict"]["tied"] is back["state_dict"]["w"]
        assert back["optimizer"]["state"][0]["step"] == 3.0
        assert (back["optimizer"]["betas"], back["size"], back["none"]) == ((0.9, 0.999), torch.Size([2, 3]), None)
    assert plugin.load_checkpoint(path, "meta")["state_dict"]["w"].is_meta

    sign = tmp_path / "executed"
    plugin.save_checkpoint({"state_dict": {}, "hyper_parameters": [1, {"evil": Odd(str(sign))}]}, path)
    for weights_only in (None, True):
        with pytest.raises(pickle.UnpicklingError) as refused:
            plugin.load_checkpoint(path, weights_only=weights_only)
        assert "'hyper_parameters.1.evil'" in str(refused.value)
        assert "with weights_only=False its pickle" in str(refused.value)
        assert "mkdir" in str(refused.value)
        assert "\x1b" not in str(refused.value)
    assert not sign.exists()
    plugin.load_checkpoint(path, weights_only=False)
    assert sign.exists()

    plugin.remove_checkpoint(path)
    plugin.remove_checkpoint(path)
    with pytest.raises(FileNotFoundError):
        plugin.load_checkpoint(path)
    with TensorSerializer(path) as file:
        file.write_state_dict({"w": weight})
    with pytest.raises(FormatError, match="TensorizerCheckpointIO"):
        plugin.load_checkpoint(path)
    with serve_folder(path.parent) as address, pytest.raises(FormatError, match="TensorizerCheckpointIO") as caught:
        plugin.load_checkpoint(f"{address}/c.ckpt?signature=secret".replace("://", "://user:secret@"))
    assert "secret" not in str(caught.value)


def test_a_background_save_sees_no_later_change_and_tells_its_failure_at_the_next_call(tmp_path, caplog):
    plugin = TensorizerCheckpointIO(async_save=True)
    weight = torch.zeros(1000)
    plugin.save_checkpoint({"w": weight}, tmp_path / "a.ckpt")
    weight.fill_(1)
    assert float(plugin.load_checkpoint(tmp_path / "a.ckpt")["w"].sum()) == 0
    (tmp_path / "file").write_text("")
    plugin.save_checkpoint({"w": weight}, tmp_path / "file" / "b.ckpt")
    with pytest.raises(OSError, match="file"):
        plugin.teardown()
    assert "b.ckpt was not saved" in caplog.text  # also where nobody asks
    plugin.save_checkpoint({"w": weight}, tmp_path / "c.ckpt")
    plugin.teardown()
    assert float(plugin.load_checkpoint(tmp_path / "c.ckpt")["w"].sum()) == 1000


def test_a_forked_child_leaves_a_background_save_to_its_parent_and_saves_by_itself(tmp_path, monkeypatch):
    plugin = TensorizerCheckpointIO(async_save=True)
    go_on, write = threading.Event(), plugin._write
    monkeypatch.setattr(plugin, "_write", lambda *arguments: go_on.wait(60) and write(*arguments))
    plugin.save_checkpoint({"w": torch.ones(3)}, tmp_path / "a.ckpt")
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(50)
        go_on.set()
        plugin.save_checkpoint({"w": torch.ones(5)}, tmp_path / "b.ckpt")
        plugin.teardown()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    go_on.set()
    plugin.teardown()
    found = [float(plugin.load_checkpoint(tmp_path / name)["w"].sum()) for name in ("a.ckpt", "b.ckpt")]
    assert found == [3, 5]


def test_a_checkpoint_can_be_linked_to_before_its_background_save_is_done(tmp_path, monkeypatch):
    plugin = TensorizerCheckpointIO(async_save=True)
    linked, write = threading.Event(), plugin._write
    monkeypatch.setattr(plugin, "_write", lambda *arguments: linked.wait(30) and write(*arguments))
    plugin.save_checkpoint({"w": torch.ones(3)}, tmp_path / "run" / "a.ckpt")
    os.symlink("a.ckpt", tmp_path / "run" / "last.ckpt")  # as ModelCheckpoint(save_last="link") does at once
    linked.set()
    assert float(plugin.load_checkpoint(tmp_path / "run" / "last.ckpt")["w"].sum()) == 3
    plugin.teardown()


def test_a_checkpoint_in_a_store_is_saved_resumed_and_removed_with_options_of_the_save(tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    _, whole = fit(tmp_path / "whole", 4)
    with S3Recorder() as store:
        trainer, _ = fit(tmp_path / "first", 2, TensorizerCheckpointIO())
        trainer.save_checkpoint("s3://bucket/run/c.ckpt", storage_options=store.arguments)
        assert [name.rpartition("/")[2] for name in store.objects] == ["c.ckpt"]
        plugin = TensorizerCheckpointIO(stream_options=store.arguments)
        _, resumed = fit(tmp_path / "second", 4, plugin, resume="s3://bucket/run/c.ckpt")
        assert resumed.losses == whole.losses[6:]
        plugin.remove_checkpoint("s3://bucket/run//c.ckpt")  # another object, which is not there
        assert list(store.objects) == ["/bucket/run/c.ckpt"]
        plugin.remove_checkpoint("s3://bucket/run/c.ckpt")
        assert not store.objects
        with pytest.raises(FileNotFoundError):
            plugin.load_checkpoint("s3://bucket/run/c.ckpt")


def test_the_plugin_needs_lightning_fabric_only(fresh_process, tmp_path):
    """The package ``lightning`` imports all of itself; who has ``lightning-fabric`` alone has nothing else."""
    program = """
        import sys, warnings
        warnings.simplefilter("ignore")

        class Absent:
            def find_spec(self, name, *_):
                if name.partition(".")[0] == "lightning":
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, Absent())
        import torch
        from tensorizer.integrations import lightning
        from lightning_fabric import Fabric

        plugin = lightning.TensorizerCheckpointIO()
        fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
        model = torch.nn.Linear(3, 2)
        fabric.save(sys.argv[1], {"model": model, "step": 3})
        state = {"model": torch.nn.Linear(3, 2), "step": 0}
        fabric.load(sys.argv[1], state)
        assert torch.equal(state["model"].weight, model.weight) and state["step"] == 3
        assert not [name for name in sys.modules if name.startswith(("lightning.", "pytorch_lightning"))]
    """
    result = fresh_process(program, tmp_path / "c.ckpt", timeout=200)
    assert result.returncode == 0, result.stderr[-4000:]


@pytest.mark.parametrize("strategy", ["fsdp", "model_parallel"])
def test_sharded_training_in_dcp_default_resumes_with_equal_losses_and_loads_what_lightning_wrote(
    fresh_process, tmp_path, strategy
):
    program = f"""
        import sys, warnings
        from pathlib import Path
        warnings.simplefilter("ignore")
        import lightning_ranks
        lightning_ranks.{strategy}(Path(sys.argv[1]))
    """
    result = fresh_process(program, tmp_path, timeout=200)
    assert result.returncode == 0, result.stderr[-4000:]


def test_a_checkpoint_io_goes_to_ranks_that_are_spawned(tmp_path):
    import pickle

    for background in (False, True):
        there = pickle.loads(pickle.dumps(TensorizerCheckpointIO(async_save=background)))
        there.save_checkpoint({"state_dict": {"w": torch.ones(3)}}, tmp_path / "c.ckpt")
        there.teardown()
        assert torch.equal(there.load_checkpoint(tmp_path / "c.ckpt")["state_dict"]["w"], torch.ones(3))


def test_a_run_that_began_with_the_librarys_own_plugin_goes_on_with_ours(tmp_path):
    _, whole = fit(tmp_path / "whole", 4)
    folder = tmp_path / "run"
    fit(folder, 2, TorchCheckpointIO())
    assert (folder / "epoch=1.ckpt").read_bytes().startswith(b"PK")
    _, resumed = fit(folder, 4, TensorizerCheckpointIO(), resume=folder / "epoch=1.ckpt")
    assert resumed.losses == whole.losses[6:]
    with TensorDeserializer(folder / "epoch=3.ckpt", device="cpu") as file:
        assert len(file) >= 4
    evil = tmp_path / "evil.ckpt"
    torch.save({"state": Refused()}, evil)
    for weights_only in (None, True):
        with pytest.raises(pickle.UnpicklingError):
            TensorizerCheckpointIO().load_checkpoint(evil, weights_only=weights_only)
    assert isinstance(TensorizerCheckpointIO().load_checkpoint(evil, weights_only=False)["state"], Refused)


class Refused:
    """More than a simple value."""


class Colour(enum.Enum):
    RED = 1


def test_keys_may_be_whatever_values_may_be_and_the_first_save_names_the_path_of_one_that_cannot(tmp_path):
    plugin, path = TensorizerCheckpointIO(), tmp_path / "keys.ckpt"
    checkpoint = {"by": {torch.float16: 1, Colour.RED: 2, np.int64(7): 3, (1, torch.int8): 4, None: 5, 2.5: 6, True: 7}}
    plugin.save_checkpoint(checkpoint, path)
    assert plugin.load_checkpoint(path, weights_only=False) == checkpoint
    del checkpoint["by"][Colour.RED]
    plugin.save_checkpoint(checkpoint, path)
    assert plugin.load_checkpoint(path) == checkpoint

    class Local:
        __hash__ = object.__hash__

    before = path.read_bytes()
    for bad in ({"model": {"steps": {Local(): 1}}}, {"model": {"steps": [0, {"x": Local()}]}}):
        with pytest.raises(TypeError, match=r"checkpoint\['model'\]\['steps'\].*a Local cannot be stored"):
            plugin.save_checkpoint(bad, path)
    assert path.read_bytes() == before


@pytest.mark.skipif(not hasattr(torch.serialization, "safe_globals"), reason="came with torch 2.5")
def test_scalars_of_numpy_need_no_trust_in_a_set_either(tmp_path):
    plugin, path = TensorizerCheckpointIO(), tmp_path / "scalars.ckpt"
    checkpoint = {"seen": {np.int64(3), 4}, "one": np.float32(0.5)}
    plugin.save_checkpoint(checkpoint, path)
    for weights_only in (None, True, False):
        assert plugin.load_checkpoint(path, weights_only=weights_only) == checkpoint


def test_arrays_of_numbers_are_records_and_come_back_without_trust(tmp_path):
    path = tmp_path / "arrays.ckpt"
    random = np.random.RandomState(3).get_state()
    shared = np.arange(6, dtype=np.int16)
    odd = {kind: np.arange(12).reshape(3, 4).astype(kind) for kind in ("?", "<u4", ">f4", "<f2", "<c16", "u1", "<g")}
    arrays = {**odd, "scalar": np.array(2.5), "empty": np.zeros((0, 3)), "columns": np.asfortranarray(odd["<u4"])}
    checkpoint = {"state_dict": {}, "callbacks": {"rng": random, "more": [arrays, {"a": shared}, (shared, 1)]}}
    for plugin in (TensorizerCheckpointIO(), TensorizerCheckpointIO(async_save=True)):
        plugin.save_checkpoint(checkpoint, path)
        if plugin._async_save:
            shared[:] = 0  # the save took it before
        for weights_only in (None, True, False):
            back = plugin.load_checkpoint(path, weights_only=weights_only)["callbacks"]
            assert (type(back["rng"]), back["rng"][0], back["rng"][2:]) == (tuple, "MT19937", random[2:])
            assert np.array_equal(back["rng"][1], random[1])
            np.random.RandomState().set_state(back["rng"])
            for name, array in arrays.items():
                found = back["more"][0][name]
                assert (type(found), found.dtype, found.shape) == (np.ndarray, array.dtype, array.shape), name
                assert np.array_equal(found, array), name
                assert found.flags.writeable
            assert back["more"][1]["a"].tolist() == list(range(6))
            assert back["more"][2][0] is back["more"][1]["a"]
        plugin.teardown()
    assert b"PK\x03\x04" not in path.read_bytes()
    with TensorDeserializer(path, device="cpu") as file:
        assert any(tensor.shape == (624,) for tensor in file.values())

    for refused in (np.array([{}], dtype=object), np.ma.array([1.0, 2.0], mask=[True, False]), np.array(["text"])):
        plugin.save_checkpoint({"state_dict": {}, "odd": refused}, path)
        plugin.teardown()
        with pytest.raises(pickle.UnpicklingError, match="'odd' was refused"):
            plugin.load_checkpoint(path)


def test_records_have_the_paths_of_the_checkpoint_as_names(tmp_path):
    fit(tmp_path, 1, TensorizerCheckpointIO())
    with TensorDeserializer(tmp_path / "epoch=0.ckpt", device="cpu") as file:
        names = set(file)
    assert {"state_dict.layers.0.weight", "optimizer_states.0.state.0.exp_avg"} <= names
    plugin, path = TensorizerCheckpointIO(), tmp_path / "odd.ckpt"
    one, two, odd = torch.ones(2), torch.zeros(3), torch.full((1,), 7.0)
    checkpoint = {"a": {"b": one}, "a.b": two, "": {"": odd}, "x" * 2000: torch.ones(1), "\udc80": torch.zeros(1)}
    plugin.save_checkpoint(checkpoint, path)
    back = plugin.load_checkpoint(path)
    assert list(back) == list(checkpoint)
    assert torch.equal(back["a"]["b"], one)
    assert torch.equal(back["a.b"], two)
    assert torch.equal(back[""][""], odd)
    with TensorDeserializer(path, device="cpu") as file:
        assert {"a.b", "a.b~2", "."} <= set(file)


class Tailored(lightning.LightningModule):
    def __init__(self, width, depth=1):
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth)))
        self.seen = None

    def on_load_checkpoint(self, checkpoint):
        self.seen = checkpoint["epoch"]


class Data(lightning.LightningDataModule):
    def __init__(self, size=3):
        super().__init__()
        self.save_hyperparameters()


def test_load_from_checkpoint_makes_what_lightning_makes_of_its_own_files(tmp_path):
    model = Tailored(3, depth=2)
    trainer = lightning.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    trainer.strategy.connect(model)
    checkpoint = trainer._checkpoint_connector.dump_checkpoint()
    checkpoint["datamodule_hyper_parameters"] = {"size": 5}
    ours, theirs = tmp_path / "ours.ckpt", tmp_path / "theirs.ckpt"
    TensorizerCheckpointIO().save_checkpoint(checkpoint, ours)
    torch.save(checkpoint, theirs)
    for path in (ours, theirs):
        made = load_from_checkpoint(Tailored, path)
        assert dict(made.hparams) == {"width": 3, "depth": 2}
        assert made.seen == 0
        assert all(map(torch.equal, made.state_dict().values(), model.state_dict().values()))
        assert load_from_checkpoint(Data, path).hparams.size == 5
        with pytest.raises(RuntimeError, match="layers"):
            load_from_checkpoint(Tailored, path, depth=3)
        with pytest.warns(UserWarning, match="layers"):
            assert len(load_from_checkpoint(Tailored, path, strict=False, depth=3).layers) == 3
    with pytest.raises(TypeError, match="LightningModule"):
        load_from_checkpoint(torch.nn.Linear, ours)
    key = SigningKey.generate()
    with pytest.raises(AuthenticationError):
        load_from_checkpoint(Tailored, ours, public_key=key.public_key)
    sign(ours, key)
    assert load_from_checkpoint(Tailored, ours, public_key=key.public_key).seen == 0


def test_tied_weights_are_stored_once_and_tied_again(tmp_path):
    class Tied(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(500, 100)
            self.head = torch.nn.Linear(100, 500, bias=False)
            self.head.weight = self.table.weight
            self.register_buffer("one", torch.arange(6.0))
            self.register_buffer("start", self.one[:3])
            self.register_buffer("turned", self.one.view(2, 3).t())

    model, path = Tied(), tmp_path / "tied.ckpt"
    for plugin in (TensorizerCheckpointIO(), TensorizerCheckpointIO(async_save=True)):
        plugin.save_checkpoint({"state_dict": model.state_dict(), "ema": dict(model.named_parameters())}, path)
        plugin.teardown()
        assert path.stat().st_size < 1.5 * model.head.weight.nbytes
        back = plugin.load_checkpoint(path)
        state = back["state_dict"]
        assert state["head.weight"] is state["table.weight"] is back["ema"]["table.weight"]
        for name, tensor in model.state_dict().items():
            assert torch.equal(state[name], tensor), name
        assert len({state[name].data_ptr() for name in ("one", "start", "turned")}) == 3  # parts are no ties


NO_TEXTS_OF_A_CHECKPOINT = [
    *("", "{", "{}", "[" * 100_000, '{"q":1}', '{"d":5}', '{"d":[[[1],2]]}', '{"n":["<i8",""]}', '{"i":5}'),
    *('{"x":5}', '{"x":{}}', '{"x":{"tensor":"none"}}', '{"x":{"tensor":["w"]}}', '{"x":{"other":"w"}}'),
    *('{"x":{"array":"w"}}', '{"x":{"array":["w","|O",[1]]}}', '{"x":{"array":["w","<f8",[9999999]]}}'),
    *('{"x":{"array":["w","<f4",[-1]]}}', '{"x":{"array":["w"]}}', '{"x":{"array":[]}}', '{"x":{"array":[["w"]]}}'),
    *('{"x":{"saved":"none"}}', '{"x":{"saved":"w"}}', '{"s":["",-5]}'),
]


@pytest.mark.parametrize("text", NO_TEXTS_OF_A_CHECKPOINT, ids=[text[:24] for text in NO_TEXTS_OF_A_CHECKPOINT])
def test_a_text_that_no_save_writes_is_an_error_of_the_file_by_its_name(tmp_path, text):
    path = tmp_path / "altered.ckpt"
    with TensorSerializer(path, metadata={"lightning.checkpoint": text}) as file:
        file.write_state_dict({"w": torch.ones(2)})
    for weights_only in (None, False):
        with pytest.raises(FormatError, match=r"altered\.ckpt"):
            TensorizerCheckpointIO().load_checkpoint(path, weights_only=weights_only)


def test_checkpoints_that_nobody_signed_are_refused_where_a_key_is_given(tmp_path):
    key = SigningKey.generate()
    path, plugin = tmp_path / "a.ckpt", TensorizerCheckpointIO(public_key=key.public_key)
    plugin.save_checkpoint({"state_dict": {"w": torch.ones(3)}, "epoch": 2}, path)
    with pytest.raises(AuthenticationError, match="not signed"):
        plugin.load_checkpoint(path)
    sign(path, key)
    found = plugin.load_checkpoint(path)
    assert found["epoch"] == 2
    assert torch.equal(found["state_dict"]["w"], torch.ones(3))
    torch.save({"state_dict": {}}, path)
    with pytest.raises(AuthenticationError, match="checkpoint of torch"):
        plugin.load_checkpoint(path)
