"""The real server and daemon with real runners. Prints its port when it listens."""

from localllm.config import load_settings
from localllm.server.app import serve

if __name__ == "__main__":
    serve(load_settings(), on_listening=lambda address: print(address.port, flush=True))
