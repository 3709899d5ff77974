"""The ``pagemill`` command. Each fault of the operator is one line on stderr and exit status 2, without a traceback."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import click
from pydantic_settings import BaseSettings

from pagemill.configuration import as_environment, read_settings
from pagemill.openmp import let_threads_sleep
from pagemill.options import SettingsCommand
from pagemill_shared.errors import ConfigurationError
from pagemill_shared.logs import configure_logging
from pagemill_shared.settings import (
    ChatSettings,
    GatewaySettings,
    PrepareSettings,
    RunBatchSettings,
    SchedulerSettings,
    ServeSettings,
    WorkerSettings,
)

EXIT_CONFIGURATION = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and gives the exit status."""
    command = _command()
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = f"pagemill {words[0]}" if words and words[0] in command.commands else "pagemill"
    try:
        return int(command.main(args=words, prog_name="pagemill", standalone_mode=False) or 0)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        return EXIT_CONFIGURATION
    except click.ClickException as error:
        return _refuse(name, error.format_message())
    except ConfigurationError as error:
        return _refuse(name, str(error))
    except (KeyboardInterrupt, click.Abort):
        return EXIT_INTERRUPTED


def _refuse(name: str, reason: str) -> int:
    print(f"{name}: {' '.join(reason.split())}", file=sys.stderr, flush=True)
    return EXIT_CONFIGURATION


def _command() -> click.Group:
    group = click.Group(
        "pagemill",
        help="An LLM server built on PagedAttention, split into gateway, scheduler and workers.",
        context_settings={"help_option_names": ["-h", "--help"]},
        no_args_is_help=True,
        params=[
            click.Option(
                ["--version"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_print_version,
                help="Show the version and end.",
            ),
        ],
    )
    for name, settings, run, text in (
        (
            "serve",
            ServeSettings,
            _serve,
            "Start scheduler, workers and gateway on this machine, and keep them running.",
        ),
        ("gateway", GatewaySettings, _gateway, "Start one gateway: HTTP, tokenization, streaming."),
        ("scheduler", SchedulerSettings, _scheduler, "Start the scheduler."),
        ("worker", WorkerSettings, _worker, "Start one worker: the model and its KV cache."),
        (
            "prepare",
            PrepareSettings,
            _prepare,
            "Write a model into the cache in the form that gateway and worker read.",
        ),
    ):
        group.add_command(
            SettingsCommand(name=name, settings=settings, run=_reading(settings, run), help=text, short_help=text)
        )
    group.add_command(
        SettingsCommand(
            name="chat",
            settings=ChatSettings,
            run=_reading(ChatSettings, _chat),
            own=_CHAT_OWN,
            help="Chat with the model of a running server; with MESSAGE, or a text piped in, for one answer only.",
            short_help="Chat with the model of a running server.",
        )
    )
    group.add_command(
        SettingsCommand(
            name="run-batch",
            settings=RunBatchSettings,
            run=_reading(RunBatchSettings, _run_batch),
            own=_BATCH_OWN,
            help="Have a running server answer the requests of FILE.jsonl, in OpenAI's batch format.",
            short_help="Have a running server answer a file of requests.",
        )
    )
    group.add_command(
        click.Command(
            "keys",
            params=[click.Argument(["folder"], type=click.Path(path_type=Path))],
            callback=_keys,
            help="Write the CURVE keys that FOLDER lacks, for --curve-dir.",
        )
    )
    group.add_command(click.Command("version", callback=_version, help="Show the version."))
    return group


def _reading(cls: type[BaseSettings], run: Callable[..., int]) -> Callable[..., int]:
    return lambda typed, **own: run(read_settings(cls, typed), **own)


def _serve(settings: ServeSettings) -> int:
    configure_logging("supervisor", settings.log_level, settings.log_format)
    from pagemill.serve import serve

    return serve(settings)


def _gateway(settings: GatewaySettings) -> int:
    return int(_load("pagemill_gateway.app", "gateway").run(settings))


def _scheduler(settings: SchedulerSettings) -> int:
    os.environ.update(
        as_environment({"compiled_scheduler": settings.compiled_scheduler}, {})
    )  # settles what is imported
    return int(_load("pagemill_scheduler.app", "").run(settings))


def _worker(settings: WorkerSettings) -> int:
    let_threads_sleep(os.environ)  # before torch is imported
    return int(_load("pagemill_worker.app", "worker").run(settings))


def _prepare(settings: PrepareSettings) -> int:
    prepare_model = _load("pagemill_worker.prepare", "worker").prepare_model
    folder = prepare_model(settings.model, settings.cache_dir, _show_progress)
    print(f"{settings.model} is prepared in {folder}", flush=True)
    return 0


def _show_progress(what: str, share: float | None) -> None:
    print(what if share is None else f"{share:4.0%}  {what}", flush=True)


_CHAT_OWN = (
    click.Argument(["message"], required=False, metavar="[MESSAGE]"),
    click.Option(["--model"], help="name of the model; the server's first one by default"),
    click.Option(["--system"], help="system text: how the model should behave"),
    click.Option(["--temperature"], type=float, help="0 is greedy"),
    click.Option(["--top-p"], type=float, help="share of the probability to sample from"),
    click.Option(["--max-tokens"], type=int, help="longest answer in tokens"),
    click.Option(["--seed"], type=int, help="equal seeds give equal answers"),
)
_BATCH_OWN = (
    click.Argument(["file"], type=click.Path(path_type=Path), metavar="FILE.jsonl"),
    click.Option(
        ["--output"],
        type=click.Path(path_type=Path),
        help="file for the results; FILE.results.jsonl by default. Results that it holds are not asked for again",
    ),
)


def _chat(settings: ChatSettings, message: str | None, model: str | None, **fields: Any) -> int:
    chat = _load("pagemill.chat", "client").chat
    given = {name: value for name, value in fields.items() if value is not None}
    return int(chat(settings, message, model, given.pop("system", ""), given))


def _run_batch(settings: RunBatchSettings, file: Path, output: Path | None) -> int:
    return int(
        _load("pagemill.batch", "client").run_batch(settings, file, output or file.with_suffix(".results.jsonl"))
    )


def _keys(folder: Path) -> int:
    from pagemill_shared.curve import generate_keys

    made = generate_keys(folder)
    print(f"CURVE keys are {'written to' if made else 'already in'} {folder}", flush=True)
    return 0


def _version() -> int:
    print(f"pagemill {installed_version('pagemill')}")
    return 0


def _print_version(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        _version()
        ctx.exit()


def _load(module: str, extra: str) -> Any:
    """Imports a part only when its command runs, so that each image needs only its own extra."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("pagemill"):
            raise
        wanted = f"pagemill[{extra}]" if extra else "pagemill"
        raise ConfigurationError(f"the package {error.name} is missing; install {wanted}") from None
