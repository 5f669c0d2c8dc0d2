"""accelerate: FSDP checkpoints in ``dcp_default()``, and models that it makes empty."""

from __future__ import annotations

import pickle

import pytest
import torch

accelerate = pytest.importorskip("accelerate")

from tensorizer import TensorDeserializer  # noqa: E402
from tensorizer.torch import save_file  # noqa: E402

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


def test_fsdp_in_dcp_default_resumes_with_equal_losses_and_loads_what_torch_wrote(fresh_process, tmp_path):
    program = """
        import sys, warnings
        from pathlib import Path
        warnings.simplefilter("ignore")
        import accelerate_ranks
        accelerate_ranks.shards(Path(sys.argv[1]))
    """
    result = fresh_process(program, tmp_path, timeout=200)
    assert result.returncode == 0, result.stderr[-4000:]


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
