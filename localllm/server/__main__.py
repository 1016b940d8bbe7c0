"""`python -m localllm.server`: the daemon, as clients start it in the background."""

import os
import sys

from localllm.config import load_settings
from localllm.errors import LocalLLMError
from localllm.launch import launch_runner


def main() -> int:
    """Serve until a signal comes. `--background` logs to a file, `--prepare` starts a runner."""
    settings = load_settings()
    if "--background" in sys.argv:
        os.chdir("/")
    try:
        # It imports its libraries on another core while the server's are imported here.
        prepared = launch_runner(settings) if "--prepare" in sys.argv else None
        from localllm.server.app import serve

        serve(settings, is_background="--background" in sys.argv, prepared=prepared)
    except LocalLLMError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
