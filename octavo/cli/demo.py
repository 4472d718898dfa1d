"""`octavo demo`: a server for one question, asked twice. What a newcomer sees first."""

from collections import deque
from typing import Annotated

import typer

from octavo.answers import Finished, TextDelta
from octavo.cli.console import log_message, say, write
from octavo.cli.figures import answer_figures
from octavo.cli.server import run_until_stopped, running_server
from octavo.cli.service_args import ExecutorArgs, SchedulerArgs, StoreArgs, split_args
from octavo.cli.services import DEFAULT_MODEL, StackOptions
from octavo.client import AsyncOctavoClient
from octavo.errors import OctavoError
from octavo.prompt import ChatMessage

_QUESTION = "What is a book, and why do people read books? Answer in three sentences."
_TAIL_LINES = 20
# Enough for one conversation, and ready in a moment: memory is touched before it is served.
_KV_MEMORY_BYTES = 256 << 20
_STORE_CAPACITY_BYTES = 256 << 20


def demo(
    model: Annotated[str, typer.Option(help="Name, folder, .gguf file or hub id.")] = DEFAULT_MODEL,
    prompt: Annotated[str, typer.Option(help="The question.")] = _QUESTION,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens at most.")] = 96,
    executor_args: ExecutorArgs = None,
    store_args: StoreArgs = None,
    scheduler_args: SchedulerArgs = None,
) -> None:
    """Start a server, ask it one question twice, stop it."""
    options = StackOptions(
        model=model,
        kv_memory_bytes=_KV_MEMORY_BYTES,
        store_capacity_bytes=_STORE_CAPACITY_BYTES,
        executor_args=split_args("--executor-args", executor_args),
        store_args=split_args("--store-args", store_args),
        scheduler_args=split_args("--scheduler-args", scheduler_args),
    )
    if not run_until_stopped(_demo(options, prompt, max_tokens)):
        say("stopped")
        raise typer.Exit(130)


async def _demo(options: StackOptions, prompt: str, max_tokens: int) -> None:
    log: deque[str] = deque(maxlen=_TAIL_LINES)
    is_starting = True

    def on_line(name: str, line: str) -> None:
        log.append(f"{name:<11}│ {line}")
        message = line if name == "prepare" else log_message(line) if name.startswith("executor") else None
        if is_starting and message and not message.startswith(("settings ", "session ")):
            say(f"  {message}")

    try:
        async with running_server(options, on_line, say) as (_, target), AsyncOctavoClient(target) as client:
            is_starting = False
            say(f"\n> {prompt}", style="bold")
            await _ask(client, prompt, max_tokens)
            say("> the same question again: its blocks are still on the device", style="bold")
            await _ask(client, prompt, max_tokens)
    except OctavoError:
        if log:
            say("\n".join(["the last lines of the log:", *log]))
        raise
    say("all stopped. Next: octavo up, then octavo chat in a second terminal", style="bold")


async def _ask(client: AsyncOctavoClient, prompt: str, max_tokens: int) -> None:
    async for event in client.stream([ChatMessage("user", prompt)], temperature=0.0, max_tokens=max_tokens):
        match event:
            case TextDelta(text=text):
                write(text)
            case Finished(usage=usage, timing=timing):
                write("\n")
                say(f"{answer_figures(usage, timing)}\n", style="green")
