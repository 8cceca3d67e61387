"""The command line: a table of verbs. Only the module of the verb that is asked for is imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from ascendfactory.core.messages import UserError, full_disk, nearest, pick

INTERRUPTED = 130


@dataclass(frozen=True)
class Verb:
    """One word after `ascendfactory`: where its function (or typer app) lies, and what it does."""

    place: str  # module:name
    en: str
    zh: str


VERBS = {
    "config": Verb("ascendfactory.cli.config:config", "write a commented starter recipe", "写一份带注释的入门配方"),
    "plan": Verb("ascendfactory.cli.plan:plan", "show how a recipe will run, and why", "查看配方将如何运行及原因"),
    "train": Verb("ascendfactory.cli.train:train", "run a recipe; the same command resumes it", "运行配方；再次执行即断点续训"),
    "submit": Verb("ascendfactory.cli.submit:submit", "hand a recipe to Slurm or Kubernetes", "将配方提交到 Slurm 或 Kubernetes"),
    "data": Verb("ascendfactory.cli.data:app", "look at samples as the model will see them", "查看模型实际看到的样本"),
    "runs": Verb("ascendfactory.cli.runs:app", "list, show and compare runs", "列出、查看、比较训练"),
    "compare": Verb("ascendfactory.cli.compare:compare", "one recipe on two engines, step beside step", "在两个引擎上逐步对比同一配方"),
    "export": Verb("ascendfactory.cli.export:export", "write a checkpoint as a Hugging Face folder", "将检查点导出为 Hugging Face 文件夹"),
    "chat": Verb("ascendfactory.cli.chat:chat", "talk to a trained model", "与训练好的模型对话"),
    "models": Verb("ascendfactory.cli.models:models", "models of the catalogue", "目录中的模型"),
    "backends": Verb("ascendfactory.cli.models:backends", "back ends and what they can train", "后端及其能力"),
    "schema": Verb("ascendfactory.cli.schema:schema", "JSON Schema of recipes, for editors", "配方的 JSON Schema（供编辑器使用）"),
    "install": Verb("ascendfactory.cli.install:install", "make the environment of a back end", "安装后端的独立环境"),
    "migrate": Verb("ascendfactory.cli.legacy:migrate", "turn a YAML of AscendFactory 6.5 into a recipe", "将 6.5 版 YAML 转为配方"),
    "doctor": Verb("ascendfactory.cli.doctor:doctor", "check this machine", "检查本机环境"),
}

_FORMER = {"performance": "runs compare", "accuracy": "compare"}  # verbs of AscendFactory 6.5 → what does it now


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line and ends the process: 0 done, 1 failed, 2 something the person can mend, 130 interrupted."""
    sys.exit(run(list(sys.argv[1:] if argv is None else argv)))


def run(argv: list[str]) -> int:
    """Runs one command; returns its exit code. What the person can mend is told in one line each, on stderr."""
    try:
        return _dispatch(argv)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `ascendfactory models | head`
        sys.stderr.close()
        return 0
    except UserError as error:
        return _tell(error.line().splitlines())
    except Exception as error:
        full = full_disk(error)
        lines = full.line().splitlines() if full else _lines_of(error, argv)
        if lines is None:
            raise
        return _tell(lines)


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if argv[0] in ("-V", "--version"):
        from ascendfactory import __version__

        print(f"ascendfactory {__version__}")
        return 0
    if argv[0] not in VERBS:
        guess = _FORMER.get(argv[0]) or nearest(argv[0], VERBS) or "--help"
        raise UserError(
            "",
            f"no command '{argv[0]}'; did you mean 'ascendfactory {guess}'?",
            f"没有命令 '{argv[0]}'，是否想用 'ascendfactory {guess}'？",
        )
    return _call(argv[0], argv[1:])


def _call(name: str, arguments: list[str]) -> int:
    import typer

    verb = VERBS[name]
    module, function = verb.place.split(":")
    found = getattr(import_module(module), function)
    if isinstance(found, typer.Typer):
        app, arguments = found, arguments or ["--help"]
    else:
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        # Settings of the recipe (`--optim.lr=1e-5`) are options that typer does not know: they reach the verb as they are.
        takes_settings = name in ("train", "submit", "plan", "data", "migrate", "compare")
        app.command(
            help=pick(verb.en, verb.zh),
            context_settings={
                "allow_extra_args": takes_settings,
                "ignore_unknown_options": takes_settings,
                "help_option_names": ["-h", "--help"],
            },
        )(found)
    code = typer.main.get_command(app)(args=arguments, prog_name=f"ascendfactory {name}", standalone_mode=False)
    return code if isinstance(code, int) else 0


def _lines_of(error: Exception, argv: list[str]) -> list[str] | None:
    """The lines to print for an error that is the person's to mend, or None for a defect of ours."""
    import typer

    from ascendfactory.core.plan import NoPlan

    if isinstance(error, typer.Exit):
        return []
    if isinstance(error, typer.Abort):
        return [pick("stopped", "已停止")]
    if isinstance(error, NoPlan):
        return [f"{r.where}: {pick(r.en, r.zh)}" for r in error.refusals]
    format_message = getattr(error, "format_message", None)  # typer's usage errors
    if format_message is None:
        return None
    see = pick(f"see 'ascendfactory {argv[0]} --help'", f"见 'ascendfactory {argv[0]} --help'")
    return [f"{' '.join(str(format_message()).split()).rstrip('.')}; {see}"]


def _tell(lines: list[str]) -> int:
    mark = pick("error", "错误")
    for line in lines:
        print(f"{mark}: {line}", file=sys.stderr)
    return 2


def help_text() -> str:
    """What `ascendfactory --help` prints."""
    lines = [
        pick("AscendFactory: one recipe, any engine.", "AscendFactory：一份配方，任意引擎。"),
        "",
        pick("usage: ascendfactory COMMAND ...", "用法：ascendfactory 命令 ..."),
        "",
        *(f"  {name:<9} {pick(verb.en, verb.zh)}" for name, verb in VERBS.items()),
        "",
        pick("a first run:", "第一次训练："),
        "  ascendfactory config --model MODEL --data train.jsonl --output my.yaml",
        "  ascendfactory train my.yaml --optim.lr=2e-5",
        "",
        pick("'ascendfactory COMMAND --help' tells more.", "更多说明：'ascendfactory 命令 --help'。"),
    ]
    return "\n".join(lines)
