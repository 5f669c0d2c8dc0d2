"""Writes docs/cli.md from the parsers of the command line; ``--check`` compares instead."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "cli.md"

COMMANDS = (
    "inspect model.safetensors --group",
    "convert model.safetensors model.tensors",
    "verify model.tensors",
    "encrypt model.tensors secret.tensors --generate-key key",
    "encrypt secret.tensors again.tensors --in-key-file key --generate-key new.key",
    "diff model.tensors other.tensors",
    "sign --generate-key signing",
    "sign model.tensors --key signing",
    "verify model.tensors --public-key signing.pub",
)

HEAD = """# Command line

`tensorizer COMMAND …`, or `python -m tensorizer COMMAND …`. Sources and targets are paths or URIs (`https://`, `s3://`,
`redis://` and those of fsspec). Both `.tensors` and `.safetensors` work everywhere; the content decides.

```console
@@SESSION@@```

## Output

Results go to standard output, everything else to standard error. `--json` prints one document with `"schema": 1`; sizes
are integers in bytes, and numbers that JSON lacks are `"Infinity"`, `"-Infinity"` and `"NaN"`. On a terminal, tables
are cut to its width. Colours appear only on a terminal, unless `NO_COLOR` is set or `TERM` is `dumb`. Control
characters and marks of direction in what a file says (names, dtypes, metadata) are escaped, in JSON too.

[shtab](https://docs.iterative.ai/shtab/) makes completions for bash, zsh and tcsh:
`shtab --shell bash tensorizer.cli.main.make_parser > ~/.local/share/bash-completion/completions/tensorizer`.

## Keys

No option takes a key or a passphrase itself, because other users can see arguments. A key file holds 32 bytes or 64
hexadecimal digits; one line end after a passphrase in a file is ignored. `--key-…` names the key of the file (of the
target, if the command writes one), `--in-key-…` that of an encrypted source: `encrypt --in-key-file` changes the key of
a file. No output may be the file of a key that the command names, and no option takes an empty text.

## Exit status

| status | meaning |
|---:|---|
| 0 | done; all equal; all verified |
| 1 | a digest does not match or is missing, or files differ |
| 2 | wrong arguments; `--filter` of `verify` or `diff` matches nothing |
| 3 | not found, no access, network, disk full |
| 4 | not a valid file: malformed, truncated, unknown version or dtype |
| 5 | key missing, wrong or not needed; authentication failed |
| 6 | the target exists (`--force`), or its format cannot hold the content |
| 130 | interrupted |

"""


def reference(shown: str) -> str:
    """The whole page; `shown` is what :func:`session` gives."""
    os.environ["COLUMNS"] = "100"
    sys.path.insert(0, str(ROOT))
    from tensorizer.cli.main import make_parser

    return "".join([HEAD.replace("@@SESSION@@", shown) + "## Commands\n", *sections(make_parser(), "")])


def session() -> str:
    """What the commands print of a small model, without times and keys, which are others each time."""
    import torch

    from tensorizer.torch import save_file

    layer = {"self_attn.q_proj.weight": (64, 64), "mlp.up_proj.weight": (256, 64), "input_layernorm.weight": (64,)}
    shapes = {f"model.layers.{i}.{name}": shape for i in range(12) for name, shape in layer.items()}
    state = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    state["model.embed_tokens.weight"] = torch.zeros(1000, 64, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        save_file(state, Path(folder, "model.safetensors"))
        save_file({**state, "model.norm.weight": torch.zeros(64)}, Path(folder, "other.tensors"))
        back = os.getcwd()
        os.chdir(folder)
        try:
            printed = {command: _printed(command.split()) for command in COMMANDS}
        finally:
            os.chdir(back)
    text = ""
    for command, shown in printed.items():
        shown = re.sub(r", [0-9.]+ [a-zA-Z]+/s", "", re.sub(r" in [0-9.]+ s\)", ")", shown))
        text += f"$ tensorizer {command}\n" + re.sub("[0-9a-f]{64}", "(64 hexadecimal digits)", shown)
    return text


def _printed(words: list[str]) -> str:
    """What one command writes to its outputs, which are no terminals."""
    from tensorizer.cli.main import main

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        main(words)
    return output.getvalue()


def sections(parser: argparse.ArgumentParser, above: str) -> list[str]:
    """One for each command below a parser, and for each action of a command."""
    parts: list[str] = []
    seen: set[int] = set()
    for commands in parser._actions:
        if not isinstance(commands, argparse._SubParsersAction):
            continue
        for name, command in commands.choices.items():
            if id(command) in seen:  # an alias
                continue
            seen.add(id(command))
            parts.append(f"\n### {above}{name}\n\n```text\n{command.format_help().rstrip()}\n```\n")
            parts += sections(command, f"{above}{name} ")
    return parts


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--check", action="store_true", help="fail where the page is not what would be written")
    if not arguments.parse_args().check:
        TARGET.write_text(reference(session()), encoding="utf-8")
        return 0
    page = TARGET.read_text(encoding="utf-8") if TARGET.exists() else ""
    # What commands print needs the compiled module, which a check of style does not: a test compares that.
    same = page == reference(page.partition("```console\n")[2].partition("```")[0])
    if not same:
        print("docs/cli.md is not what scripts/cli_reference.py writes: run it", file=sys.stderr)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
