"""The command line: thin commands over the daemon's client and, for files, over `offline`.

Errors are one line on standard error and exit code 1, never a traceback. Standard output is the
answer alone when it is piped; progress is shown on terminals only.
"""

import sys

EXIT_INTERRUPTED = 130


def main(args: list[str] | None = None) -> int:
    """Run the command line and give its exit code."""
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


def _run(args: list[str]) -> int:
    from typer.exceptions import Abort, Exit, TyperException

    from localllm.cli.app import command

    try:
        code = command().main(args=args, prog_name="localllm", standalone_mode=False)
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


def _unsupported_machine() -> str | None:
    """Why this machine cannot run localllm, in one line."""
    if sys.platform == "win32":
        return "localllm does not run on Windows itself; use it inside WSL"
    if sys.platform == "darwin":
        import platform

        if platform.machine() != "arm64":
            return "localllm does not run on Macs with Intel processors"
    return None


def _make_output_safe() -> None:
    """Write UTF-8 whatever the locale says, and replace what cannot be written."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")


def _silence_output() -> None:
    """Keep the interpreter from complaining about a closed pipe at exit."""
    import os

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
