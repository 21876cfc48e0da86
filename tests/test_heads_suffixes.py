"""Lookup by the longest suffix and in a corpus: it finds what a scan finds, and the text stays the target's."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import oracle
import pytest
import tiny
import tiny_folder
import torch

import selfspec
from selfspec.draft import Budget, Sampling, Verified
from selfspec.errors import ConfigError
from selfspec.heads.lookup import Lookup, LookupConfig, overlap
from selfspec.heads.suffixes import Corpus, SuffixHistory
from selfspec.tree import DraftTree

torch.set_num_threads(1)


def longest_repeat(text: list[int]) -> int:
    """The length of the longest suffix that ends at an earlier place, too, by trying all."""
    for length in range(len(text) - 1, 0, -1):
        if any(text[end - length : end] == text[-length:] for end in range(length, len(text))):
            return length
    return 0


@pytest.mark.parametrize("seed", range(6))
def test_the_first_place_ends_the_longest_suffix_that_occurred_before(seed: int) -> None:
    rng = random.Random(seed)
    history, text = SuffixHistory(1), []
    for _ in range(80):
        token = rng.randrange(2 + seed % 3)
        text.append(token)
        history.extend([token])
        ends, wanted = list(history.matches()), longest_repeat(text)
        assert bool(ends) == (wanted > 0)
        lengths = [overlap(text, end, len(text)) for end in ends]
        assert all(end < len(text) for end in ends) and len(set(ends)) == len(ends)
        if ends:
            assert lengths[0] == wanted
            assert lengths == sorted(lengths, reverse=True)


def test_the_newest_place_of_a_suffix_comes_first() -> None:
    history = SuffixHistory(1)
    history.extend([5, 6, 1, 5, 6, 2, 9, 5, 6])
    assert next(iter(history.matches())) == 5


def test_the_automaton_stays_linear_in_the_text() -> None:
    for text in ([1] * 3000, [1, 2] * 1500, list(range(3000)), [random.Random(0).randrange(3) for _ in range(3000)]):
        history = SuffixHistory(1)
        history.extend(text)
        states = len(history._length)
        assert states <= 2 * len(text)
        assert sum(map(len, history._next)) <= 3 * len(text)  # Blumer et al. 1985, theorem 1.6


def test_shorter_matches_than_wanted_are_none() -> None:
    history = SuffixHistory(3)
    history.extend([1, 2, 7, 1, 2])
    assert list(history.matches()) == []
    history.extend([7])
    assert list(history.matches()) == [3]


@pytest.mark.parametrize("seed", range(4))
def test_a_corpus_finds_what_a_scan_finds(seed: int) -> None:
    rng = random.Random(seed)
    documents = [[rng.randrange(3) for _ in range(rng.randrange(30))] for _ in range(6)]
    corpus = Corpus(documents, max_match=5, depth=4)
    for _ in range(40):
        text = [rng.randrange(4) for _ in range(rng.randrange(1, 9))]
        found, first, end = corpus.find(text, 1)
        scan: Counter[tuple[int, ...]] = Counter()
        for wanted in range(min(5, len(text)), 0, -1):
            places = [
                (d, at + wanted)
                for d in documents
                for at in range(len(d) - wanted + 1)
                if d[at : at + wanted] == text[-wanted:]
            ]
            if places:
                break
        else:
            wanted, places = 0, []
        assert (found, end - first) == (wanted, len(places))
        for document, at in places:
            scan.update(tuple(document[at : at + n]) for n in range(1, min(4, len(document) - at) + 1))
        if found:
            paths = corpus.continuations(found, first, end, 4)
            assert set(paths) == set(scan)
            assert [scan[path] for path in paths] == sorted(scan.values(), reverse=True)


def test_many_places_are_sampled_and_the_most_frequent_continuation_comes_first() -> None:
    corpus = Corpus([[1, 2, 3]] * 900 + [[1, 2, 4]] * 100, max_match=4, depth=2)
    length, first, end = corpus.find([7, 1, 2], 1)
    assert (length, end - first) == (2, 1000)
    assert corpus.continuations(length, first, end, 2)[0] == (3,)


def propose(text: list[int], **options: Any) -> DraftTree:
    ids = torch.tensor([text])
    draft = Lookup(LookupConfig(**options))
    state = draft.begin(Verified(ids[:, :-1], ids[:, 1:], torch.tensor([len(text) - 1])))
    return draft.propose(state, Budget(), Sampling(), None)


def test_the_longer_match_leads() -> None:
    text = [9, 3, 4, 8, 1, 2, 3, 4]
    assert propose(text, corpus=[[2, 3, 4, 5, 6]], nodes=3, branches=1).tokens.tolist() == [[4, 5, 6]]
    assert propose(text, corpus=[[0, 4, 5, 6]], nodes=3, branches=1, trunk=1.0).tokens.tolist() == [[4, 8, 1]]


def test_frequent_continuations_of_a_corpus_are_branches() -> None:
    tree = propose([8, 1], corpus=[[1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 5]], nodes=5)
    assert tree.tokens.tolist() == [[1, 2, 3, 5, 4]]
    assert tree.parents.tolist() == [[-1, 0, 1, 0, 1]]


CONFIGS: dict[str, dict[str, Any]] = {
    "suffix": {"match": "suffix"},
    "corpus": {"corpus": [tiny.text(1, 60, seed=n)[0].tolist() for n in range(3)]},
    "suffix and corpus": {"match": "suffix", "corpus": [tiny.text(1, 60, seed=n)[0].tolist() for n in range(3)]},
}


@pytest.mark.parametrize("name", tiny.NAMES)
@pytest.mark.parametrize("options", CONFIGS)
def test_the_text_of_ragged_rows_stays_the_targets(name: str, options: str) -> None:
    model = tiny.model(name)
    loop = tiny.text(1, 6)[0].tolist() * 3
    ids, mask = oracle.left_padded([loop, tiny.text(1, 4, seed=2)[0].tolist(), tiny.text(1, 13, seed=3)[0].tolist()])
    wanted = oracle.plain(model, ids, attention_mask=mask, max_new_tokens=10)
    with oracle.patched(model, {"kind": "lookup", **CONFIGS[options]}):
        assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=10), wanted)


def test_a_corpus_of_the_answer_is_accepted_whole() -> None:
    model = tiny.model("llama")
    wanted = oracle.plain(model, ids := tiny.text(1, 5), max_new_tokens=25)
    with oracle.patched(model, Lookup(LookupConfig(corpus=[wanted[0].tolist()], nodes=7, corpus_match=30))):
        assert torch.equal(model.generate(ids, max_new_tokens=25), wanted)
        assert model.speculation.report()["tokens_per_round"] > 5


def test_corpus_files_are_read_with_the_targets_tokenizer(tmp_path: Path) -> None:
    folder = tiny_folder.save(tmp_path / "model")
    model, _ = selfspec.models.load_target(folder, dtype="float32")
    text, lines = tmp_path / "corpus.txt", tmp_path / "corpus.jsonl"
    text.write_text("abcabd")
    lines.write_text(json.dumps({"text": "abc"}) + "\n" + json.dumps({"tokens": [5, 6, 7]}) + "\n")
    for path, documents in ((text, 1), (lines, 2)):
        selfspec.patch(model, f"lookup:{path}")
        corpus = model.speculation.draft.corpus
        assert int((corpus.tokens[: corpus.order.size] == -1).sum()) == documents
        model.generate(torch.tensor([[5, 6, 5, 6]]), max_new_tokens=3)
        selfspec.unpatch(model)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("no.txt", None, "is no file"),
        ("a.txt", "some words", "tokenizer is not at hand"),
        ("a.jsonl", "{", "line 1 .* not JSON"),
        ("b.jsonl", '{"tokens": ["x"]}', "line 1 .* neither"),
        ("c.jsonl", '{"tokens": [97]}', "holds token 97, the target has 97"),
    ],
)
def test_corpora_that_cannot_be_used_are_refused(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        selfspec.patch(tiny.model("llama"), f"lookup:{tmp_path / name}")


@pytest.mark.parametrize("options", [{"match": "guess"}, {"corpus_match": 0}], ids=str)
def test_impossible_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LookupConfig(**options)
