"""What the adapters of outside frameworks share: refusals from tables, the data step, options as data, the length of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

from ascendfactory.core.messages import nearest
from ascendfactory.core.plan import Layout, Plan, Refusal, Step
from ascendfactory.core.recipe import Recipe, Schedule

# How torchrun's processes of several nodes find each other; the launcher fills the braces in.
MEETING = ("--nnodes", "{nodes}", "--node-rank", "{node_rank}", "--master-addr", "{master_addr}", "--master-port", "{master_port}")
Rule = tuple[bool, str, str, str, Any]  # broken, recipe key, what to do in English, in Chinese, the value that would be accepted


def refusals(backend: str, rules: Iterable[Rule]) -> list[Refusal]:
    """A refusal for every broken rule."""
    return [
        Refusal(code=f"{backend}.{key}", where=key, en=f"{backend}: {en}", zh=f"{backend}：{zh}", fix={} if value is None else {key: value})
        for broken, key, en, zh, value in rules
        if broken
    ]


def only(is_other: bool, key: str, value: Any, what: str, what_zh: str) -> Rule:
    """The rule that a setting has one value here."""
    written = str(value).lower() if isinstance(value, bool) else value
    name = key.rsplit(".", 1)[-1]
    return is_other, key, f"no {what}; write {name}: {written}", f"不支持{what_zh}；请写 {name}: {written}", value


def data_rules(recipe: Recipe) -> list[Rule]:
    """Settings of the data that only the embedded engine has; all frameworks cut long samples and read whole files."""
    data, output = recipe.data, recipe.output
    return [
        only(data.overlong != "cut", "data.overlong", "cut", f"overlong: {data.overlong}", f" overlong: {data.overlong}"),
        only(data.streaming, "data.streaming", False, "tokenising while training", "边训练边分词"),
        (
            data.chat_template is not None,
            "data.chat_template",
            "it has templates of its own; leave chat_template out",
            "使用其自带模板；请删去 chat_template",
            None,
        ),
        (
            bool(output.sample_prompts),
            "output.sample_prompts",
            "no samples while training; leave sample_prompts out",
            "训练中不生成样例；请删去 sample_prompts",
            [],
        ),
        only(recipe.checkpoint.keep_best, "checkpoint.keep_best", False, "keeping of the best checkpoint", "保留最优检查点"),
        only(recipe.optim.nonfinite == "skip", "optim.nonfinite", "stop", "skipping of bad steps", "跳过异常步"),
        only(not data.mask_check, "data.mask_check", True, "switch for the check of masks", "关闭掩码检查"),
    ]


def degree_rules(layout: Layout, names: Iterable[str]) -> list[Rule]:
    """Degrees that this framework does not have."""
    return [only(getattr(layout, name) > 1, f"layout.{name}", 1, name, f" {name}") for name in names]


@cache
def options(profile: str) -> dict[str, Any]:
    """The options that a framework's own parser accepts: name → {type, choices}. Made by tools/read_flags.py.

    Args:
        profile: `<back end>-<version>`, or with `-<variant>`, whose options are those of the version.
    """
    version = "-".join(profile.split("-")[:2])
    text = (files("ascendfactory.backends") / "flags" / f"{version}.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def check_options(given: dict[str, Any], known: dict[str, Any]) -> list[tuple[str, str, str]]:
    """What a framework's parser would refuse, or would wrongly let pass: (option, English, Chinese)."""
    found = []
    for name, value in given.items():
        if name not in known:
            near = nearest(name, known)
            found.append(
                (name, f"no such option{f'; did you mean {near}?' if near else ''}", f"没有此选项{f'；是否为 {near}？' if near else ''}")
            )
            continue
        choices, kind = known[name].get("choices"), known[name].get("type")
        if choices and value is not None and value not in choices and str(value) not in map(str, choices):
            words = ", ".join(map(str, choices))
            found.append((name, f"{value!r} is not one of {words}", f"{value!r} 不在可选值中：{words}"))
        elif value is not None and not _fits(value, kind):
            found.append((name, f"{value!r} is not of type {kind}", f"{value!r} 不是 {kind} 类型"))
    return found


def schedule_rule(layout: Layout, *known: Schedule) -> Rule:
    """The rule that the framework has this order of micro-batches."""
    name = layout.schedule
    return only(name not in known, "layout.schedule", "auto", f"{name} schedule", f" {name} 调度")


def absent_rules(recipe: Recipe, layout: Layout, *names: str) -> list[Rule]:
    """Settings that the framework has nothing for, by the last word of their key."""
    rules = {
        "stage_layers": only(bool(layout.stage_layers), "layout.stage_layers", "auto", "choice of each stage's layers", "逐级指定层数"),
        "overlap_chunks": only(
            layout.overlap_chunks > 1, "layout.overlap_chunks", 1, "matrix products cut to hide messages", "切块掩盖通信的矩阵乘"
        ),
        "recompute_in_advance": only(
            layout.recompute_in_advance, "layout.recompute_in_advance", False, "recomputation in advance", "提前重计算"
        ),
        "in_backward": only(recipe.optim.in_backward, "optim.in_backward", False, "update inside the backward pass", "反向中更新权重"),
    }
    return [rules[name] for name in names]


def _fits(value: Any, kind: str | None) -> bool:
    text = str(value)
    match kind:
        case "bool":
            return isinstance(value, bool)
        case "int":
            return not isinstance(value, bool) and text.lstrip("+-").isdigit()
        case "float":
            try:
                float(text)
            except ValueError:
                return False
            return not isinstance(value, bool)
    return True


def extra_rules(recipe: Recipe, set_by_us: Iterable[str], known: dict[str, Any] | None) -> list[Rule]:
    """Refuses extra options that the framework does not know, or that AscendFactory sets itself."""
    ours = set(set_by_us)
    rules: list[Rule] = [
        (
            True,
            f"extra.{name}",
            "this is set from the recipe; change the recipe's own key instead",
            "该项由配方设置；请改用配方中的对应键",
            None,
        )
        for name in recipe.extra
        if name in ours
    ]
    if known is not None:
        rules += [(True, f"extra.{name}", en, zh, None) for name, en, zh in check_options(recipe.extra, known)]
    return rules


def profile_rule(recipe: Recipe, names: Iterable[str]) -> Rule:
    """The rule that the profile exists."""
    names = list(names)
    near = nearest(recipe.profile, names) or names[0]
    text, text_zh = f"no profile '{recipe.profile}'; write profile: {near}", f"没有配置 '{recipe.profile}'；请写 profile: {near}"
    return recipe.profile != "auto" and recipe.profile not in names, "profile", text, text_zh, near


def profile_of(recipe: Recipe, profiles: tuple[str, ...]) -> str:
    """The version that a recipe runs on; the first is the default."""
    return profiles[0] if recipe.profile == "auto" else recipe.profile


def data_step(plan: Plan, form: str) -> tuple[Step, str]:
    """The step that rewrites the recipe's data for a framework, and the text of its job file `job/data.json`."""
    data = plan.recipe.data
    spec = {
        "form": form,
        "train": [source.model_dump() for source in data.train],
        "eval": [source.model_dump() for source in data.eval],
        "bad_lines": data.bad_lines,
    }
    output = f"{plan.run_dir}/data"
    argv = ["python", "-m", "ascendfactory.engine.data.rewrite", f"{plan.run_dir}/job/data.json", output]
    inputs = [f"{plan.run_dir}/job/data.json", *(source.path for source in (*data.train, *data.eval))]
    return Step(name="data", argv=argv, inputs=inputs, output=output), json.dumps(spec, ensure_ascii=False, indent=2) + "\n"


def program(name: str) -> str:
    """The text of a program that runs inside a framework's environment."""
    return (files("ascendfactory.backends") / "programs" / name).read_text(encoding="utf-8")


def num_steps(recipe: Recipe) -> int | None:
    """Optimizer steps of the run where the recipe says them, or they follow from tokens and full rows; None for epochs."""
    amount = recipe.duration.amount
    match recipe.duration.unit:
        case "steps":
            return int(amount)
        case "tokens":
            return math.ceil(amount / (recipe.batch.global_size * recipe.data.seq_len))
        case _:
            return None
