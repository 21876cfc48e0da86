"""Publishing: what is staged, what stays at home, and the way over a real HTTP server and back."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hub_server
import pytest
import tiny_folder
import torch
from hub_server import Hub
from transformers import AutoModelForCausalLM

import selfspec
from selfspec import hub, registry
from selfspec.checkpoint import CONFIG, WEIGHTS, load_head, save_head
from selfspec.errors import CheckpointError, ConfigError
from selfspec.models import load_target
from selfspec.provenance import HIDDEN, redact, redact_command, redacted
from selfspec.target import Target

BASE = "user/base"
REPO = "user/heads"
SECRET = "hf_" + "A1b2C3d4" * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of `user/base`, as saved."""
    target = Target(load_target(model, torch.float32)[0])
    method = registry.method("medusa")
    head = method.from_target(method.config_class(base_model=BASE), target, torch.Generator().manual_seed(0))
    folder = save_head(head, tmp_path_factory.mktemp("heads") / "heads")
    target.release()
    return folder


@pytest.fixture
def heads(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "heads"))


@pytest.fixture
def server() -> Iterator[Hub]:
    with hub_server.serving() as running:
        yield running


def client(server: Hub, home: Path, program: str, *arguments: object, token: str | None = None) -> Any:
    """The JSON that a program prints last in a process of its own, which knows this server only."""
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=server.environment(home, token),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def command(server: Hub, home: Path, *arguments: object, token: str | None = None, **extra: str) -> tuple[int, str]:
    """Exit status and all output of the command line in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "selfspec", *map(str, arguments)],
        env=server.environment(home, token) | extra,
        capture_output=True,
        text=True,
        timeout=500,
    )
    return done.returncode, done.stdout + done.stderr


# Staging


def test_only_what_belongs_to_the_heads_goes_up_and_secrets_stay(heads: Path) -> None:
    recipe = {"optimisation": {"seed": 3}, "data": [{"source": "stdlib", "seed": 4}], "hub_token": "plain-secret-9"}
    sizes = {"rows": 1, "tokens": 20, "learned": 19, "input": "ab" * 32}
    record = {"argv": ["selfspec", "train", "r", f"token={SECRET}"], "recipe": recipe, "device": "cpu", "steps": 2}
    record |= {"data": {"label-train-0": sizes}, "versions": {"torch": "1"}, "threads": 1}
    (heads / "training.json").write_text(json.dumps(record))
    (heads / "notes.txt").write_text(SECRET)
    (heads / "run.json").write_text("{}")
    (heads / "data").mkdir()
    with hub.staged(heads, REPO) as work:
        names = {path.relative_to(work).as_posix() for path in work.rglob("*") if path.is_file()}
        text = "".join((work / name).read_text() for name in names if name != WEIGHTS)
        made = json.loads((work / "provenance.json").read_text())
        assert (work / WEIGHTS).read_bytes() == (heads / WEIGHTS).read_bytes()
    code = {"custom_generate/generate.py", "custom_generate/requirements.txt"}
    assert names == {CONFIG, WEIGHTS, "training.json", "provenance.json", "card.json", "README.md", *code}
    assert SECRET not in text and "plain-secret-9" not in text and HIDDEN in text
    assert made["seeds"] == {"training": 3, "data.0": 4}
    assert made["data"]["label-train-0"]["input"] == "ab" * 32 and made["commit"] is None


def test_staging_twice_gives_the_same_bytes(heads: Path) -> None:
    found = []
    for _ in range(2):
        plans: list[hub.Plan] = []
        assert hub.push(heads, REPO, dry_run=True, confirm=lambda plan, plans=plans: plans.append(plan) or True) is None
        found.append(plans[0].files)
    assert found[0] == found[1] and len(found[0]) == 6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f / WEIGHTS).unlink(), "missing"),
        (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-40]), "damaged or cut off"),
        (lambda f: _set(f, base_model="/home/me/model"), "nobody else will find it"),
        (lambda f: _set(f, base_model="./model"), "nobody else will find it"),
        (lambda f: (f / "card.json").write_text('{"licence": "mit"}'), "unknown keys"),
        (lambda f: (f / "bench.json").write_text("{}"), "lacks"),
        (lambda f: (f / "README.md").write_text("# Heads\n\nThree times: 3.00x, always."), "is in no file"),
    ],
)
def test_folders_that_cannot_be_published_are_refused(heads: Path, change: Any, words: str) -> None:
    change(heads)
    with pytest.raises(CheckpointError, match=words), hub.staged(heads, REPO):
        pass


def _set(folder: Path, **values: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | values))


@pytest.mark.parametrize("repo", ["heads", "a/b/c", "user/he ads", "../heads"])
def test_names_that_are_no_repository_are_refused(heads: Path, repo: str) -> None:
    with pytest.raises(ConfigError, match="OWNER/NAME"):
        hub.push(heads, repo, dry_run=True)


# Secrets


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {SECRET}",
        f"https://user:{SECRET}@huggingface.co/x",
        f"https://x?token={SECRET}",
        f"api_key={SECRET}",
        f"said {SECRET}.",
        "Bearer abc.def-ghi",
        "https://user:hunter2@host/x",
        "password=hunter2",
    ],
)
def test_secrets_of_known_forms_are_hidden(text: str) -> None:
    shown = redact(text, {})
    assert HIDDEN in shown
    assert not any(secret in shown for secret in (SECRET, "abc.def", "hunter2"))


def test_secrets_of_the_environment_and_the_home_folder_are_hidden() -> None:
    environment = {"MY_API_KEY": "not-of-any-form", "HOME": "/home/ada", "PATH": "/usr/bin"}
    assert redact("/home/ada/x not-of-any-form /usr/bin /home/adam", environment) == f"~/x {HIDDEN} /usr/bin /home/adam"


def test_what_follows_the_name_of_a_secret_is_hidden_and_counts_of_tokens_are_not() -> None:
    given = ["selfspec", "x", "--token", "opaque", "--max-new-tokens", "8", "--api-key=opaque", "eos_token=</s>"]
    assert redact_command(given)[2:] == ["--token", HIDDEN, "--max-new-tokens", "8", f"--api-key={HIDDEN}", given[-1]]
    values = {"hub": {"token": "opaque", "max_tokens": "9", "tokens": 5, "pad_token": "<pad>"}, "list": ["a", SECRET]}
    shown = {"token": HIDDEN, "max_tokens": "9", "tokens": 5, "pad_token": "<pad>"}
    assert redacted(values) == {"hub": shown, "list": ["a", HIDDEN]}


# Habits of Hugging Face


def test_heads_have_the_habits_of_hugging_face(model: Path, trained: Path, tmp_path: Path) -> None:
    target_model = load_target(model, torch.float32)[0]
    method = registry.method("medusa")
    head = method.from_pretrained(trained, target_model)
    again = method.from_pretrained(head.save_pretrained(tmp_path / "again"), head.target)
    for name, value in load_head(trained, head.target).state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    with pytest.raises(CheckpointError, match="not those of"):
        registry.method("eagle").from_pretrained(trained, head.target)
    shown: list[hub.Plan] = []
    head.push_to_hub(REPO, dry_run=True, confirm=lambda plan: shown.append(plan) or True)
    assert {CONFIG, WEIGHTS, "README.md"} <= {file.name for file in shown[0].files}
    head.target.release()


def test_custom_generate_from_a_folder_writes_the_text_of_plain_decoding(
    model: Path, heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    hub.write_code(heads, REPO)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.arange(5, 17)[None]
    common = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    plain = base.generate(ids, **common)
    found = base.generate(ids, custom_generate=str(heads), heads=str(heads), trust_remote_code=True, **common)
    assert found.tolist() == plain.tolist()
    (kept,) = base.selfspec_heads.values()
    assert kept.speculation.report()["rounds"] > 0
    assert "generate" not in vars(base) and not hasattr(base, "speculation")
    selfspec.unpatch(base)
    assert not hasattr(base, "selfspec_heads")


# Over HTTP


JOURNEY = """
import json, sys, torch
from pathlib import Path
from huggingface_hub import HfApi
import selfspec
from selfspec import hub
from selfspec.card_sources import Facts
from selfspec.checkpoint import heads_folder, load_head
from selfspec.errors import SelfspecError
from selfspec.inference.loading import load

base, heads = sys.argv[1:]
api = HfApi(token="hf_readwrite")
api.create_repo("user/base", private=True)
api.upload_folder(repo_id="user/base", folder_path=base)

def outcome(call):
    try:
        return call()
    except SelfspecError as error:
        return f"{type(error).__name__}: {error}"

def push(token="hf_readwrite", **options):
    return outcome(lambda: hub.push(heads, "user/heads", token=token, **options))

found = {"wrong": push("hf_wrong"), "reader": push("hf_readonly"), "cut": push(), "not yet": push()}
found["before"] = api.list_repo_files("user/heads")
found |= {"again": push(), "same": push()}
found["public"] = outcome(lambda: hub.push(heads, "user/open", token="hf_readwrite", private=False))
found["not private"] = outcome(lambda: hub.push(heads, "user/open", token="hf_readwrite"))
first = api.repo_info("user/heads").sha
found["branch"] = push(revision="v2", facts=Facts(license="mit"))
found["without"] = outcome(lambda: str(heads_folder("user/heads")))
found["no such"] = outcome(lambda: str(heads_folder("user/heads", "v9", "hf_readonly")))
for revision in ("main", "v2", first):
    folder = heads_folder("user/heads", revision, "hf_readonly")
    found["files " + revision.replace(first, "first")] = sorted(path.name for path in folder.iterdir())
model, tokenizer = load("user/heads", revision="v2", token="hf_readonly", dtype="float32")
ids = torch.arange(5, 17)[None]
call = dict(max_new_tokens=10, do_sample=False, attention_mask=torch.ones_like(ids))
drafted = model.generate(ids, **call).tolist()
found["rounds"] = model.speculation.report()["rounds"]
selfspec.unpatch(model)
found["equal"] = drafted == model.generate(ids, **call).tolist()
print(json.dumps(found))
"""


def test_heads_travel_over_the_hub_and_back(server: Hub, model: Path, heads: Path, tmp_path: Path) -> None:
    """One client process for all of it: starting one costs more than the rest."""
    server.refuse_uploads, server.refuse_commits = {2}, {2}  # the first of each is the base model's
    found = client(server, tmp_path / "home", JOURNEY, model, heads)
    files = server.files(REPO)
    assert "HubError" in found["wrong"] and "hf auth login" in found["wrong"] and "hf_wrong" not in found["wrong"]
    assert "HubError" in found["reader"]
    assert "call it again" in found["cut"] and "call it again" in found["not yet"]
    assert found["before"] == [], "half a push is no commit"
    assert server.uploads.count(len(files[WEIGHTS])) == 1, "what arrived is not sent again"
    assert found["again"] == found["same"], "an unchanged folder makes no commit"
    assert files[WEIGHTS] == (heads / WEIGHTS).read_bytes()
    assert server.repositories[REPO].private and not server.repositories["user/open"].private
    assert "public" in found["not private"] and "ConfigError" in found["not private"]
    assert "license: mit" in server.files(REPO, "v2")["README.md"].decode()
    assert "license:" not in files["README.md"].decode()
    assert "CheckpointError" in found["without"] and "CheckpointError" in found["no such"]
    assert found["files main"] == found["files v2"] == found["files first"] == [CONFIG, WEIGHTS]
    assert found["equal"] and found["rounds"] > 0


@pytest.mark.nightly
def test_a_push_that_was_killed_goes_on(server: Hub, heads: Path, tmp_path: Path) -> None:
    server.go_on.clear()
    words = [sys.executable, "-m", "selfspec", "push", str(heads), REPO, "--yes"]
    killed = subprocess.Popen(words, env=server.environment(tmp_path / "home", "hf_readwrite"))
    assert server.arrived.wait(300)
    killed.kill()
    killed.wait()
    server.go_on.set()
    assert server.files(REPO) == {}
    status, said = command(server, tmp_path / "home", "push", heads, REPO, "--yes", token="hf_readwrite")
    assert status == 0, said
    assert server.files(REPO)[WEIGHTS] == (heads / WEIGHTS).read_bytes()


CUSTOM = """
import json, sys, torch
from transformers import AutoModelForCausalLM
base, repo = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
ids = torch.arange(5, 17)[None]
call = dict(max_new_tokens=10, do_sample=False, attention_mask=torch.ones_like(ids))
drafted = model.generate(ids, custom_generate=repo, trust_remote_code=True, **call).tolist()
(kept,) = model.selfspec_heads.values()
plain = model.generate(ids, **call).tolist()
try:
    model.generate(ids, custom_generate=repo, trust_remote_code=False, **call)
    refused = False
except ValueError:
    refused = True
print(json.dumps([drafted == plain, kept.speculation.report()["rounds"], list(model.selfspec_heads)[0][1], refused]))
"""


@pytest.mark.nightly
def test_clean_processes_push_certify_and_generate(server: Hub, model: Path, heads: Path, tmp_path: Path) -> None:
    """Every step in a process of its own, with a cache of its own where a stranger would have one."""
    mine, stranger, prompts = tmp_path / "mine", tmp_path / "stranger", tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def a stranger writes"}\n{"prompt": "import this and that"}\n')
    upload = "import sys; from huggingface_hub import HfApi; a = HfApi(); a.create_repo('user/base')\n"
    upload += "a.upload_folder(repo_id='user/base', folder_path=sys.argv[1]); print('1')"
    client(server, mine, upload, model, token="hf_readwrite")
    quick = ["--quick", "--dtype", "float32", "--prompts", prompts, "--max-new-tokens", "8"]
    written = heads / "certificate.json"
    status, said = command(server, mine, "certify", BASE, heads, *quick, "--json", written)
    assert status == 0, said
    shown = command(server, mine, "push", heads, REPO, "--dry-run")
    assert shown[0] == 0 and "certificate.json" in shown[1] and REPO not in server.repositories
    status, said = command(server, mine, "push", heads, REPO, "--yes", token="hf_wrong")
    assert status == 1 and "hf_wrong" not in said
    status, said = command(server, mine, "push", heads, REPO, "--public", "--yes", token="hf_readwrite")
    assert status == 0, said

    status, said = command(server, stranger, "certify", BASE, REPO, *quick, "--json", tmp_path / "again.json")
    assert status == 0 and "certified" in said, said
    assert "certificate.json" not in server.fetched, "only what is needed is fetched"
    checked = tmp_path / "published.json"
    checked.write_bytes(server.files(REPO)["certificate.json"])
    status, said = command(server, stranger, "certify", BASE, REPO, "--check", checked, "--dtype", "float32")
    assert status == 0, said
    said = command(server, stranger, "info", REPO, HF_HUB_OFFLINE="1")[1]
    assert "medusa" in said, said
    equal, rounds, revision, refused = client(server, stranger, CUSTOM, model, REPO)
    assert equal and rounds > 0 and refused
    assert revision == server.repositories[REPO].branches["main"], "heads of the commit that the code came from"
