"""Sampling options that chat and generate share, and the client's options made of them."""

from typing import Annotated, Any, cast

import typer

from octavo.prompt import GenerateOptions

Model = Annotated[str, typer.Option("--model", help='"models/..."; empty: the only one.')]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", help="Output tokens at most.")]
Temperature = Annotated[float | None, typer.Option("--temperature", help="0 is greedy.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Smallest set of tokens of this probability.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="This many most likely tokens; 0: all.")]
MinP = Annotated[float | None, typer.Option("--min-p", help="Drop tokens less likely than this times the most likely one.")]
RepetitionPenalty = Annotated[float | None, typer.Option("--repetition-penalty", help="1 is off.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Same seed, same answer.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="End at this text; may be given several times.")]


def chosen(**options: Any) -> GenerateOptions:
    """The options that were given."""
    return cast(GenerateOptions, {name: value for name, value in options.items() if value not in (None, "", [])})
