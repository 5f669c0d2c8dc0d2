"""Encrypts a model with a passphrase, decrypts it again, and says how long both took.

The passphrase comes from the environment variable SUPER_SECRET_STRONG_PASSWORD, or is asked for. MODEL_ID names another
model than the default, on the Hugging Face hub or as a local folder. Needs ``transformers``.
"""

from __future__ import annotations

import argparse
import getpass
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer
from tensorizer.utils import no_init_or_tensor

DEFAULT_MODEL = "EleutherAI/gpt-neo-2.7B"


def get_passphrase() -> str:
    return os.environ.get("SUPER_SECRET_STRONG_PASSWORD") or getpass.getpass("Passphrase: ")


def save_encrypted(model: torch.nn.Module, path: Path, passphrase: str) -> None:
    # The file stores the cost and the salt of the derivation; the passphrase alone opens it.
    encryption = EncryptionParams.from_string(
        passphrase,
        opslimit=EncryptionParams.OpsLimit.MODERATE,
        memlimit=EncryptionParams.MemLimit.MODERATE,
    )
    start = time.perf_counter()
    with TensorSerializer(path, encryption=encryption) as serializer:
        serializer.write_module(model)
    show("encrypted and wrote", serializer.total_tensor_bytes, start)


def load_encrypted(model: torch.nn.Module, path: Path, passphrase: str) -> None:
    decryption = DecryptionParams.from_string(passphrase)
    start = time.perf_counter()
    with TensorDeserializer(path, encryption=decryption, plaid_mode=True) as deserializer:
        deserializer.load_into_module(model)
        show("read and decrypted", deserializer.total_tensor_bytes, start)


def show(what: str, nbytes: int, start: float) -> None:
    seconds = time.perf_counter() - start
    print(f"{what} {nbytes / 1e9:.2f} GB in {seconds:.2f} s: {nbytes / 1e9 / seconds:.2f} GB/s")


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    model_id = os.environ.get("MODEL_ID") or DEFAULT_MODEL
    passphrase = get_passphrase()
    original = AutoModelForCausalLM.from_pretrained(model_id)
    with no_init_or_tensor():
        restored = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_id))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "encrypted.tensors"
        save_encrypted(original, path, passphrase)
        load_encrypted(restored, path, passphrase)
    expected = original.state_dict()
    same = all(torch.equal(value.cpu(), expected[name].cpu()) for name, value in restored.state_dict().items())
    print("the decrypted model is identical" if same else "the decrypted model DIFFERS")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
