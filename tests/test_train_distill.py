"""What the target writes and stores: turns, drafts, processes and kills, packing, float8, recorded traffic."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from train_tools import CHAT, tokenizer

from selfspec.draft import Needs
from selfspec.errors import ConfigError, DataError
from selfspec.heads.medusa import Medusa, MedusaConfig
from selfspec.inference.patch import patch, unpatch
from selfspec.inference.record import Recorder
from selfspec.target import Target
from selfspec.train import distill as distill_module
from selfspec.train import rows as rows_module
from selfspec.train.data import TrainingRows, collate, to_verified
from selfspec.train.distill import DistillConfig, distill
from selfspec.train.features import restored, stored
from selfspec.train.packing import packed_features
from selfspec.train.shards import StoredText, load_shards
from selfspec.train.traffic import traffic_rows
from selfspec.train.write import Picking, write, write_drafted

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.selfspec_target("llama")


def chats(folder: Path, count: int = 6) -> str:
    path = folder / "chats.jsonl"
    lines = []
    for i in range(count):
        talk = [{"role": "user", "content": f"t{5 + i} t6 t7 t8"}, {"role": "assistant", "content": "t9 t9 t9"}]
        lines.append({"messages": [*talk, {"role": "user", "content": f"t{20 + i}"}]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def settings(source: str, **options: Any) -> DistillConfig:
    fixed = {
        "source": source,
        "split": "all",
        "length": 48,
        "max_tokens": 4000,
        "max_new_tokens": 5,
        "shard_tokens": 60,
    }
    return DistillConfig(**{"mode": "write", **fixed, **options})


def contents(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.glob("*.safetensors")}


# Turns


def test_each_turn_is_what_generate_answers_on_top_of_the_earlier_answers(target: Any, tmp_path: Path) -> None:
    """The judge writes each conversation with transformers' own `generate` and the template."""
    words = tokenizer(CHAT)
    distill(target, words, settings(chats(tmp_path)), tmp_path / "out", progress=False)
    wanted = []
    for i in range(6):
        talk: list[dict[str, str]] = []
        rows: list[tuple[list[int], list[bool]]] = []
        for asked in (f"t{5 + i} t6 t7 t8", f"t{20 + i}"):
            talk.append({"role": "user", "content": asked})
            prompt = words.apply_chat_template(talk, add_generation_prompt=True, return_dict=True)["input_ids"]
            whole = target.model.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False, eos_token_id=96)
            new = whole[0, len(prompt) :].tolist()
            learn = [False] * len(prompt)
            if rows and rows[-1][0] == prompt[: len(rows[-1][0])]:
                before = rows.pop()[1]
                learn = before + learn[len(before) :]
            rows.append((prompt + new, learn + [True] * len(new)))
            answer = words.decode([t for t in new if t != 96], skip_special_tokens=True)
            talk.append({"role": "assistant", "content": answer})
        wanted += rows
    text = load_shards(tmp_path / "out")
    found = [(text[i]["input_ids"].tolist(), text[i]["learn"].tolist()) for i in range(len(text))]
    assert sorted(found) == sorted(wanted)


def test_the_last_answer_alone_keeps_the_given_ones(target: Any, tmp_path: Path) -> None:
    words = tokenizer(CHAT)
    distill(target, words, settings(chats(tmp_path), answers="last"), tmp_path / "out", progress=False)
    text = load_shards(tmp_path / "out")
    assert len(text) == 6
    for i in range(6):
        row = text[i]
        first = row["learn"].tolist().index(True)
        assert words.decode(row["input_ids"][:first].tolist()).count("bot t9 t9 t9") == 1


def test_what_is_cut_is_counted(target: Any, tmp_path: Path) -> None:
    words = tokenizer(CHAT)
    manifest = distill(target, words, settings(chats(tmp_path), length=14), tmp_path / "out", progress=False)
    assert manifest["cut_answers"] >= 6 and manifest["unanswered"] == 6
    long = [{"role": "user", "content": "t5"}, {"role": "assistant", "content": "t7 " * 30}]
    (tmp_path / "long.jsonl").write_text(json.dumps({"messages": long}) + "\n")
    config = settings(str(tmp_path / "long.jsonl"), mode="label", length=8)
    manifest = distill(target, words, config, tmp_path / "long", progress=False)
    assert (manifest["cut_rows"], manifest["cut_tokens"], manifest["tokens"]) == (1, 26, 8)


# Drafts


@pytest.mark.parametrize("draft", ["lookup", "layer-skip"])
def test_greedy_text_written_with_a_draft_is_the_same(target: Any, tmp_path: Path, draft: str) -> None:
    words, source = tokenizer(CHAT), chats(tmp_path)
    distill(target, words, settings(source), tmp_path / "plain", progress=False)
    distill(target, words, settings(source, draft=draft), tmp_path / "drafted", progress=False)
    assert contents(tmp_path / "plain") == contents(tmp_path / "drafted")


def test_sampled_rows_written_with_a_draft_depend_on_their_seed_alone(target: Any) -> None:
    from selfspec.resolve import resolve_draft

    draft, picking = resolve_draft("lookup", target), Picking(1.0, 20, 0.9)
    prompts = [[1, 5, 6], [1, 9, 10, 11, 12], [1, 30]]
    together = write_drafted(target, draft, prompts, 8, picking, [7, 8, 9])
    alone = [write_drafted(target, draft, [p], 8, picking, [s])[0] for p, s in zip(prompts, (7, 8, 9), strict=True)]
    assert together == alone and [len(row) for row in together] == [8, 8, 8]
    assert write(target, prompts, 8, Picking(), [0] * 3) == write_drafted(target, draft, prompts, 8, Picking(), [0] * 3)


# Finished folders, processes, kills


def test_a_finished_folder_is_not_tokenised_again(target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, source = tokenizer(CHAT), chats(tmp_path)
    first = distill(target, words, settings(source), tmp_path / "out", progress=False)
    monkeypatch.setattr(distill_module, "plan_rows", lambda *args: pytest.fail("tokenised again"))
    assert distill(target, words, settings(source), tmp_path / "out", progress=False) == first
    monkeypatch.setattr(distill_module, "plan_rows", rows_module.plan_rows)
    chats(tmp_path, 5)
    with pytest.raises(ConfigError, match="input is"):
        distill(target, words, settings(source), tmp_path / "out", progress=False)


def worker(source: str, out: str) -> None:
    """One process of a shared or killed run."""
    config = settings(source, hidden=True, layers=[1], predictions=True, top_logits=3, feature_dtype="float8")
    distill(tiny.selfspec_target("llama"), tokenizer(CHAT), config, out, progress=False)


def start(source: str, out: Path) -> subprocess.Popen[bytes]:
    paths = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, __file__, source, str(out)], env=paths)


@pytest.mark.nightly
def test_two_processes_share_the_shards_of_one_folder(tmp_path: Path) -> None:
    source = chats(tmp_path, 24)
    worker(source, str(tmp_path / "alone"))
    both = [start(source, tmp_path / "shared") for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    assert contents(tmp_path / "shared") == contents(tmp_path / "alone")


@pytest.mark.nightly
def test_ten_kills_at_random_moments_lose_and_double_nothing(tmp_path: Path) -> None:
    source, chance, killed = chats(tmp_path, 400), random.Random(0), 0
    worker(source, str(tmp_path / "whole"))
    for _ in range(200):
        process = start(source, tmp_path / "killed")
        while not (tmp_path / "killed").is_dir() and process.poll() is None:
            time.sleep(0.05)
        try:
            if killed < 10:
                process.wait(chance.uniform(0.2, 1.2))
            assert process.wait(240) == 0
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            killed += process.wait() == -signal.SIGKILL
    assert killed >= 5
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


# Features


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mistral", "gpt_neox"])
def test_packed_rows_have_the_features_of_rows_alone(name: str) -> None:
    """Rows past the window of eight, and a row of one token between them."""
    door = tiny.selfspec_target(name)
    rows = [tiny.text(1, length, seed=length)[0].tolist() for length in (21, 1, 5, 13)]
    needs = Needs(True, (0, 1))
    for row, packed in zip(rows, packed_features(door, rows, needs), strict=True):
        alone = door.features(torch.tensor([row]), None, needs)
        pairs = zip((packed.hidden, *packed.layers), (alone.hidden, *alone.layers), strict=True)
        assert all(torch.allclose(a, b, atol=2e-5, rtol=1e-4) for a, b in pairs)


def test_packing_changes_nothing_online_or_on_disk(target: Any, tmp_path: Path) -> None:
    words, source = tokenizer(CHAT), chats(tmp_path)
    needs = Needs(True, (1,))
    for pack in (False, True):
        config = settings(source, mode="label", hidden=True, layers=[1], pack=pack)
        distill(target, words, config, tmp_path / str(pack), progress=False)
    plain, packed = (load_shards(tmp_path / str(pack)) for pack in (False, True))
    rows = TrainingRows([(plain, 1.0)], Needs(), tiny.HIDDEN)
    batch = collate([rows[i] for i in range(4)])
    one, other = (to_verified(batch, needs, target, pack) for pack in (False, True))
    real = torch.arange(one.tokens.shape[1]) < one.counts[:, None]
    for a, b in zip((one.hidden, *one.layers), (other.hidden, *other.layers), strict=True):
        assert torch.allclose(a[real], b[real], atol=2e-5, rtol=1e-4)
    for i in range(len(plain)):
        for name in ("hidden", "layer_1"):
            assert torch.allclose(plain[i][name].float(), packed[i][name].float(), rtol=1e-2, atol=1e-2)


def test_packing_is_refused_by_name_where_rows_cannot_be_kept_apart(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, BloomConfig

    config = BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)
    door = Target(AutoModelForCausalLM.from_config(config).eval())
    with pytest.raises(ConfigError, match=r"packed.*ALiBi"):
        distill(door, tokenizer(CHAT), settings(chats(tmp_path), mode="label", hidden=True, pack=True), tmp_path / "o")


def test_float8_is_off_by_at_most_a_sixteenth_or_the_smallest_step() -> None:
    values = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 50).unsqueeze(1)
    values[7] = 0
    kept = stored("x", values, "float8")
    assert kept["x"].element_size() == 1
    back = restored(kept["x"], kept["x.scale"]).float()
    allowed = values.abs() / 16 + kept["x.scale"].unsqueeze(1) / 1024 + values.abs() / 256
    assert ((back - values).abs() <= allowed).all()
    assert torch.equal(restored(stored("x", values, "bfloat16")["x"], None), values.bfloat16())


def test_stored_logits_are_the_targets_log_probabilities(target: Any, tmp_path: Path) -> None:
    config = settings(chats(tmp_path), mode="label", top_logits=4, predictions=True)
    distill(target, tokenizer(CHAT), config, tmp_path / "out", progress=False)
    text = load_shards(tmp_path / "out")
    row = text[2]
    truth = target.model(row["input_ids"].long()[None]).logits[0].log_softmax(-1).topk(4)
    torch.testing.assert_close(row["top_logits"], truth.values)
    torch.testing.assert_close(row["top_rest"], (1 - truth.values.double().exp().sum(-1)).log().float())
    assert torch.equal(row["top_ids"][:, 0], row["predictions"])


@pytest.mark.parametrize("loss", ["forward_kl", "reverse_kl", "total_variation", "lk_alpha"])
def test_heads_learn_from_stored_logits(target: Any, tmp_path: Path, loss: str) -> None:
    """From disk to the loss: all tokens stored, against the target's output head asked as training goes on."""
    head = Medusa.from_target(MedusaConfig(num_heads=2, loss=loss), target, torch.Generator().manual_seed(0))
    given, places = [], 0
    for name, known in (("asked", 0), ("stored", tiny.VOCAB)):
        config = settings(chats(tmp_path), mode="label", top_logits=known)
        distill(target, tokenizer(CHAT), config, tmp_path / name, progress=False)
        rows = TrainingRows([(load_shards(tmp_path / name), 1.0)], head.needs, target.hidden_size)
        batch = collate([rows[place] for place in range(len(rows))])
        verified = to_verified(batch, head.needs, target)
        assert (verified.top is not None) == bool(known)
        given.append(head.loss(verified, batch["labels"] >= 0))
        places = int(given[-1].seen[0])
    assert places > 10
    torch.testing.assert_close(given[0].loss, given[1].loss, rtol=1e-5, atol=1e-5)
    assert torch.equal(given[0].correct, given[1].correct)


def test_sources_that_store_unlike_logits_are_refused(target: Any, tmp_path: Path) -> None:
    parts = []
    for known in (0, 2):
        config = settings(chats(tmp_path), mode="label", top_logits=known)
        distill(target, tokenizer(CHAT), config, tmp_path / str(known), progress=False)
        parts.append((load_shards(tmp_path / str(known)), 1.0))
    with pytest.raises(DataError, match="set one top_logits for all"):
        TrainingRows(parts, Needs(), target.hidden_size)
    old = StoredText(tmp_path / "2", without=["top_rest"])
    with pytest.raises(DataError, match="without top_rest"):
        TrainingRows([(old, 1.0)], Needs(), target.hidden_size)


@pytest.mark.parametrize("fault", ["cut", "lengths", "size", "text", "missing shard"])
def test_damaged_shards_are_refused_by_name(target: Any, tmp_path: Path, fault: str) -> None:
    config = settings(chats(tmp_path), mode="label", hidden=True)
    distill(target, tokenizer(CHAT), config, tmp_path / "out", progress=False)
    path = tmp_path / "out" / "shard-00000.safetensors"
    if fault == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif fault == "text":
        path.write_bytes((1 << 60).to_bytes(8, "little") + b"{}")  # a header that claims an exabyte
    elif fault == "missing shard":
        path.unlink()
    else:
        tensors = load_file(path)
        if fault == "lengths":
            tensors["lengths"] += 1
        else:
            tensors["hidden"] = torch.zeros(len(tensors["input_ids"]), 5, dtype=torch.bfloat16)
        save_file(tensors, path)
    with pytest.raises(DataError, match="out"):
        TrainingRows([(load_shards(tmp_path / "out"), 1.0)], Needs(hidden=True), tiny.HIDDEN)


# Traffic


def test_recorded_calls_are_what_generate_returned(tmp_path: Path) -> None:
    model = tiny.model("llama")
    patch(model, "lookup", record=tmp_path / "traffic")
    ids = torch.tensor([[0, 0, 5, 6], [1, 7, 8, 9]])
    out = model.generate(ids, attention_mask=(ids != 0).long(), max_new_tokens=6, do_sample=False)
    alone = model.generate(ids[1:], attention_mask=torch.ones(1, 4), max_new_tokens=6, eos_token_id=int(out[1, 6]))
    unpatch(model)
    (path,) = (tmp_path / "traffic").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert records == [
        {"ids": out[0, 2:].tolist(), "prompt": 2},
        {"ids": out[1].tolist(), "prompt": 4},
        {"ids": alone[0].tolist(), "prompt": 4},
    ]


def test_nothing_is_recorded_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = patch(tiny.model("llama"), "lookup")
    model.generate(torch.tensor([[1, 5]]), max_new_tokens=3)
    assert model.speculation.recorder is None and not list(tmp_path.iterdir())


def test_recording_stops_at_its_limit_and_readers_pass_over_a_cut_line(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, most=40)
    row = torch.tensor([[1, 5, 6, 7]])
    recorder.add(row, 2, None, [2])
    with pytest.warns(UserWarning, match="recording has stopped"):
        recorder.add(row + 1, 2, None, [2])
        recorder.add(row + 2, 2, None, [2])
    (path,) = tmp_path.iterdir()
    with path.open("ab") as file:
        file.write(b'{"ids":[1,2')
    assert list(traffic_rows(tmp_path)) == [([1, 5, 6, 7], 2)]
    path.write_text('{"ids":[1,2],"prompt":9}\n')
    with pytest.raises(DataError, match=r"traffic-.*:1"):
        list(traffic_rows(tmp_path))


def test_traffic_is_learned_behind_its_prompts(target: Any, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "traffic")
    for i in range(9):
        recorder.add(torch.tensor([[1, *range(10 + i, 22 + i)]]), 5, None, [8])
    config = settings(f"traffic:{tmp_path / 'traffic'}", mode="label")
    distill(target, tokenizer(), config, tmp_path / "out", progress=False)
    text = load_shards(tmp_path / "out")
    assert len(text) == 9
    assert all(text[i]["learn"].tolist() == [False] * 5 + [True] * 8 for i in range(9))


def test_float8_and_bfloat16_are_different_datasets(target: Any, tmp_path: Path) -> None:
    config = settings(chats(tmp_path), mode="label", hidden=True)
    distill(target, tokenizer(CHAT), config, tmp_path / "out", progress=False)
    with pytest.raises(ConfigError, match="feature_dtype is 'bfloat16' there and 'float8' now"):
        distill(target, tokenizer(CHAT), dataclasses.replace(config, feature_dtype="float8"), tmp_path / "out")


if __name__ == "__main__":
    worker(sys.argv[1], sys.argv[2])
