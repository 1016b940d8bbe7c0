"""Commands that work on model files without a daemon, and `doctor`."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from localllm.cli.app import app
from localllm.config import Settings, load_settings
from localllm.errors import BadRequest

File = Annotated[Path, typer.Argument(metavar="FILE.gguf", help="The model file.")]
Threads = Annotated[
    int | None, typer.Option("--threads", "-t", min=1, help="Threads (physical cores).")
]
BackendName = Annotated[str, typer.Option("--backend", help="cpu or reference.")]


def settings_with(threads: int | None, weights: str | None = None) -> Settings:
    settings = load_settings()
    return replace(
        settings, threads=threads or settings.threads, weights=weights or settings.weights
    )


@app.command()
def tokenize(
    file: File,
    special: Annotated[bool, typer.Option("--special", help="Recognise control tokens.")] = False,
    bos: Annotated[bool, typer.Option("--bos", help="Begin with BOS.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Read a JSON list of texts.")] = False,
) -> None:
    """Turn the bytes of standard input into token ids.

    \b
    Examples:
      printf 'Hello world' | localllm tokenize model.gguf
      echo '["a", "b"]' | localllm tokenize model.gguf --json
    """
    from localllm.offline.tokenize import tokenize as run

    print(run(file, sys.stdin.buffer.read(), special=special, bos=bos, as_json=json))


@app.command()
def detokenize(
    file: File,
    json: Annotated[bool, typer.Option("--json", help="Read a list of lists of ids.")] = False,
) -> None:
    """Turn a JSON list of token ids into text.

    \b
    Example:
      echo '[19556, 905]' | localllm detokenize model.gguf
    """
    from localllm.offline.tokenize import detokenize as run

    sys.stdout.buffer.write(run(file, sys.stdin.buffer.read(), as_json=json))


@app.command()
def logits(
    file: File,
    ids: Annotated[Path, typer.Option("--ids", help="Token ids, a .npy file.")],
    out: Annotated[Path, typer.Option("--out", help="Where to write float32 [T, vocab].")],
    backend: BackendName = "cpu",
    path: Annotated[str, typer.Option("--path", help="prefill or decode.")] = "prefill",
    chunk: Annotated[int | None, typer.Option("--chunk", min=1, help="Tokens a step.")] = None,
    beside: Annotated[int, typer.Option("--beside", min=0, help="Other sequences.")] = 0,
    threads: Threads = None,
) -> None:
    """Write the logits after every token of a list.

    \b
    Example:
      localllm logits model.gguf --ids ids.npy --out logits.npy --path decode
    """
    from localllm.cli.output import Status
    from localllm.offline.logits import LogitsOptions, write_logits

    if path not in ("prefill", "decode"):
        raise BadRequest(f"--path is prefill or decode, not {path!r}")
    options = LogitsOptions(backend, "prefill" if path == "prefill" else "decode", chunk, beside)
    status = Status()
    try:
        write_logits(file, ids, out, options, settings_with(threads), status.report)
    finally:
        status.clear()


@app.command()
def perplexity(
    file: File,
    text: Annotated[Path | None, typer.Argument(metavar="[TEXT]", help="A text file.")] = None,
    kl: Annotated[
        Path | None, typer.Option("--kl", help="Saved log-probabilities to compare with.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", help="Save log-probabilities to compare with.")
    ] = None,
    path: Annotated[str, typer.Option("--path", help="prefill or decode.")] = "prefill",
    backend: BackendName = "cpu",
    threads: Threads = None,
) -> None:
    """Measure how well a model predicts a text, and how far it is from another one.

    \b
    Examples:
      localllm perplexity model.gguf text.txt
      localllm perplexity model.gguf text.txt --kl base.npz
    """
    from localllm.cli.output import Status
    from localllm.offline.perplexity import perplexity as measure

    if path not in ("prefill", "decode"):
        raise BadRequest(f"--path is prefill or decode, not {path!r}")
    status = Status()
    try:
        report = measure(
            file,
            settings_with(threads),
            text=text,
            kl=kl,
            save=save,
            role="prefill" if path == "prefill" else "decode",
            backend=backend,
            progress=status.report,
        )
    finally:
        status.clear()
    print(report.to_text())


@app.command()
def doctor() -> None:
    """Check this machine: processor, kernels, caches, disk, port.

    \b
    Example:
      localllm doctor
    """
    from localllm.offline.doctor import examine

    is_well = True
    for finding in examine(load_settings()):
        is_well = is_well and finding.is_good
        mark = "ok  " if finding.is_good else "FAIL"
        print(f"{mark} {finding.what:<20} {finding.text}", flush=True)
    raise typer.Exit(0 if is_well else 1)
