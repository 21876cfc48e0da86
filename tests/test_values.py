"""Settings of another type than declared are named when a config is read, not met deep inside a draft."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

import pytest
import tiny

import selfspec
from selfspec import registry
from selfspec.errors import ConfigError
from selfspec.values import check_types, fits

CONFIGS = [registry.method(kind).config_class for kind in registry.kinds()]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_every_setting_of_another_type_is_named(config: Any) -> None:
    for name, kind in get_type_hints(config).items():
        for wrong in ({1}, 2.5, True, "3", None, [[["x"]]]):
            if not fits(wrong, kind):
                with pytest.raises(ConfigError, match=rf"{name}="):
                    check_types(config, {name: wrong})


@pytest.mark.parametrize("config", [c for c in CONFIGS if hasattr(c, "from_dict")], ids=lambda config: config.__name__)
def test_what_a_config_writes_it_reads_and_nothing_of_another_type(config: Any) -> None:
    written = json.loads(json.dumps(config().to_dict()))
    assert config.from_dict(written) == config()
    with pytest.raises(ConfigError, match="base_model=3 is no str"):
        config.from_dict({**written, "base_model": 3})


@pytest.mark.parametrize(
    ("value", "kind", "wanted"),
    [
        (1, int, True), (1.0, int, False), (True, int, False), (1, float, True), (True, bool, True), (0, bool, False),
        (None, int | None, True), ("a", int | None, False), ([1, 2], list[int], True), ((1,), Sequence[int], True),
        ("12", Sequence[int], False), ([[0], [1]], Sequence[Sequence[int]] | None, True),
        ([[0], 1], list[list[int]], False), ({"a": 1}, dict[str, float], True), ({"a": "b"}, dict[str, Any], True),
        ({"a": "b"}, Mapping[str, float], False),
    ],
)  # fmt: skip
def test_types_by_hand(value: Any, kind: Any, wanted: bool) -> None:
    assert fits(value, kind) is wanted


@pytest.mark.parametrize(("key", "value"), [("depth", "4"), ("depth", 2.5), ("threshold", None), ("skip_mlp", "1")])
def test_a_draft_given_as_a_mapping_is_read_as_strictly(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{key}="):
        selfspec.patch(tiny.model("llama"), {"kind": "layer-skip", key: value})
