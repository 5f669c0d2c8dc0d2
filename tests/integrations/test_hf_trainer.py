"""transformers.Trainer with checkpoints in .tensors files."""

from __future__ import annotations

import shutil
import types

import pytest
import tiny_models
import torch
import transformers
from paths import snippet
from transformers import Trainer, TrainerCallback, TrainingArguments

from tensorizer import CryptographyError, DecryptionParams, EncryptionParams
from tensorizer.integrations.huggingface import from_pretrained
from tensorizer.integrations.transformers import TensorsCallback, TensorsTrainerMixin
from tensorizer.torch import load_file, load_model

pytest.importorskip("accelerate", reason="accelerate is not installed")
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.xdist_group("transformers")]

STEPS = 6
KEYS = {"s3_access_key_id": "AKIDEXAMPLE", "s3_secret_access_key": "not-a-real-key", "s3_region_name": "us-east-1"}


class OurTrainer(TensorsTrainerMixin, Trainer):
    """The trainer of these tests."""


class Examples(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        tokens = torch.randint(3, 64, (8,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": tokens}


class StopAt(TrainerCallback):
    """A training that ends early, as one that was interrupted after a checkpoint."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **others):
        control.should_training_stop = control.should_training_stop or state.global_step == self.step


def model():
    return tiny_models.llama(attention_dropout=0.1)


def trainer(folder, made=None, kind=OurTrainer, callbacks=(), **changes):
    arguments = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
    }
    arguments = TrainingArguments(**{**arguments, **changes})
    return kind(
        model=model() if made is None else made,
        args=arguments,
        train_dataset=Examples(),
        eval_dataset=Examples(),
        processing_class=tiny_models.tokenizer(),
        data_collator=transformers.default_data_collator,
        callbacks=list(callbacks),
    )


def losses(run):
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def assert_same_weights(one, other):
    expected = other.state_dict()
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_a_resumed_training_goes_on_as_if_it_had_not_stopped(tmp_path):
    whole = trainer(tmp_path / "whole")
    whole.train()
    plain = trainer(tmp_path / "plain", kind=Trainer)
    plain.train()
    assert losses(whole) == losses(plain)  # the trainer learns what it learns without us
    trainer(tmp_path / "parts", callbacks=[StopAt(4)]).train()
    names = {path.name for path in (tmp_path / "parts" / "checkpoint-4").iterdir()}
    assert {"model.tensors", "config.json", "generation_config.json", "tokenizer.json", "training_args.bin"} <= names
    assert not [name for name in names if name.endswith(".safetensors")]
    resumed = trainer(tmp_path / "parts")
    resumed.train(resume_from_checkpoint=True)
    assert len(losses(resumed)) == STEPS
    assert losses(resumed) == losses(whole)
    assert_same_weights(resumed.model, whole.model)
    assert_same_weights(from_pretrained(tmp_path / "parts" / f"checkpoint-{STEPS}"), whole.model)
    assert resumed.model.lm_head.weight is resumed.model.model.embed_tokens.weight


def test_old_checkpoints_go_and_the_best_model_comes_back(tmp_path):
    options = {"save_total_limit": 1, "load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
    run = trainer(tmp_path, learning_rate=3.0, metric_for_best_model="loss", **options)  # so large that it gets worse
    run.train()
    best = tmp_path / run.state.best_model_checkpoint.rpartition("/")[2]
    kept = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert kept == sorted({best.name, f"checkpoint-{STEPS}"})
    assert_same_weights(run.model, from_pretrained(best))
    assert run.model.training is False
    run.save_model(str(tmp_path / "final"))
    assert_same_weights(run.model, from_pretrained(tmp_path / "final"))


def test_checkpoints_of_the_trainer_itself_are_resumed(tmp_path):
    trainer(tmp_path / "theirs", kind=Trainer, callbacks=[StopAt(4)]).train()
    run = trainer(tmp_path / "theirs")
    run.train(resume_from_checkpoint=True)
    assert len(losses(run)) == STEPS
    (tmp_path / "empty").mkdir()
    run = trainer(tmp_path / "new")
    with pytest.raises(ValueError, match="valid checkpoint"):
        run.train(resume_from_checkpoint=str(tmp_path / "empty"))


def test_encrypted_checkpoints_are_resumed_with_the_key_alone(tmp_path):
    class Encrypting(OurTrainer):
        encryption = EncryptionParams.random()
        decryption = DecryptionParams.from_key(encryption.key)

    trainer(tmp_path, kind=Encrypting, callbacks=[StopAt(2)]).train()
    with pytest.raises(CryptographyError):
        trainer(tmp_path).train(resume_from_checkpoint=True)
    run = trainer(tmp_path, kind=Encrypting)
    run.train(resume_from_checkpoint=True)
    assert len(losses(run)) == STEPS


def test_adapters_and_plain_modules_are_resumed_too(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def adapted():
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        return peft.get_peft_model(tiny_models.llama(), config)

    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.table = torch.nn.Embedding(64, 8)

        def forward(self, input_ids, labels):
            return {"loss": self.table(input_ids).square().mean()}

    for what, make in {"adapters": adapted, "plain": Plain}.items():
        whole = trainer(tmp_path / what / "whole", make())
        whole.train()
        trainer(tmp_path / what / "parts", make(), callbacks=[StopAt(4)]).train()
        resumed = trainer(tmp_path / what / "parts", make())
        resumed.train(resume_from_checkpoint=True)
        assert losses(resumed) == losses(whole), what
        assert_same_weights(resumed.model, whole.model)
        assert not list((tmp_path / what).rglob("*model.safetensors"))


def test_a_callback_writes_beside_the_files_of_the_trainer_or_elsewhere(tmp_path):
    callbacks = [TensorsCallback(), TensorsCallback(tmp_path / "elsewhere", max_shard_size="20KB")]
    run = trainer(tmp_path / "run", kind=Trainer, callbacks=callbacks, save_total_limit=1)
    run.train()
    last = f"checkpoint-{STEPS}"
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == [last]
    assert (tmp_path / "run" / last / "model.safetensors").exists()
    assert_same_weights(from_pretrained(tmp_path / "run" / last), run.model)
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == [
        f"checkpoint-{step}" for step in range(2, STEPS + 1, 2)
    ]
    assert_same_weights(from_pretrained(tmp_path / "elsewhere" / last), run.model)


class Table(torch.nn.Module):
    """A module of nobody's library."""

    def __init__(self, config=None):
        super().__init__()
        torch.manual_seed(1)
        self.table = torch.nn.Embedding(64, 8)
        self.head = torch.nn.Linear(8, 64, bias=False)
        if config is not None:
            self.config = config

    def forward(self, input_ids, labels):
        return {"loss": self.head(self.table(input_ids)).square().mean()}


def test_a_callback_saves_any_module(tmp_path):
    cases = {
        "plain": (Table(), {}),
        "sharded": (Table(), {"max_shard_size": "1KB"}),
        "encrypted": (Table(), {"encryption": EncryptionParams.from_string("secret")}),
    }
    for what, (module, options) in cases.items():
        callback = TensorsCallback(tmp_path / what / "ours", raise_errors=True, **options)
        run = trainer(tmp_path / what / "run", module, Trainer, [callback], max_steps=2)
        run.train()
        folder = tmp_path / what / "ours" / "checkpoint-2"
        assert (folder / "tokenizer.json").exists()
        loaded = Table()
        key = DecryptionParams.from_string("secret") if what == "encrypted" else None
        source = folder / ("model.tensors.index.json" if what == "sharded" else "model.tensors")
        load_model(loaded, source, encryption=key)
        assert_same_weights(loaded, module)


def test_a_callback_takes_a_config_that_no_library_reads_for_nothing(tmp_path):
    """``Trainer`` of transformers 5 itself wants more of a config; the one of 4 does not."""
    arguments = types.SimpleNamespace(output_dir=str(tmp_path))
    state = types.SimpleNamespace(is_world_process_zero=True, global_step=3)
    for config in ({"width": 8}, types.SimpleNamespace(width=8)):
        module = Table(config)
        TensorsCallback(raise_errors=True).on_save(arguments, state, None, model=torch.compile(module))
        loaded = Table()
        load_model(loaded, tmp_path / "checkpoint-3" / "model.tensors")
        assert_same_weights(loaded, module)


def test_a_callback_whose_save_fails_ends_the_training_only_if_asked_to(tmp_path, monkeypatch, caplog):
    pytest.importorskip("boto3", reason="boto3 is not installed")
    from servers.http_faults import FaultyServer, Reply

    monkeypatch.setenv("TENSORIZER_HTTP_RETRIES", "0")
    (tmp_path / "file").write_text("no folder")
    with FaultyServer(b"", default=Reply(status=503)) as server:
        there = {"s3_endpoint": f"http://127.0.0.1:{server.port}", "force_http": True, **KEYS}
        for target, options in (("s3://bucket/run", {"stream_options": there}), (tmp_path / "file", {})):
            for made in (model(), Table()):
                caplog.clear()
                run = trainer(tmp_path / "run", made, Trainer, [TensorsCallback(target, **options)], max_steps=2)
                run.train()
                assert run.state.global_step == 2
                (said,) = (record for record in caplog.records if "was not saved" in record.getMessage())
                assert said.levelname == "WARNING"
                assert said.getMessage().startswith(f"{target}/checkpoint-2 was not saved: ")
                assert "not-a-real-key" not in said.getMessage()
                strict = TensorsCallback(target, raise_errors=True, **options)
                with pytest.raises(OSError):
                    trainer(tmp_path / "run", made, Trainer, [strict], max_steps=2).train()
    for wrong in ({"wrong": 1}, {"tokenizer": None}):
        with pytest.raises(TypeError):
            TensorsCallback(**wrong)


def test_the_program_of_the_guide_resumes_after_a_crash_as_if_there_was_none(tmp_path, monkeypatch):
    code = compile(snippet("training.md", "trainer.train(resume_from_checkpoint="), "training.md", "exec")
    monkeypatch.chdir(tmp_path)

    def run() -> dict:
        transformers.set_seed(0)
        exec(code, {"__name__": "guide"})
        assert (tmp_path / "out" / "checkpoint-6" / "model.tensors").exists()
        return load_file(tmp_path / "out" / "checkpoint-6" / "model.tensors")

    whole = run()
    for step in (4, 6):  # the checkpoint at step 2 is the last one
        shutil.rmtree(tmp_path / "out" / f"checkpoint-{step}")
    again = run()
    assert again.keys() == whole.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())
