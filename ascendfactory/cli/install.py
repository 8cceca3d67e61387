"""`ascendfactory install`: the isolated environment of a back end."""

from __future__ import annotations

from typing import Annotated

import typer

from ascendfactory.core.messages import pick


def install(
    backend: Annotated[str, typer.Argument(help=pick("llamafactory, verl, mindspeed_llm, mindspeed_rl, mindspeed_mm", "后端名称"))] = "",
    profile: Annotated[str, typer.Option("--profile", help=pick("its version; without it, the default", "版本；缺省为默认版本"))] = "auto",
    wheels: Annotated[
        str | None, typer.Option("--wheels", help=pick("folder of wheels: no package index is asked", "离线 wheel 文件夹"))
    ] = None,
    sources: Annotated[
        str | None, typer.Option("--sources", help=pick("folder of checkouts: nothing is cloned", "源码文件夹：不再克隆"))
    ] = None,
    device: Annotated[str, typer.Option("--device", help=pick("cpu, cuda or npu; auto = what is here", "cpu、cuda 或 npu"))] = "auto",
) -> int:
    """Make the environment of a back end; without a name, list them."""
    from ascendfactory.launch.devices import detect
    from ascendfactory.launch.environments import find_profile, profiles
    from ascendfactory.launch.environments import install as make

    if not backend:
        _list(profiles())
        return 0
    found = detect()
    kind = device if device != "auto" else found.kind if found else "cpu"
    folder = make(find_profile(backend.replace("-", "_"), profile), kind, wheels, sources, typer.echo)
    typer.echo(f"{pick('ready', '就绪')}: {folder}")
    return 0


def _list(found: object) -> None:
    from ascendfactory.launch.environments import MARK, Profile, environment_dir

    assert isinstance(found, tuple)
    for profile in found:
        assert isinstance(profile, Profile)
        state = "✓" if (environment_dir(profile.environment) / MARK).exists() else "-"
        typer.echo(
            f"{state} {profile.backend:<14} {profile.name:<12} {profile.title}{pick(' (default)', '（默认）') if profile.default else ''}"
        )
