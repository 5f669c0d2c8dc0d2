"""accelerate with its weights in ``.tensors`` files: stop, resume, and go on with the same losses."""

from __future__ import annotations

import pickle

import pytest
import torch

accelerate = pytest.importorskip("accelerate")
from accelerate import Accelerator  # noqa: E402

from tensorizer import DecryptionParams, EncryptionParams, SigningKey, TensorDeserializer, sign  # noqa: E402
from tensorizer.errors import AuthenticationError, CryptographyError, HashMismatchError, StreamNotFoundError  # noqa: E402
from tensorizer.integrations.accelerate import install_hooks  # noqa: E402
from tensorizer.torch import load_file, save_file  # noqa: E402
from tensorizer.torch_compat import tensorizer_loading, tensorizer_saving  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.xdist_group("transformers")]


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.back = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.back.weight = self.enter.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return self.back(torch.tanh(self.enter(x)))


@pytest.fixture
def accelerator():
    accelerator = Accelerator(cpu=True)
    yield accelerator
    accelerator.free_memory()
    accelerate.state.AcceleratorState._reset_state(True)


def prepared(accelerator, compiled=False):
    accelerator.free_memory()
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    if compiled:
        model = torch.compile(model, backend="eager")
    return accelerator.prepare(model, optimizer, scheduler)


def train(accelerator, parts, steps):
    model, optimizer, scheduler = parts
    losses = []
    for _ in range(steps):
        x = torch.randn(8, 4)  # of the random state that load_state brings back
        loss = (model(x) - x.flip(1)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_training_that_was_stopped_goes_on_with_the_losses_it_would_have_had(accelerator, tmp_path):
    whole = train(accelerator, prepared(accelerator), 8)
    train(accelerator, prepared(accelerator), 4)
    accelerator.save_state(tmp_path / "both")  # by accelerate alone; the hooks take its place
    hooks = install_hooks(accelerator, verify_hash=True)
    for name, around in (("both", False), ("all", True)):
        folder = tmp_path / name
        train(accelerator, prepared(accelerator), 4)
        if around:  # the optimizer too
            with tensorizer_saving():
                accelerator.save_state(folder)
        else:
            accelerator.save_state(folder)
        parts = prepared(accelerator)
        before = [parameter.data_ptr() for parameter in parts[0].parameters()]
        if around:
            with tensorizer_loading(device="cpu"):
                accelerator.load_state(folder)
        else:
            accelerator.load_state(folder)
        assert [parameter.data_ptr() for parameter in parts[0].parameters()] == before
        assert parts[0].back.weight is parts[0].enter.weight
        assert float(parts[0].seen) == 4
        assert train(accelerator, parts, 4) == whole[4:]
        files = {path.name for path in folder.iterdir()}
        expected = {"model.tensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl"}
        assert files >= expected
        assert not {name for name in files if name.endswith(".safetensors")}
        assert ("optimizer.bin.tensors" in files) == around
    hooks.remove()
    parts = prepared(accelerator)
    train(accelerator, parts, 4)
    accelerator.save_state(tmp_path / "without")
    assert (tmp_path / "without" / "model.safetensors").exists()
    install_hooks(accelerator)  # what accelerate wrote alone loads as ever
    parts = prepared(accelerator)
    accelerator.load_state(tmp_path / "without")
    assert train(accelerator, parts, 4) == whole[4:]


def test_names_in_the_file_are_those_of_the_model_and_wrappers_make_no_difference(accelerator, tmp_path):
    install_hooks(accelerator)
    for compiled, other in ((False, True), (True, False)):
        model, *_ = prepared(accelerator, compiled)
        accelerator.save_state(tmp_path / "state")
        assert set(load_file(tmp_path / "state" / "model.tensors")) == set(Tied().state_dict())
        saved = [parameter.clone() for parameter in model.parameters()]
        model, *_ = prepared(accelerator, other)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        accelerator.load_state(tmp_path / "state")
        assert all(map(torch.equal, model.parameters(), saved))


def test_weights_are_encrypted_several_models_have_files_of_their_own_and_damage_is_an_error(accelerator, tmp_path):
    key = EncryptionParams.random()
    unlock = DecryptionParams.from_key(key.key)
    hooks = install_hooks(accelerator, encryption=key, decryption=unlock)
    first, second = (torch.nn.Linear(100, 100) for _ in range(2))
    accelerator.prepare(first, second)
    accelerator.save_state(tmp_path)
    weights = [first.weight.clone(), second.weight.clone()]
    assert weights[0].detach().numpy().tobytes()[:64] not in (tmp_path / "model.tensors").read_bytes()
    torch.nn.init.zeros_(first.weight)
    torch.nn.init.zeros_(second.weight)
    accelerator.load_state(tmp_path)
    assert torch.equal(first.weight, weights[0])
    assert torch.equal(second.weight, weights[1])

    hooks.remove()
    hooks = install_hooks(accelerator, decryption=DecryptionParams.from_key(EncryptionParams.random().key))
    with pytest.raises(CryptographyError):
        accelerator.load_state(tmp_path)
    hooks.remove()
    hooks = install_hooks(accelerator, verify_hash=True)
    accelerator.save_state(tmp_path)
    content = bytearray((tmp_path / "model_1.tensors").read_bytes())
    content[content.index(weights[1].detach().numpy().tobytes()[:64])] ^= 1
    (tmp_path / "model_1.tensors").write_bytes(bytes(content))
    with pytest.raises(HashMismatchError):
        accelerator.load_state(tmp_path)
    (tmp_path / "model_1.tensors").unlink()
    with pytest.raises(StreamNotFoundError, match="model_1"):
        accelerator.load_state(tmp_path)


@pytest.mark.parametrize("scenario", ["hooks_of_two_ranks", "shards"])
def test_with_ranks_of_their_own(fresh_process, tmp_path, scenario):
    """Data parallel with the hooks, and FSDP in ``dcp_default()``: each resumes with equal losses."""
    program = f"""
        import sys, warnings
        from pathlib import Path
        warnings.simplefilter("ignore")
        import accelerate_ranks
        accelerate_ranks.{scenario}(Path(sys.argv[1]))
    """
    result = fresh_process(program, tmp_path, timeout=200)
    assert result.returncode == 0, result.stderr[-4000:]


def test_weights_that_nobody_signed_are_refused_where_a_key_is_given(accelerator, tmp_path):
    key = SigningKey.generate()
    install_hooks(accelerator, public_key=key.public_key)
    model = torch.nn.Linear(4, 4)
    accelerator.prepare(model)
    accelerator.save_state(tmp_path)
    before = model.weight.clone()
    with pytest.raises(AuthenticationError, match="not signed"):
        accelerator.load_state(tmp_path)
    sign(tmp_path / "model.tensors", key)
    torch.nn.init.zeros_(model.weight)
    accelerator.load_state(tmp_path)
    assert torch.equal(model.weight, before)
    (tmp_path / "model.tensors").unlink()
    with pytest.raises(StreamNotFoundError):
        accelerator.load_state(tmp_path)


def test_an_empty_model_is_filled_over_a_device_map_and_dispatched(tmp_path):
    """docs/troubleshooting.md"""
    model = Tied()
    save_file(model.state_dict(), tmp_path / "m.tensors")
    with accelerate.init_empty_weights(include_buffers=True):
        empty = Tied()
    with pytest.raises(pickle.UnpicklingError):
        accelerate.load_checkpoint_and_dispatch(empty, str(tmp_path / "m.tensors"), device_map={"": "cpu"})
    device_map = {"enter": "cpu", "back": "cpu", "": "cpu"}
    with TensorDeserializer(tmp_path / "m.tensors", device=device_map) as file:
        file.load_into_module(empty)
    dispatched = accelerate.dispatch_model(empty, {"": "cpu"})
    x = torch.ones(2, 4)
    assert torch.equal(dispatched(x), model(x))
