"""Options that several commands share: one name, one default, one meaning."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from selfspec.prompting import Prompt

Target = Annotated[str, typer.Option("--target", help="Model: a folder, a Hub id, or `demo` (the demo extra).")]
TargetOrWord = Annotated[
    str | None, typer.Option("--target", help="Model: a folder, a Hub id, or `demo` (the demo extra).")
]
TargetWord = Annotated[str | None, typer.Argument(metavar="TARGET", help="The same as --target.")]
"""Where no other words are taken the target may be one; documented is the option, which all commands have."""
Draft = Annotated[str | None, typer.Option("--draft", help="Heads or a method; plain decoding if left out.")]
Drafts = Annotated[
    list[str] | None,
    typer.Option("--draft", help="Folder or Hub id of heads, or a method that needs no training. May be repeated."),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        help="JSONL with `prompt`, `text`, `turns` or `messages` per line; standard-library code if left out.",
    ),
]
Limit = Annotated[int, typer.Option("--limit", min=1, help="The most prompts.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens to write per prompt.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto (what the device is fast at), bfloat16, float16 or float32.")]
Device = Annotated[
    str | None, typer.Option("--device", help="For instance cpu or cuda:0; an accelerator if there is one.")
]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; torch's choice if left out.")]
Guard = Annotated[
    bool | None,
    typer.Option(
        "--guard/--no-guard", help="Switch the draft off where it does not pay. On, unless SELFSPEC_GUARD=0 is set."
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Of everything drawn.")]
Nodes = Annotated[
    int | None, typer.Option("--nodes", min=1, help="The most nodes of a tree, the root included; chosen if left out.")
]
Report = Annotated[bool, typer.Option("--report", help="Show rounds, acceptance and time by stage at the end.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the results here, too.")]


def with_words(words: Sequence[str | None], **options: str | None) -> list[str | None]:
    """Values of options that may stand as words, too, in this order: words are for those that are not given.

    Raises:
        BadParameter: there are more words than options left.
    """
    left = [word for word in words if word is not None]
    found = [left.pop(0) if value is None and left else value for value in options.values()]
    if left:
        known = ", ".join(f"--{name} {value}" for name, value in zip(options, found, strict=True))
        raise typer.BadParameter(f"{left[0]!r} is one word too many beside {known}")
    return found


def the_target(word: str | None, target: str | None) -> str:
    """The target, given as a word or as an option.

    Raises:
        BadParameter: it is given twice, or not at all.
    """
    (found,) = with_words([word], target=target)
    if found is None:
        raise typer.BadParameter("there is no model; give --target")
    return found


def quiet(threads: int | None = None) -> None:
    """Set the number of threads and keep transformers' progress bars and hints off the terminal."""
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)


def quiet_datasets() -> None:
    """Keep the progress bars of `datasets` off the terminal; there is one for the whole job."""
    from datasets import disable_progress_bars

    disable_progress_bars()


def pick_device(device: str | None) -> str:
    """The device asked for, or an accelerator if there is one."""
    import torch

    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def load(
    target: str, dtype: str, device: str | None, threads: int | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a target the way every command does."""
    from selfspec.models import load_target

    quiet(threads)
    return load_target(target, dtype, pick_device(device))


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompts: Path | None, limit: int, seed: int) -> list[list[int]]:
    """Token ids of the prompts of a file, or of held-out snippets of the standard library."""
    from selfspec.prompting import Prompt, read_prompts

    if prompts is not None:
        found = read_prompts(prompts, limit)
    else:
        from selfspec.train.corpus import stdlib_snippets

        found = [Prompt(snippet.text) for snippet in stdlib_snippets("held-out", limit, seed, tokenizer)]
    return [prompt.encode(tokenizer) for prompt in found]


def check_files(*paths: Path | str | None) -> None:
    """See that each file that was asked for can be written, before long work starts."""
    from selfspec.outputs import check_file

    for path in paths:
        if path is not None:
            check_file(path)


def write_results(json: Path | None, results: Any) -> None:
    """Write results to the file of `--json`, if one was given."""
    if json is not None:
        from selfspec.checkpoint import write_json

        write_json(json, results)
        typer.echo(f"results: {json}", err=True)


def bench_prompts(
    prompts: Path | None, tasks: list[str] | None, limit: int, seed: int
) -> Callable[[PreTrainedTokenizerBase], list[Prompt]]:
    """Prompts of a file, built-in ones of tasks, or held-out snippets of the standard library.

    A wrong file or task raises here; what is returned takes the tokenizer, which only snippets need.
    """
    from selfspec import recipes
    from selfspec.inference.bench.suite import in_turn
    from selfspec.prompting import Prompt, read_prompts

    if prompts is None and not tasks:
        from selfspec.train.corpus import stdlib_snippets

        return lambda tokenizer: [Prompt(s.text) for s in stdlib_snippets("held-out", limit, seed, tokenizer)]
    wanted = [] if not tasks or "all" in tasks else tasks
    found = in_turn(read_prompts(prompts or recipes.prompts()), wanted, limit)
    return lambda tokenizer: found


def log_to_terminal() -> None:
    """Show this package's own messages on stderr."""
    import logging

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("selfspec").setLevel(logging.INFO)


def key_values(given: list[str]) -> dict[str, Any]:
    """`top_p=0.9 stop_strings=["a"]` to values, read as YAML does."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    wrong = [part for part in given if "=" not in part or part.startswith("=")]
    if wrong:
        raise ConfigError(f"wanted KEY=VALUE got {wrong[0]!r}; put text that holds spaces in quotes")
    try:
        values = OmegaConf.to_container(OmegaConf.from_dotlist(given))
    except OmegaConfBaseException as error:
        raise ConfigError(f"cannot read {' '.join(given)!r}: {str(error).splitlines()[0]}") from error
    return {str(key): value for key, value in dict(values).items()} if isinstance(values, dict) else {}
