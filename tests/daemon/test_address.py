import pytest

from localllm.address import Address


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("", "http://127.0.0.1:11434"),
        ("0.0.0.0", "http://127.0.0.1:11434"),
        (":11500", "http://127.0.0.1:11500"),
        ("127.0.0.1:11500", "http://127.0.0.1:11500"),
        ("[::1]:11500", "http://[::1]:11500"),
        ("::1", "http://[::1]:11434"),
        ("http://127.0.0.1:11500/", "http://127.0.0.1:11500"),
        ("http://example.com", "http://example.com:80"),
        ("https://x", "https://x:443"),
        ("https://x/prefix/", "https://x:443/prefix"),
        ("localhost", "http://localhost:11434"),
        ('"127.0.0.1"', "http://127.0.0.1:11434"),
        ("127.0.0.1:0", "http://127.0.0.1:0"),
        ("127.0.0.1:99999", "http://127.0.0.1:11434"),
        ("127.0.0.1:abc", "http://127.0.0.1:11434"),
    ],
)
def test_host_setting_is_read_in_all_its_forms(text: str, url: str) -> None:
    assert str(Address.parse(text)) == url


def test_no_host_listens_on_all_interfaces_and_dials_loopback() -> None:
    address = Address.parse(":8080")
    assert (address.bind_host, address.dial_host) == ("0.0.0.0", "127.0.0.1")
    assert address.is_local
    assert not address.is_loopback


def test_only_this_machine_is_local() -> None:
    assert Address.parse("localhost:1").is_loopback
    assert not Address.parse("192.168.1.2").is_local
