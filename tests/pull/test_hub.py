"""The Hub: what it refuses, what goes with a file, and its own client at the stand-in."""

import hashlib
import json
from pathlib import Path

import pytest
from pulling import Puller, make_model, make_shards
from standin import Handler, HubStandIn, Repo

from localllm.config import Settings, load_settings
from localllm.errors import BadFile, BadRequest, PullFailed
from localllm.names import ModelName

NAME = "hf.co/org/M-GGUF"
DATA = make_model()
FILES = {"M-Q4_K_M.gguf": DATA, "M-Q8_0.gguf": make_model(seed=1), "README.md": b"# M"}


@pytest.fixture(autouse=True)
def _repo(hub: HubStandIn) -> None:
    hub.repos["org/M-GGUF"] = Repo(dict(FILES), plain=frozenset({"README.md"}))


def test_hubs_own_client_understands_the_standin(hub: HubStandIn, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """The stand-in is worth something only if the real client takes it for a Hub."""
    from huggingface_hub import hf_hub_download

    path = hf_hub_download(
        "org/M-GGUF", "M-Q4_K_M.gguf", endpoint=hub.url, cache_dir=tmp_path, token=False
    )
    with open(path, "rb") as file:
        assert hashlib.sha256(file.read()).digest() == hashlib.sha256(DATA).digest()


def test_model_says_where_it_came_from(puller: Puller) -> None:
    model = puller.pull(f"{NAME}:q8_0")
    assert model.config["source"] == {
        "repo": "org/M-GGUF",
        "revision": "a" * 40,
        "files": ["M-Q8_0.gguf"],
    }
    assert model.config["model_family"] == "llama"
    assert puller.store.texts(model, "license") == ["mit"]
    assert str(model.name) == f"{NAME}:q8_0"


def test_every_request_after_the_first_is_pinned_to_a_commit(
    puller: Puller, hub: HubStandIn
) -> None:
    puller.pull(NAME)
    files = [seen.path for seen in hub.requests if "/resolve/" in seen.path]
    assert files
    assert all(f"/resolve/{'a' * 40}/" in path for path in files)


@pytest.mark.parametrize("name", [f"{NAME}@v1", f"{NAME}@v1:Q4_K_M", f"{NAME}:q4_k_m@v1"])
def test_revision_is_pinned(puller: Puller, hub: HubStandIn, name: str) -> None:
    old = make_model(seed=2)
    hub.repos["org/M-GGUF"].revisions = {"v1": {"M-Q4_K_M.gguf": old}}
    model = puller.pull(name)
    assert puller.store.model_file(model).read_bytes() == old
    assert "@" not in str(model.name)
    with pytest.raises(PullFailed, match="org/M-GGUF has no revision 'v2'"):
        puller.pull(f"{NAME}@v2")


def test_revision_with_slashes_is_one_part_of_the_path(puller: Puller, hub: HubStandIn) -> None:
    hub.repos["org/M-GGUF"].revisions = {"refs/pr/1": {"M-Q4_K_M.gguf": DATA}}
    puller.pull(f"{NAME}@refs/pr/1")
    assert any(
        seen.path.startswith("/api/models/org/M-GGUF/revision/refs%2Fpr%2F1")
        for seen in hub.requests
    )


def test_unknown_tag_lists_what_there_is(puller: Puller) -> None:
    with pytest.raises(PullFailed, match="org/M-GGUF has no 'nope'; it has Q4_K_M, Q8_0"):
        puller.pull(f"{NAME}:nope")


def test_unknown_repository(puller: Puller, hub: HubStandIn) -> None:
    with pytest.raises(PullFailed, match=r"file does not exist: .* has no repository org/x"):
        puller.pull("hf.co/org/x")
    with pytest.raises(PullFailed, match=r"file does not exist.*your token has no access"):
        puller.pull("hf.co/org/x", hub_token="good")


def test_private_repository_needs_a_token(puller: Puller, hub: HubStandIn) -> None:
    hub.repos["org/M-GGUF"].is_private = True
    with pytest.raises(PullFailed, match="or it is private and it needs HF_TOKEN"):
        puller.pull(NAME)
    with pytest.raises(PullFailed, match="or it is private and your token has no access"):
        puller.pull(NAME, hub_token="bad")
    puller.pull(NAME, hub_token="good")


def test_gated_repository_says_what_to_do(puller: Puller, hub: HubStandIn) -> None:
    hub.repos["org/M-GGUF"].is_gated = True
    with pytest.raises(PullFailed, match=rf"is gated: accept its terms at {hub.url}/org/M-GGUF"):
        puller.pull(NAME)
    with pytest.raises(PullFailed, match="gated and your token has no access"):
        puller.pull(NAME, hub_token="bad")
    puller.pull(NAME, hub_token="good")


@pytest.mark.parametrize(
    ("status", "code", "message", "expected"),
    [
        (403, "GatedRepo", "", "is gated"),
        (403, "", "Access to this resource is disabled.", "is disabled"),
        (401, "", "", "file does not exist"),
        (404, "", "", "file does not exist"),
        (403, "", "go away", "status 403 go away"),
        (500, "", "", "status 500"),
        (429, "", "", "status 429"),
    ],
)
def test_refusals_are_one_clear_line(
    puller: Puller, hub: HubStandIn, status: int, code: str, message: str, expected: str
) -> None:
    def refuse(handler: Handler) -> bool:
        handler.fail(status, code, message)
        return True

    hub.on_hub = refuse
    with pytest.raises(PullFailed, match=expected) as caught:
        puller.pull(NAME)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"sha": 3}', b'{"id": "a", "siblings": [{}]}']
)
def test_damaged_answers_are_an_error(puller: Puller, hub: HubStandIn, body: bytes) -> None:
    hub.on_hub = lambda handler: handler.send(200, {}, body) or True  # type: ignore[func-returns-value]
    with pytest.raises(PullFailed):
        puller.pull(NAME)


@pytest.mark.parametrize(
    "lfs",
    [
        {"sha256": "../../x", "size": 3, "pointerSize": 1},
        {"sha256": "0" * 64, "size": -1, "pointerSize": 1},
        {"sha256": "0" * 64, "size": "9", "pointerSize": 1},
    ],
)
def test_hashes_and_sizes_are_checked_before_use(
    puller: Puller, hub: HubStandIn, lfs: dict[str, object]
) -> None:
    sibling = {"rfilename": "../../M-Q4_K_M.gguf", "size": 3, "blobId": "0", "lfs": lfs}
    body = json.dumps({"id": "org/M-GGUF", "sha": "a" * 40, "siblings": [sibling]}).encode()
    hub.on_hub = lambda handler: handler.send(200, {}, body) or True  # type: ignore[func-returns-value]
    with pytest.raises(PullFailed, match="no usable hash and size"):
        puller.pull(NAME)


def test_token_file_of_the_hubs_own_login_is_used(puller: Puller, hub: HubStandIn) -> None:
    from huggingface_hub import constants

    hub.repos["org/M-GGUF"].is_private = True
    path = Path(constants.HF_TOKEN_PATH)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("good\n")
    try:
        puller.pull(NAME)
    finally:
        path.unlink()


def test_no_hub_at_all(puller: Puller) -> None:
    with pytest.raises(PullFailed, match=r"no connection to http://127.0.0.1:9"):
        puller.pull(NAME, hub_endpoint="http://127.0.0.1:9")


def test_offline_mode_asks_nobody(puller: Puller, hub: HubStandIn) -> None:
    with pytest.raises(PullFailed, match=r"offline mode is on \(HF_HUB_OFFLINE\)"):
        puller.pull(NAME, hub_is_offline=True)
    assert hub.requests == []


def test_settings_come_from_the_hubs_own_variables() -> None:
    settings = load_settings(
        {"HF_ENDPOINT": "https://mirror.test/hub/", "HF_TOKEN": " t\n", "HF_HUB_OFFLINE": "yes"}
    )
    assert (settings.hub_endpoint, settings.hub_token) == ("https://mirror.test/hub", "t")
    assert settings.hub_is_offline
    assert load_settings({}).hub_endpoint == Settings().hub_endpoint == "https://huggingface.co"
    assert load_settings({"HUGGING_FACE_HUB_TOKEN": "u"}).hub_token == "u"


@pytest.mark.parametrize("name", ["hf.co/a--b/c..d", "hf.co/org/x.git"])
def test_names_that_no_repository_can_have(puller: Puller, hub: HubStandIn, name: str) -> None:
    with pytest.raises((PullFailed, BadRequest), match="name"):
        puller.pull(name)
    assert hub.requests == []


def test_renamed_repository_is_followed_and_told(puller: Puller, hub: HubStandIn) -> None:
    hub.repos["org/Old"] = Repo({}, renamed_to="org/M-GGUF")
    hub.repos["org/M-GGUF"].is_private = True
    puller.pull("hf.co/org/Old", hub_token="good")
    assert "org/Old is called org/M-GGUF by now" in puller.statuses


def test_split_model_is_fetched_whole_and_opened(puller: Puller, hub: HubStandIn) -> None:
    first, second = make_shards()
    hub.repos["org/S"] = Repo(
        {"q/s-Q8_0-00001-of-00002.gguf": first, "q/s-Q8_0-00002-of-00002.gguf": second}
    )
    model = puller.pull("hf.co/org/S")
    assert len(model.model_layers) == 2
    file = puller.store.model_file(model)
    assert file.name == "model-00001-of-00002.gguf"
    assert file.read_bytes() == first
    assert file.with_name("model-00002-of-00002.gguf").read_bytes() == second
    puller.store.remove(model.name)
    assert [p for p in puller.store.root.rglob("*") if not p.is_dir()] == []


def test_files_that_are_parts_by_name_only_are_refused(puller: Puller, hub: HubStandIn) -> None:
    names = [f"m-Q8_0-0000{n}-of-00002.gguf" for n in (1, 2)]
    hub.repos["org/S"] = Repo(dict(zip(names, (DATA, make_model(seed=1)))))
    with pytest.raises(BadFile, match="named as 2 parts, but the first one says 1"):
        puller.pull("hf.co/org/S")
    assert [p for p in puller.store.root.rglob("*") if not p.is_dir()] == []


def test_projector_is_left_out_with_a_note(puller: Puller, hub: HubStandIn) -> None:
    hub.repos["org/M-GGUF"].files["mmproj-F16.gguf"] = b"x"
    puller.pull(NAME)
    assert any("image projector is left out" in text for text in puller.statuses)


def test_template_system_and_params_go_with_the_model(puller: Puller, hub: HubStandIn) -> None:
    side = {"template": b"{{ .Prompt }}", "system": b"Be nice.", "params": b'{"temperature": 0.5}'}
    hub.repos["org/M-GGUF"].files.update(side)
    hub.repos["org/M-GGUF"].plain = frozenset(side)
    recipe = puller.store.recipe(puller.pull(NAME))
    assert (recipe.template, recipe.system) == ("{{ .Prompt }}", "Be nice.")
    assert recipe.parameters == {"temperature": 0.5}


@pytest.mark.parametrize("params", [b"{", b"3", b'["a"]', b"\xff"])
def test_damaged_params_are_refused(puller: Puller, hub: HubStandIn, params: bytes) -> None:
    hub.repos["org/M-GGUF"].files["params"] = params
    hub.repos["org/M-GGUF"].plain = frozenset({"params"})
    with pytest.raises(PullFailed, match="'params' is damaged"):
        puller.pull(NAME)


def test_small_file_without_sha256_is_compared_with_its_git_hash(
    puller: Puller, hub: HubStandIn
) -> None:
    hub.repos["org/P"] = Repo({"p.gguf": DATA}, plain=frozenset({"p.gguf"}))
    model = puller.pull("hf.co/org/P")
    assert puller.store.model_file(model).read_bytes() == DATA

    def other(handler: Handler) -> bool:
        if "/resolve/" in handler.path:
            handler.send(200, {}, b"GGUF other")
            return True
        return False

    hub.on_hub = other
    with pytest.raises(PullFailed, match=r"p\.gguf: digest mismatch"):
        puller.pull("hf.co/org/P")


def test_short_name_comes_through_the_catalogue(puller: Puller, hub: HubStandIn) -> None:
    file = "Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf"
    hub.repos["bartowski/Meta-Llama-3.1-8B-Instruct-GGUF"] = Repo({file: DATA})
    model = puller.pull("llama3.1:8b")
    assert str(model.name) == "llama3.1:8b"
    assert puller.store.find(ModelName.parse("llama3.1:8b")).digest == model.digest
    recipe = puller.store.recipe(model)
    assert "<|eot_id|>" in recipe.parameters["stop"]
    assert recipe.licenses == ["llama3.1"]


def test_catalogues_file_that_was_renamed_is_found_by_its_quant(
    puller: Puller, hub: HubStandIn
) -> None:
    hub.repos["bartowski/Meta-Llama-3.1-8B-Instruct-GGUF"] = Repo(
        {"new-Q4_K_M.gguf": DATA, "new-Q8_0.gguf": make_model(seed=1)}
    )
    puller.pull("llama3.1")
    assert any("using new-Q4_K_M.gguf" in text for text in puller.statuses)
    puller.pull("llama3.1:8b-instruct-q8_0")
    assert any("using new-Q8_0.gguf" in text for text in puller.statuses)
    with pytest.raises(PullFailed, match="has no 'q2_k'"):
        puller.pull("llama3.1:8b-instruct-q2_K")
