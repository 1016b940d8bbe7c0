"""The command line: thin commands over the daemon's client and, for files, over `offline`.

Errors are one line on standard error and exit code 1, never a traceback. Standard output is the
answer alone when it is piped; progress is shown on terminals only.
"""

import os
import sys

EXIT_INTERRUPTED = 130
TRUTHS = ("true", "false")
THINK_VALUES = (*TRUTHS, "high", "medium", "low", "max")
# Options that may stand alone, and the values that they may have; alone they are true.
LONE_OPTIONS = {"--think": THINK_VALUES, "--truncate": TRUTHS}


def main(args: list[str] | None = None) -> int:
    """Run the command line and give its exit code."""
    _open_missing_streams()
    problem = _unsupported_machine()
    if problem is not None:
        print(f"Error: {problem}", file=sys.stderr)
        return 1
    from localllm.errors import LocalLLMError

    _make_output_safe()
    try:
        return _run(sys.argv[1:] if args is None else args)
    except LocalLLMError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _silence_output()
        return 1
    except OSError as error:
        print(f"Error: {_told(error)}", file=sys.stderr)
        _silence_output()
        return 1


def _run(args: list[str]) -> int:
    from typer.exceptions import Abort, Exit, TyperException

    from localllm.cli.app import command

    try:
        code = command().main(args=_with_values(args), prog_name="localllm", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except TyperException as error:
        if not args:
            print(error.format_message())
            return 0
        print(f"Error: {error.format_message()}", file=sys.stderr)
        return 1
    except Exit as end:
        return end.exit_code
    except Abort:
        return EXIT_INTERRUPTED


def _with_values(args: list[str]) -> list[str]:
    """The arguments with the values of options that stand alone; a word after them is a prompt.

    `help COMMAND` is `COMMAND --help`.
    """
    if args[:1] == ["help"]:
        return [*args[1:], "--help"]
    end = args.index("--") if "--" in args else len(args)
    return [
        f"{arg}=true" if i < end and following not in LONE_OPTIONS.get(arg, (following,)) else arg
        for i, (arg, following) in enumerate(zip(args, [*args[1:], ""]))
    ]


def _unsupported_machine() -> str | None:
    """Why this machine cannot run localllm, in one line."""
    if sys.platform == "win32":
        return "localllm does not run on Windows itself; use it inside WSL"
    if sys.platform == "darwin":
        import platform

        if platform.machine() != "arm64":
            return "localllm does not run on Macs with Intel processors"
    return None


def _told(error: OSError) -> str:
    """A failure of the operating system, such as a full disk, with the file if it is known."""
    text = error.strerror or str(error) or type(error).__name__
    return text if error.filename is None else f"{error.filename}: {text}"


def _open_missing_streams() -> None:
    """Where a standard stream is closed, read nothing and write nowhere.

    Otherwise a socket would get its number, and what is printed would go there.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _make_output_safe() -> None:
    """Write UTF-8 whatever the locale says, and replace what cannot be written."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")


def _silence_output() -> None:
    """Keep the interpreter from complaining at exit about what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
