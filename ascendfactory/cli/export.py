"""`ascendfactory export`: a checkpoint as a folder that other programs read."""

from __future__ import annotations

from typing import Annotated

import typer

from ascendfactory.core.messages import UserError, nearest, pick

_DTYPES = ("auto", "float32", "bfloat16", "float16")


def export(
    run: Annotated[str, typer.Argument(help=pick("a run folder or one of its checkpoints", "训练文件夹或其中一个检查点"))],
    out: Annotated[str, typer.Argument(help=pick("the folder to write", "输出文件夹"))],
    merge: Annotated[bool, typer.Option("--merge", help=pick("merge a LoRA adapter into the weights", "将 LoRA 适配器合并进权重"))] = False,
    dtype: Annotated[str, typer.Option(help=pick("of the weights: ", "权重类型：") + ", ".join(_DTYPES))] = "auto",
) -> None:
    """Write a checkpoint as a Hugging Face folder."""
    if dtype not in _DTYPES:
        guess = nearest(dtype, _DTYPES) or "auto"
        raise UserError(
            "--dtype", f"'{dtype}' is none of {', '.join(_DTYPES)}; did you mean {guess}?", f"'{dtype}' 不可用，是否想写 {guess}？"
        )
    from ascendfactory.engine.export import export_run

    done = export_run(run, out, dtype=dtype, merge=merge)
    typer.echo(
        pick(f"wrote {done['out']}: step {done['step']}, {done['dtype']}", f"已写入 {done['out']}：第 {done['step']} 步，{done['dtype']}")
    )
    if "lost" in done:
        lost = done["lost"]
        typer.echo(pick(f"share of the adapter's effect lost by rounding: {lost:.2%}", f"合并时因舍入损失的适配器效果：{lost:.2%}"))
    typer.echo(f"ascendfactory chat {out}")
