"""Reading input, cutting rows, the sharded dataset, the two ways to distil, batches. On tiny random targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import torch
from train_tools import CHAT, TAGGED_CHAT, tokenizer

from selfspec.documents import Document
from selfspec.draft import Needs
from selfspec.errors import ConfigError, DataError
from selfspec.target import Target
from selfspec.train import answer as answer_module
from selfspec.train import distill as distill_module
from selfspec.train.chat import ChatFormat
from selfspec.train.corpus import in_split, stdlib_files, stdlib_snippets, stdlib_sources
from selfspec.train.data import IGNORED, Fillers, TokenBatches, TrainingRows, collate, to_verified
from selfspec.train.distill import DistillConfig, distill
from selfspec.train.prompts import encode_prompt, encode_text, prefix_ids, read_documents
from selfspec.train.shards import StoredText, load_counts, load_shards
from selfspec.train.steps import Steps
from selfspec.train.write import Picking, pick, write

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.selfspec_target("llama")


def lists(text: StoredText) -> list[dict[str, list[Any]]]:
    return [{name: values.tolist() for name, values in text[place].items()} for place in range(len(text))]


def ids_of(text: StoredText) -> list[list[int]]:
    return [row["input_ids"] for row in lists(text)]


@pytest.fixture
def text_file(tmp_path: Path) -> str:
    path = tmp_path / "text.jsonl"
    lines = [" ".join(f"t{2 + (7 * i + k * k) % 90}" for k in range(20 + 5 * i)) for i in range(8)]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return str(path)


# Input


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{not json", "not valid JSON"),
        ("[1]", "wanted an object"),
        ('{"other": 1}', "exactly one of"),
        ('{"text": "a", "prompt": "b"}', "exactly one of"),
        ('{"prompt": ""}', "not empty"),
        ('{"turns": []}', "list that is not empty"),
        ('{"messages": [{"role": "user"}]}', "`role` and `content`"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, part: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line + "\n")
    with pytest.raises(DataError, match=part) as error:
        list(read_documents(str(path)))
    assert f"{path}:3" in str(error.value)


def test_missing_and_empty_sources(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no files"):
        list(read_documents(str(tmp_path / "nothing")))
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no records"):
        list(read_documents(str(tmp_path / "a.jsonl")))


def test_folders_globs_and_other_encodings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.py").write_text("x = 1\n")
    (tmp_path / "sub" / "a.py").write_text("y = 2\n")
    (tmp_path / "latin.txt").write_bytes(b"\xe9t\xe9")
    (tmp_path / ".hidden").write_text("no")
    assert [d.text for d in read_documents(str(tmp_path))] == ["x = 1\n", "y = 2\n"]
    assert "1 files are not UTF-8" in caplog.text
    assert [d.text for d in read_documents(str(tmp_path / "**" / "*.py"))] == ["x = 1\n", "y = 2\n"]
    with pytest.raises(DataError, match="not UTF-8"):
        list(read_documents(str(tmp_path / "latin.txt")))


def test_turns_need_a_template(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"turns": ["t5 t6", "t7"]}\n')
    (first,), (second,) = (list(read_documents(str(path), turn=turn)) for turn in (0, 1))
    with pytest.raises(DataError, match="no chat template"):
        encode_prompt(first, ChatFormat(tokenizer()))
    assert tokenizer().decode(encode_prompt(first, ChatFormat(tokenizer(CHAT)))) == "<bos> user t5 t6 bot"
    assert tokenizer().decode(encode_prompt(second, ChatFormat(tokenizer(CHAT)))) == "<bos> user t7 bot"
    with pytest.raises(DataError, match="place 2"):
        list(read_documents(str(path), turn=2))


def conversation(*turns: str) -> Document:
    roles = ("user", "assistant")
    return Document(
        "in:1", "messages", messages=tuple({"role": roles[i % 2], "content": t} for i, t in enumerate(turns))
    )


def test_answer_mask_equals_the_tagged_one() -> None:
    document = conversation("t5 t6", "t7", "t8", "t9 t10 t11")
    tagged = tokenizer(TAGGED_CHAT).apply_chat_template(
        list(document.messages), return_assistant_tokens_mask=True, return_dict=True
    )
    wanted = [bool(flag) for flag in tagged["assistant_masks"]]
    assert any(wanted) and not all(wanted)
    for template in (CHAT, TAGGED_CHAT):
        (encoded,) = encode_text(document, ChatFormat(tokenizer(template)))
        assert encoded.ids == tagged["input_ids"]
        assert encoded.learn == wanted


def test_conversation_without_answer() -> None:
    with pytest.raises(DataError, match="no assistant message"):
        encode_text(conversation("t5"), ChatFormat(tokenizer(CHAT)))
    with pytest.raises(DataError, match="is a prompt"):
        encode_text(Document("in:1", "prompt", "t5"), ChatFormat(tokenizer()))


def test_prefix_is_the_beginning_token() -> None:
    assert prefix_ids(tokenizer()) == [1]


# The standard library


def test_stdlib_is_split_by_module() -> None:
    train, held_out = ({name for name, _ in stdlib_sources(split)} for split in ("train", "held-out"))
    tops = [{name.split("/")[0] for name in names} for names in (train, held_out)]
    assert train and held_out and not tops[0] & tops[1]
    assert len(train) > 4 * len(held_out)
    names = [name for name, _ in stdlib_files()]
    assert names == sorted(names) and not any("/test/" in name or "site-packages" in name for name in names)


def test_split_is_stable() -> None:
    held_out = [i for i in range(40) if in_split(f"module{i}", "held-out")]
    assert held_out == [0, 15, 28, 31, 32, 37]
    with pytest.raises(ConfigError, match="'test' is unknown"):
        in_split("a", "test")


def test_snippets_end_inside_a_block() -> None:
    words = tokenizer()
    snippets = stdlib_snippets("held-out", 5, 3, words, 20, 60)
    assert snippets == stdlib_snippets("held-out", 5, 3, words, 20, 60)
    assert snippets != stdlib_snippets("held-out", 5, 4, words, 20, 60)
    sources = dict(stdlib_sources("held-out"))
    for snippet in snippets:
        assert 20 <= snippet.tokens <= 60 and snippet.text.endswith("\n") and snippet.text.strip()
        assert snippet.text in sources[snippet.name.split(":")[0]]
    assert len({snippet.name.split(":")[0] for snippet in snippets}) == 5


# Labelling


def label(**options: Any) -> DistillConfig:
    return DistillConfig(
        **{"mode": "label", "split": "all", "length": 16, "max_tokens": 200, "shard_tokens": 60, **options}
    )


def test_label_stores_what_the_target_thinks(target: Any, text_file: str, tmp_path: Path) -> None:
    config = label(source=text_file, predictions=True, hidden=True, layers=[1])
    manifest = distill(target, tokenizer(), config, tmp_path / "out", progress=False)
    data = load_shards(tmp_path / "out")
    assert manifest["tokens"] == sum(map(len, ids_of(data))) <= 200
    assert manifest["complete"] and len(list((tmp_path / "out").glob("shard-*.safetensors"))) > 2
    rows = TrainingRows([(data, 1.0)], Needs(True, (1,)), tiny.HIDDEN)
    for place in range(len(rows)):
        ids = data[place]["input_ids"].long()
        assert len(ids) <= 16 and ids[0] == 1 and data[place]["learn"].tolist() == [False] + [True] * (len(ids) - 1)
        logits = target.model(ids[None]).logits[0]
        assert data[place]["predictions"].long().equal(logits.argmax(-1))
        truth = target.features(ids[None], None, Needs(True, (1,)))
        assert torch.allclose(rows[place]["hidden"].float(), truth.hidden[0], rtol=1e-2, atol=1e-2)
        assert torch.allclose(rows[place]["layer_1"].float(), truth.layers[0][0], rtol=1e-2, atol=1e-2)
    counts = load_counts(tmp_path / "out")
    assert int(counts["text"].sum()) == manifest["learned"]
    assert int(counts["predictions"].sum()) == manifest["tokens"]


def test_rows_never_cross_documents(target: Any, text_file: str, tmp_path: Path) -> None:
    distill(target, tokenizer(), label(source=text_file, max_tokens=10_000), tmp_path / "out", progress=False)
    words = tokenizer()
    documents = [" " + document.text + " " for document in read_documents(text_file)]
    for ids in ids_of(load_shards(tmp_path / "out")):
        assert any(f" {words.decode(ids[1:])} " in document for document in documents)


def test_length_limit_keeps_ids_and_mask_together(target: Any, tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    short = [{"role": "user", "content": "t5"}, {"role": "assistant", "content": " ".join(["t7"] * 30)}]
    cut_off = [{"role": "user", "content": " ".join(["t5"] * 30)}, {"role": "assistant", "content": "t7"}]
    path.write_text("".join(json.dumps({"messages": m}) + "\n" for m in (short, cut_off)))
    for template in (CHAT, TAGGED_CHAT):
        out = tmp_path / str(len(template))
        manifest = distill(target, tokenizer(template), label(source=str(path), length=8), out, progress=False)
        text = load_shards(out)
        assert len(text) == 1
        row = text[0]
        assert len(row["input_ids"]) == len(row["learn"]) == 8
        assert row["learn"].tolist() == [False] * 4 + [True] * 4
        assert manifest["dropped_rows"] == 1


def test_killed_run_goes_on(target: Any, text_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = label(source=text_file, predictions=True, hidden=True)
    distill(target, tokenizer(), config, tmp_path / "whole", progress=False)
    honest, calls = distill_module.stored, []

    def dies(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return honest(*args)

    monkeypatch.setattr(distill_module, "stored", dies)
    with pytest.raises(KeyboardInterrupt):
        distill(target, tokenizer(), config, tmp_path / "killed", progress=False)
    with pytest.raises(DataError, match="not finished"):
        load_shards(tmp_path / "killed")
    first = tmp_path / "killed" / "shard-00000.safetensors"
    written = first.stat().st_mtime_ns
    (tmp_path / "killed" / ".ab-shard-00001.safetensors").touch()
    distill(target, tokenizer(), config, tmp_path / "killed", progress=False)
    assert first.stat().st_mtime_ns == written
    for name in ("shard-00000.safetensors", "shard-00001.safetensors", "counts.safetensors"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not list((tmp_path / "killed").glob(".*shard*"))


def test_other_settings_are_refused(target: Any, text_file: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    distill(target, tokenizer(), label(source=text_file), out, progress=False)
    distill(target, tokenizer(), label(source=text_file, batch_tokens=64), out, progress=False)
    with pytest.raises(ConfigError, match=r"settings\.seed is 0 there and 1 now"):
        distill(target, tokenizer(), label(source=text_file, seed=1), out, progress=False)
    with pytest.raises(ConfigError, match="tokenizer is"):
        distill(target, tokenizer(CHAT), label(source=text_file), out, progress=False)
    with pytest.raises(ConfigError, match="target is"):
        distill(tiny.selfspec_target("llama", seed=1), tokenizer(), label(source=text_file), out, progress=False)
    Path(text_file).write_text('{"text": "t5 t6 t7 t8 t9 t10 t11 t12 t13"}\n')
    with pytest.raises(ConfigError, match="input is"):
        distill(target, tokenizer(), label(source=text_file), out, progress=False)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(DataError, match="not empty"):
        distill(target, tokenizer(), label(source=text_file), tmp_path / "other", progress=False)


@pytest.mark.parametrize(
    "options", [{"mode": "wright"}, {"source": ""}, {"length": 0}, {"split": "no"}, {"top_p": 0.0}]
)
def test_impossible_settings(target: Any, text_file: str, tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        distill(target, tokenizer(), label(**{"source": text_file, **options}), tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_rows_past_the_trained_length_are_made_with_a_warning_and_refused_by_a_table_of_positions(
    target: Any, text_file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = label(source=text_file, length=1000)
    assert distill(target, tokenizer(), config, tmp_path / "long", progress=False)["rows"] > 0
    assert "1000 tokens, where the model is made for 512" in caplog.text
    with pytest.raises(ConfigError, match="1000 tokens, where the model has positions for 256"):
        distill(Target(families.build("gpt2")), tokenizer(), config, tmp_path / "table", progress=False)


# Writing


def prompts_file(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    lines = [" ".join(f"t{(11 * i + k) % 80 + 4}" for k in range(3 + 4 * (i % 3))) for i in range(6)]
    path.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))
    return str(path)


def test_writing_equals_generate(target: Any) -> None:
    prompts = [[1, 5, 6], [1, 9, 10, 11, 12], [1, 30]]
    written = write(target, prompts, 12, Picking(), [0, 0, 0])
    for prompt, new in zip(prompts, written, strict=True):
        wanted = target.model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        assert prompt + new == wanted[0].tolist()


def test_rows_end_at_end_tokens(target: Any) -> None:
    prompts = [[1, 5, 6], [1, 9, 10, 11]]
    free = write(target, prompts, 12, Picking(), [0, 0])
    end = free[0][4]
    stopped = write(target, prompts, 12, Picking(), [0, 0], (end,))
    for full, cut in zip(free, stopped, strict=True):
        assert cut == (full[: full.index(end) + 1] if end in full else full)


def test_randomness_belongs_to_the_row(target: Any) -> None:
    picking, prompts = Picking(1.0, 20, 0.9), [[1, 5, 6], [1, 9, 10, 11, 12], [1, 30]]
    together = write(target, prompts, 10, picking, [7, 8, 9])
    alone = [write(target, [p], 10, picking, [s])[0] for p, s in zip(prompts, (7, 8, 9), strict=True)]
    assert together == alone
    assert write(target, prompts, 10, picking, [7, 8, 10])[2] != together[2]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.8), (1.0, 12, 0.6)]
)
def test_picking_follows_the_filtered_distribution(temperature: float, top_k: int, top_p: float) -> None:
    """Inverting on a fine grid gives every token its share, within the grid's step."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = 3 * torch.randn(1, 40, generator=torch.Generator().manual_seed(0))
    wanted = TemperatureLogitsWarper(temperature)(None, logits)
    wanted = TopKLogitsWarper(top_k)(None, wanted) if top_k else wanted
    wanted = TopPLogitsWarper(top_p)(None, wanted) if top_p < 1 else wanted
    grid = 4000
    chances = (torch.arange(grid) + 0.5) / grid
    picked = pick(logits.expand(grid, -1), chances, Picking(temperature, top_k, top_p))
    share = torch.bincount(picked, minlength=40) / grid
    assert (share - wanted.softmax(-1)[0]).abs().max() < 1.5 / grid


def test_top_p_beyond_the_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    from selfspec.train import write as write_module

    logits, chances = torch.randn(64, 50, generator=torch.Generator().manual_seed(1)), torch.linspace(0, 0.999, 64)
    whole = pick(logits, chances, Picking(1.0, 0, 0.95))
    monkeypatch.setattr(write_module, "_CANDIDATES", 5)
    assert torch.equal(pick(logits, chances, Picking(1.0, 0, 0.95)), whole)


def written(tmp_path: Path, **options: Any) -> DistillConfig:
    defaults = {"mode": "write", "source": prompts_file(tmp_path), "split": "all", "length": 32, "max_new_tokens": 6}
    return DistillConfig(
        **{**defaults, "max_tokens": 120, "shard_tokens": 40, "temperature": 1.0, "top_k": 30, **options}
    )


def test_write_is_seeded_and_resumable(target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = written(tmp_path)
    distill(target, tokenizer(), config, tmp_path / "a", progress=False)
    data = lists(load_shards(tmp_path / "a"))
    assert all(len(r["input_ids"]) == len(r["learn"]) and not r["learn"][0] and r["learn"][-1] for r in data)
    distill(target, tokenizer(), written(tmp_path, seed=1), tmp_path / "b", progress=False)
    assert data != lists(load_shards(tmp_path / "b"))
    honest, calls = answer_module.write, []

    def dies(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return honest(*args)

    monkeypatch.setattr(answer_module, "write", dies)
    with pytest.raises(KeyboardInterrupt):
        distill(target, tokenizer(), config, tmp_path / "c", progress=False)
    distill(target, tokenizer(), config, tmp_path / "c", progress=False)
    assert data == lists(load_shards(tmp_path / "c"))


def test_write_from_nothing(target: Any, tmp_path: Path) -> None:
    config = written(tmp_path, source="", max_tokens=50, max_new_tokens=9)
    distill(target, tokenizer(), config, tmp_path / "out", progress=False)
    rows = ids_of(load_shards(tmp_path / "out"))
    assert len(rows) == 5 and all(row[0] == 1 for row in rows) and len({tuple(row) for row in rows}) == 5


# Batches


def test_batches_respect_the_mask() -> None:
    rows = [
        {"input_ids": torch.tensor([1, 5, 6, 7]), "learn": torch.tensor([False, False, True, True])},
        {"input_ids": torch.tensor([1, 8]), "learn": torch.tensor([False, True])},
    ]
    batch = collate(rows)
    assert batch["tokens"].tolist() == [[1, 5, 6], [1, 0, 0]]
    assert batch["next_tokens"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["counts"].tolist() == [3, 1]
    assert batch["labels"].tolist() == [[IGNORED, 6, 7], [IGNORED, IGNORED, IGNORED]]


def test_stored_and_online_features_agree(target: Any, text_file: str, tmp_path: Path) -> None:
    needs = Needs(True, (0, 2))
    distill(target, tokenizer(), label(source=text_file, hidden=True, layers=[0, 2]), tmp_path / "out", progress=False)
    data = load_shards(tmp_path / "out")
    stored = TrainingRows([(data, 1.0)], needs, tiny.HIDDEN)
    online = TrainingRows([(StoredText(tmp_path / "out", ["hidden"]), 1.0)], needs, tiny.HIDDEN)
    assert not online.columns
    one, other = (to_verified(collate([rows[i] for i in range(4)]), needs, target) for rows in (stored, online))
    real = torch.arange(one.tokens.shape[1]) < one.counts[:, None]
    for a, b in zip((one.hidden, *one.layers), (other.hidden, *other.layers), strict=True):
        assert torch.allclose(a.float()[real], b.float()[real], rtol=1e-2, atol=1e-2)


def test_weights_repeat_rows(target: Any, text_file: str, tmp_path: Path) -> None:
    distill(target, tokenizer(), label(source=text_file), tmp_path / "out", progress=False)
    data = load_shards(tmp_path / "out")
    rows = TrainingRows([(data, 2.0), (data, 0.5)], Needs(), tiny.HIDDEN)
    assert len(rows) == 2 * len(data) + round(0.5 * len(data))


@pytest.mark.parametrize("world", [1, 3])
def test_token_batches_cover_every_row_once(world: int) -> None:
    lengths = [1 + (37 * i) % 100 for i in range(50)]
    ranks = [TokenBatches(lengths, 256, 0, rank, world) for rank in range(world)]
    epochs = []
    for epoch in range(3):
        for rank in ranks:
            rank.set_epoch(epoch)
        batches = [batch for rank in ranks for batch in rank]
        assert {len(list(rank)) for rank in ranks} == {len(ranks[0])}
        assert sorted(row for batch in batches for row in batch if row >= 0) == list(range(50))
        assert all(len(b) * max(lengths[i] for i in b) <= 256 for b in batches)
        epochs.append(batches)
    assert epochs[0] != epochs[1]


LENGTHS = [1 + (37 * i) % 100 for i in range(47)]


def rows_by_step(steps: Steps, world: int) -> list[list[int]]:
    """What all processes together learn from in each step of an epoch."""
    accumulated, parts = steps.shared(world)
    found: list[list[int]] = []
    for rank in range(world):
        batches = list(TokenBatches(LENGTHS, steps.tokens, 3, rank, world, parts))
        mine = [batches[i : i + accumulated] for i in range(0, len(batches), accumulated)]
        found = found or [[] for _ in mine]
        for rows, part in zip(found, mine, strict=True):
            rows += [row for batch in part for row in batch if row >= 0]
    return [sorted(rows) for rows in found]


@pytest.mark.parametrize("world", [2, 4, 8, 12])
def test_any_number_of_processes_reads_the_steps_of_one(world: int) -> None:
    alone = list(TokenBatches(LENGTHS, 256, 3))
    wanted = [sorted(row for batch in alone[i : i + 4] for row in batch) for i in range(0, len(alone), 4)]
    assert len(alone) % 4, "the last step is a short one"
    assert rows_by_step(Steps(256, 4), world) == wanted


def test_steps_that_processes_cannot_share_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 batches of 256 tokens, which 3 processes cannot"):
        Steps(256, 4).shared(3)


def test_a_filler_is_a_row_that_counts_nothing() -> None:
    rows = [{"input_ids": torch.arange(n), "learn": torch.ones(n, dtype=torch.bool)} for n in (3, 5)]
    batch = collate([Fillers(rows)[1], Fillers(rows)[~0]])
    assert batch["labels"].tolist() == [[IGNORED, 2, 3, 4], [IGNORED] * 4]
