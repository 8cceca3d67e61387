"""Why two engines part: each known cause checked against what both really did, not guessed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from ascendfactory.core.plan import Fact, Line, Plan, StepMetrics
from ascendfactory.core.recipe import Lora

State = Literal["same", "differs", "unknown"]
Rows = dict[int, list["TrainedRow"]]  # step → rows
_RATE_TOLERANCE = 1e-5  # relative; frameworks keep learning rates in double precision


class TrainedRow(Fact):
    """A row as an engine was trained on it, without padding; see engine/data/trained.py."""

    step: int
    ids: list[int]
    trained: list[int]  # 1 where the token is a target
    num_items: int | None = None  # what the engine divided the step's sum of losses by; None: it does not say, or averages


class Check(Fact):
    """One known cause, and what was found."""

    name: str
    state: State
    found: Line


def check(name: str, state: State, en: str, zh: str) -> Check:
    """A check from its words."""
    return Check(name=name, state=state, found=Line(en=en, zh=zh))


def all_checks(
    names: tuple[str, str], plans: tuple[Plan, Plan], rows: tuple[Rows, Rows], steps: tuple[Sequence[StepMetrics], Sequence[StepMetrics]]
) -> list[Check]:
    """Every known cause, the first to look at first.

    Args:
        names: of the two engines.
        plans: what they were asked for.
        rows: what they were trained on, by step; empty where an engine does not tell.
        steps: what they reported.
    """
    checks = [
        *_row_checks(names, rows, plans[0].recipe.data.seq_len),
        _normalisation(names, rows),
        _rates(names, steps),
        _dtype(names, plans),
    ]
    checks += _starts(plans[0])
    if all(item.state == "same" for item in checks):
        checks.append(_update(steps))
    return checks


def _row_checks(names: tuple[str, str], rows: tuple[Rows, Rows], seq_len: int) -> list[Check]:
    """Packing, template (the ids) and mask. The order of rows inside a step changes nothing but rounding: it is not looked at."""
    told = sorted(set(rows[0]) & set(rows[1]))
    if not told:
        silent = " and ".join(name for name, own in zip(names, rows, strict=True) if not own) or " and ".join(names)
        en, zh = f"not checked: {silent} does not tell its rows", f"未检查：{silent} 未给出训练行"
        return [check(name, "unknown", en, zh) for name in ("packing", "tokens", "mask")]
    en, zh = f"the same in {len(told)} steps", f"{len(told)} 步均相同"
    found = {name: check(name, "same", en, zh) for name in ("packing", "tokens", "mask")}
    for step in reversed(told):  # the first step is told: its words are written last
        a, b = rows[0][step], rows[1][step]
        if len(a) != len(b):
            en = f"step {step} has {len(a)} rows on {names[0]}, {len(b)} on {names[1]}"
            found["packing"] = check("packing", "differs", en, f"第 {step} 步：{names[0]} 有 {len(a)} 行，{names[1]} 有 {len(b)} 行")
        one, two = _unmatched(a, b), _unmatched(b, a)
        if one and two:
            found["tokens"] = _token_words(names, one, two, seq_len)
        masks = [
            (x, y) for x, y in zip(sorted(a, key=_key), sorted(b, key=_key), strict=False) if x.ids == y.ids and x.trained != y.trained
        ]
        if masks:
            found["mask"] = _mask_words(names, *masks[0])
    if found["tokens"].state == "differs" and _all_ids(rows[0], told) == _all_ids(rows[1], told):
        en, zh = "the same rows, in other steps: the order of samples", "行相同但所在的步不同：样本顺序"
        found["tokens"] = check("tokens", "differs", en, zh)
    return list(found.values())


def _key(row: TrainedRow) -> tuple[list[int], list[int]]:
    return row.ids, row.trained


def _unmatched(rows: list[TrainedRow], others: list[TrainedRow]) -> TrainedRow | None:
    """The first row whose ids are not among the others."""
    left = Counter(tuple(row.ids) for row in others)
    for row in rows:
        if not left[tuple(row.ids)]:
            return row
        left[tuple(row.ids)] -= 1
    return None


def _all_ids(rows: Rows, steps: Sequence[int]) -> list[list[int]]:
    return sorted(row.ids for step in steps for row in rows[step])


def _mask_words(names: tuple[str, str], one: TrainedRow, two: TrainedRow) -> Check:
    at = next(i for i, (x, y) in enumerate(zip(one.trained, two.trained, strict=True)) if x != y)
    trains, other = names if one.trained[at] else (names[1], names[0])
    en = f"step {one.step}: {trains} trains token {at} of a row (id {one.ids[at]}), {other} does not"
    return check("mask", "differs", en, f"第 {one.step} 步：{trains} 训练某行第 {at} 个词元（id {one.ids[at]}），{other} 不训练")


def _token_words(names: tuple[str, str], one: TrainedRow, two: TrainedRow, seq_len: int) -> Check:
    """A cut at another place, or another template."""
    step, lengths = one.step, f"{len(one.ids)} / {len(two.ids)}"
    at = next((i for i, (x, y) in enumerate(zip(one.ids, two.ids, strict=False)) if x != y), min(len(one.ids), len(two.ids)))
    if max(len(one.ids), len(two.ids)) >= seq_len:
        en = f"step {step}: a sample longer than seq_len is cut differently from token {at} on ({lengths} tokens)"
        return check("tokens", "differs", en, f"第 {step} 步：超过 seq_len 的样本从第 {at} 个词元起截断不同（{lengths} 个词元）")
    near = [row.ids[max(0, at - 2) : at + 3] for row in (one, two)]
    en = f"step {step}: template or tokenizer differs at token {at}: {names[0]} {near[0]}, {names[1]} {near[1]} ({lengths} tokens)"
    zh = f"第 {step} 步：模板或分词在第 {at} 个词元处不同：{names[0]} {near[0]}，{names[1]} {near[1]}（{lengths} 个词元）"
    return check("tokens", "differs", en, zh)


def _normalisation(names: tuple[str, str], rows: tuple[Rows, Rows]) -> Check:
    """What each engine divides the sum of a step's losses by, against the number of tokens that it really trains."""
    said: list[tuple[str, int | None, int]] = []
    for name, own in zip(names, rows, strict=True):
        if not own:
            return check("normalisation", "unknown", f"not checked: {name} does not tell its rows", f"未检查：{name} 未给出训练行")
        step = min(own)
        said.append((name, own[step][0].num_items if own[step] else None, sum(sum(row.trained) for row in own[step])))
    step = min(rows[0])
    for name, num_items, num_trained in said:
        if num_items is None:
            en = f"{name} averages the micro-batches instead of dividing by the {num_trained} trained tokens of the step"
            return check("normalisation", "differs", en, f"{name} 对微批取平均，而不是除以该步的 {num_trained} 个训练词元")
        if num_items != num_trained:
            en = f"step {step}: {name} divides by {num_items}, and trains {num_trained} tokens"
            return check("normalisation", "differs", en, f"第 {step} 步：{name} 除以 {num_items}，而训练了 {num_trained} 个词元")
    return check(
        "normalisation",
        "same",
        f"both divide by the trained tokens of the step ({said[0][2]} in step {step})",
        f"均除以该步的训练词元数（第 {step} 步为 {said[0][2]}）",
    )


def _rates(names: tuple[str, str], steps: tuple[Sequence[StepMetrics], Sequence[StepMetrics]]) -> Check:
    pairs = list(zip(*steps, strict=False))
    for a, b in pairs:
        if abs(a.lr - b.lr) > _RATE_TOLERANCE * max(abs(a.lr), abs(b.lr)):
            en = f"step {a.step}: {names[0]} {a.lr:.6g}, {names[1]} {b.lr:.6g}"
            return check("learning rate", "differs", en, f"第 {a.step} 步：{names[0]} {a.lr:.6g}，{names[1]} {b.lr:.6g}")
    if not pairs:
        return check("learning rate", "unknown", "no step was reported by both", "没有双方都报告的步")
    return check("learning rate", "same", f"the same in {len(pairs)} steps", f"{len(pairs)} 步均相同")


def _dtype(names: tuple[str, str], plans: tuple[Plan, Plan]) -> Check:
    one, two = (plan.dtype for plan in plans)
    if one != two:
        return check("dtype", "differs", f"{names[0]} {one}, {names[1]} {two}", f"{names[0]} {one}，{names[1]} {two}")
    if one == "bfloat16":
        en = "both bfloat16, where the order of additions shows; --model.dtype=float32 rules it out"
        return check("dtype", "same", en, "均为 bfloat16，累加顺序会带来差异；可用 --model.dtype=float32 排除")
    return check("dtype", "same", f"both {one}", f"均为 {one}")


def _starts(plan: Plan) -> list[Check]:
    """Random numbers that each engine draws its own way."""
    recipe = plan.recipe
    found = []
    if recipe.model.init == "random":
        en = "model.init: random; each engine draws weights of its own, so losses differ from the first step on"
        found.append(check("first weights", "differs", en, "model.init: random；各引擎自行抽取权重，第一步起损失即不同"))
    if isinstance(recipe.tuning, Lora) and recipe.tuning.adapter is None:
        en = "each engine draws adapters of its own, so losses part after the first step; tuning.adapter gives both the same"
        found.append(check("first adapters", "differs", en, "各引擎自行抽取适配器，第一步之后损失即不同；用 tuning.adapter 可使其相同"))
    return found


def _update(steps: tuple[Sequence[StepMetrics], Sequence[StepMetrics]]) -> Check:
    """Where all else is the same: the update itself, seen by a first step that agrees and a second that does not."""
    pairs = list(zip(*steps, strict=False))[:2]
    apart = [abs(a.loss - b.loss) / max(abs(a.loss), 1e-12) for a, b in pairs]
    if len(apart) < 2:
        return check("optimizer", "unknown", "two steps are needed to see an update", "需要两步才能看到更新")
    text = f"relative difference of the loss {apart[0]:.1e} before the first update, {apart[1]:.1e} after it"
    text_zh = f"损失的相对差：首次更新前 {apart[0]:.1e}，更新后 {apart[1]:.1e}"
    differs = apart[1] > max(10 * apart[0], 1e-4)
    return check("optimizer", "differs" if differs else "same", text, text_zh)


def rows_of(lines: Sequence[dict[str, Any]], num_steps: int) -> Rows:
    """Rows by step, of what the engines wrote."""
    found: Rows = {}
    for line in lines:
        row = TrainedRow.model_validate(line)
        if row.step <= num_steps and row.ids:
            found.setdefault(row.step, []).append(row)
    return found
