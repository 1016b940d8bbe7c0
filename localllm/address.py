"""Where the daemon listens and clients find it: the host setting, read as Ollama reads it."""

import re
from dataclasses import dataclass
from typing import Self

from localllm.config import DEFAULT_HOST, DEFAULT_PORT

ANY_HOSTS = ("", "0.0.0.0", "::")
SCHEME_PORTS = {"http": 80, "https": 443}
_PORT = re.compile(r"\d{1,5}")


@dataclass(frozen=True, slots=True)
class Address:
    """Scheme, host (IPv6 without brackets), port and path prefix."""

    scheme: str
    host: str
    port: int
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `[scheme://]host[:port][/path]`; whatever is missing or no port gets its default."""
        scheme, separator, rest = text.strip().strip("\"'").partition("://")
        if not separator:
            scheme, rest = "http", scheme
            default = DEFAULT_PORT
        else:
            default = SCHEME_PORTS.get(scheme.lower(), DEFAULT_PORT)
        place, _, path = rest.partition("/")
        host, port = _split(place)
        number = int(port) if _PORT.fullmatch(port) else -1
        if not 0 <= number <= 65535:
            number = default
        if not host and not port:
            host = DEFAULT_HOST
        path = path.strip("/")
        return cls(scheme.lower(), host, number, f"/{path}" if path else "")

    @property
    def bind_host(self) -> str:
        """What the daemon listens on; no host means all interfaces."""
        return self.host or "0.0.0.0"

    @property
    def dial_host(self) -> str:
        """What a client connects to: loopback in place of all interfaces."""
        return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)

    @property
    def is_local(self) -> bool:
        """Whether it is this machine, so that a client may start a daemon there."""
        return self.host in (*ANY_HOSTS, "localhost", "::1") or self.host.startswith("127.")

    @property
    def is_loopback(self) -> bool:
        """Whether only programs of this machine can reach it."""
        return self.is_local and self.host not in ANY_HOSTS

    def __str__(self) -> str:
        host = f"[{self.dial_host}]" if ":" in self.dial_host else self.dial_host
        return f"{self.scheme}://{host}:{self.port}{self.path}"


def _split(place: str) -> tuple[str, str]:
    """Host and port of `host`, `host:port`, `:port`, `v6`, `[v6]` or `[v6]:port`."""
    if place.startswith("["):
        host, _, rest = place[1:].partition("]")
        return host, rest.removeprefix(":")
    if place.count(":") > 1:
        return place, ""
    host, _, port = place.partition(":")
    return host, port
