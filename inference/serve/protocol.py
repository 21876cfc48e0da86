"""What clients may ask for: OpenAI's fields, checked, and what they mean for `generate`.

A field that would change the answer and is not supported is refused by name; one that changes nothing is ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

_HARMLESS = {
    "metadata",
    "parallel_tool_calls",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
"""Values that ask for nothing special."""

Token = Annotated[int, Field(ge=0)]


class StreamOptions(BaseModel):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Ask(BaseModel):
    """Fields that both ways of asking share.

    `top_k`, `min_p` and `repetition_penalty` are not OpenAI's; nor is `origins`, which asks for the depth at which each
    piece of text was drafted (0: it is the target's own).
    """

    model_config = ConfigDict(extra="allow", strict=False)

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    logit_bias: dict[Token, Annotated[float, Field(ge=-100, le=100)]] | None = None
    n: int | None = Field(None, ge=1)
    seed: int | None = None
    stop: str | list[str] | None = None
    origins: bool = False

    @model_validator(mode="after")
    def _refuse_what_is_not_supported(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if name in _HARMLESS or value is None or value in _NEUTRAL.get(name, ()):
                continue
            if name in _NEUTRAL:
                raise ValueError(f"{name} is not supported by this server; leave it out")
            raise ValueError(f"{name} is not a field that this server knows; leave it out")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only for stream=true")
        return self

    @field_validator("stop")
    @classmethod
    def _check_stops(cls, value: str | list[str] | None) -> list[str]:
        stops = [value] if isinstance(value, str) else list(value or [])
        if len(stops) > 16:
            raise ValueError(f"{len(stops)} stop strings; give at most 16")
        if "" in stops:
            raise ValueError("an empty stop string would end every text; leave it out")
        return stops

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return list(self.stop or [])

    @property
    def usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wanted(self) -> int | None:
        """The most tokens of an answer; None leaves it to the server."""
        return self.max_tokens

    @property
    def top(self) -> int | None:
        """Likeliest tokens to report; None for no log-probabilities at all."""
        raise NotImplementedError

    def sampling(self, defaults: Any) -> dict[str, Any]:
        """Arguments of `generate`.

        Args:
            defaults: the model's generation configuration, for what the client leaves open.
        """
        temperature = self.temperature
        if temperature is None:
            temperature = (defaults.temperature if defaults.do_sample else None) or 1.0
        found: dict[str, Any] = {"do_sample": temperature > 0, "num_beams": 1}
        if self.repetition_penalty is not None:
            found["repetition_penalty"] = self.repetition_penalty
        if temperature == 0:
            return found
        top_k, top_p = _first(self.top_k, defaults.top_k, 0), _first(self.top_p, defaults.top_p, 1.0)
        found |= {"temperature": temperature, "top_k": max(top_k, 0), "top_p": top_p}
        min_p = _first(self.min_p, defaults.min_p, None)
        return found | ({"min_p": min_p} if min_p else {})


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


class CompletionAsk(Ask):
    """`/v1/completions`."""

    prompt: str | list[Token] | list[str] | list[list[Token]]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of is not supported by this server; leave it out, or give the value of n")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not supported by this server; leave one of them out")
        if not self.prompt:
            raise ValueError("prompt is empty; give at least one token")
        return self

    @property
    def top(self) -> int | None:
        """See `Ask`."""
        return self.logprobs

    @property
    def wanted(self) -> int | None:
        """OpenAI's default is 16."""
        return self.max_tokens or 16

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or more prompts."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class Part(BaseModel):
    """A part of a message's content; only text can be read."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a conversation; other fields (a name, say) are handed to the template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[Part] | None = None

    def plain(self) -> dict[str, Any]:
        """As chat templates take it."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return {**(self.model_extra or {}), "role": self.role, "content": content or ""}


class ChatAsk(Ask):
    """`/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only for logprobs=true")
        return self

    @property
    def top(self) -> int | None:
        """See `Ask`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def wanted(self) -> int | None:
        """See `Ask`."""
        return self.max_completion_tokens or self.max_tokens
