"""Writes docs/en/recipe.md and docs/zh/recipe.md from the recipe's types: python docs/generate_recipe.py

Types, defaults and most English meanings come from `ascendfactory/core/recipe.py`. This file adds what is not there: the
Chinese meanings, and the English ones of the settings whose name says it all. A test fails when a setting has no row
here, or when the pages are not what this script writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ascendfactory.core.fields import Node, all_keys, kind_of
from ascendfactory.core.problems import expected
from ascendfactory.core.recipe import ClusterSpec, Duration, Warmup

# Dotted key → Chinese meaning, or (English, Chinese) where the type has no description of its own.
MEANINGS: dict[str, str | tuple[str, str]] = {
    "name": "运行的名称；未写时取配方文件名",
    "model": ("which model is trained; short form: its path", "训练哪个模型；简写：直接写路径"),
    "objective": ("what is learned; short form: the kind", "训练目标；简写：直接写 kind"),
    "tuning": ("which weights are trained; short form: the kind", "训练哪些权重；简写：直接写 kind"),
    "data": ("what it is trained on; short form: the training file, or a list of them", "训练数据；简写：直接写训练文件或文件列表"),
    "batch": ("rows of an optimizer step; short form: global_size", "每个优化步的行数；简写：直接写 global_size"),
    "duration": ("how long to train: steps, epochs or tokens", "训练多久：steps、epochs 或 tokens"),
    "optim": ("AdamW and its schedule", "AdamW 优化器与学习率曲线"),
    "cluster": ("the devices: `auto`, `cpu`, `8 a100-80g`, `2x8 snt9b`", "使用的设备：`auto`、`cpu`、`8 a100-80g`、`2x8 snt9b`"),
    "layout": ("how the work is split over the devices", "计算如何切分到各设备"),
    "backend": ("the engine; auto is the embedded one wherever it accepts the recipe", "使用的引擎；auto 在内置引擎接受该配方时即用它"),
    "profile": (
        "the version of the back end; auto is its default (`ascendfactory install` lists them)",
        "后端版本；auto 为默认（`ascendfactory install` 列出全部）",
    ),
    "extra": ("options for the back end under its own names", "以后端自己的名称传入的选项"),
    "checkpoint": ("what is saved while training, and where a run starts again", "训练中保存什么，从何处继续"),
    "output": ("where results go; short form: dir", "结果写到哪里；简写：直接写 dir"),
    "seed": ("seed of sample order, new weights and adapters, and dropout", "决定样本顺序、新权重与适配器初值、dropout 的随机种子"),
    "model.path": "Hugging Face 模型文件夹，或目录中的模型名（训练时须是文件夹）",
    "model.init": "读取文件夹中的权重，或按 config.json 随机初始化（从头预训练）",
    "model.dtype": "计算精度；auto 在设备有 bfloat16 单元时取 bfloat16，否则取 float32",
    "objective.kind": (
        "pretrain: every token of the text; sft: answers; dpo, reward: preferences; grpo, dapo, ppo: answers that are rewarded",
        "pretrain：文本的每个词元；sft：回答；dpo、reward：偏好；grpo、dapo、ppo：按奖励学习生成的回答",
    ),
    "objective.train_on": "训练哪些词元：所有 assistant 轮次、仅最后一轮，或全部词元",
    "objective.num_answers": "每个提示生成的回答数",
    "objective.max_prompt_tokens": "最长的提示；回答占 data.seq_len 的其余部分；auto 为其四分之一",
    "objective.temperature": "生成回答时的温度；1 即按训练时的概率",
    "objective.top_p": "只在累计概率达到此值的最可能词元中采样",
    "objective.clip_low": "词元新旧概率之比最低按 1 - clip_low 计（PPO 的 epsilon，arXiv:1707.06347）",
    "objective.clip_high": "词元新旧概率之比最高按 1 + clip_high 计（clip-higher，arXiv:2503.14476）",
    "objective.kl_coef": "与初始模型散度的权重（ppo 计入奖励，其余计入损失）；0 表示不保留初始模型",
    "objective.kl_kind": "散度的估计：k1 对数比，k2 其平方的一半，k3 比值 - 1 - 对数比（joschu.net/blog/kl-approx）",
    "objective.entropy_coef": "损失中熵奖励的权重",
    "objective.reward": "auto 为引擎按记录的 data_source 自带的规则；或 文件.py:函数，即自己的函数",
    "objective.off_policy_steps": "0：设备轮流生成与训练；1：一部分设备只为下一步生成，其余同时训练",
    "objective.multi_turn": "回答可以调用的工具；简写：直接写工具文件",
    "objective.multi_turn.tools": "Python 文件，其中的函数即工具；或列出工具类的 YAML 文件",
    "objective.multi_turn.max_turns": "一次对话中模型最多发言的次数",
    "objective.dynamic_sampling": "回答全好或全坏的提示换成其他提示",
    "objective.overlong_tokens": "回答末尾的若干词元，在其中奖励逐渐减少至多 1；0 表示不减；auto 为回答的五分之一",
    "objective.critic_lr": "价值网络的峰值学习率",
    "objective.gamma": "后来奖励的折扣",
    "objective.gae_lambda": "优势估计中偏差与方差的取舍（GAE，arXiv:1506.02438）；1 为无偏",
    "tuning.kind": ("every weight, or low-rank adapters on frozen weights", "训练全部权重，或在冻结权重上训练低秩适配器"),
    "tuning.rank": ("rank of the adapters", "适配器的秩"),
    "tuning.alpha": "更新按 alpha/rank 缩放（rslora 时为 alpha/sqrt(rank)）",
    "tuning.dropout": ("share of the adapters' inputs that is dropped", "适配器输入的丢弃比例"),
    "tuning.targets": "加适配器的线性层名；all-linear 为除输出层外的全部线性层",
    "tuning.rslora": "秩稳定缩放（arXiv:2312.03732）",
    "tuning.dora": "权重分解适配器（arXiv:2402.09353）；目前只能在单个设备上运行",
    "tuning.adapter": "从已保存的 peft 适配器文件夹继续训练",
    "data.train": ("training sources; short form of each: its path", "训练数据来源；每个来源可简写为路径"),
    "data.eval": "留作评估的数据来源；训练中会显示其损失",
    "data.eval_fraction": "从训练样本中留出作评估的比例",
    "data.seq_len": "每行的词元数",
    "data.packing": "packed（true）：多个样本拼成一行且互不可见；dynamic（false）：每行一个样本，补齐到微批中最长者；fixed：补齐到 seq_len",
    "data.overlong": "样本长于 seq_len 时的处理：截断、丢弃或停止",
    "data.bad_lines": "遇到无法读取的记录时：停止或跳过",
    "data.mask_check": "没有词元参与训练，或（sft）全部词元都参与训练时，拒绝启动",
    "data.chat_template": "代替模型自带对话模板的 Jinja 文件",
    "data.shuffle": ("draw a new order of rows in each epoch", "每个 epoch 重新打乱行的顺序"),
    "data.streaming": "边训练边分词，用于大于磁盘的数据集",
    "data.workers": "分词进程数",
    "data.cache_dir": "分词结果的缓存位置",
    "data.train.path": "文件（.json .jsonl .parquet .csv .txt .arrow，也可为 .gz .zst）或其所在文件夹",
    "data.train.format": "记录的格式；auto 查看前若干条后判断",
    "data.train.columns": "列名不同时，我们的列名 → 文件中的列名（instruction: question）",
    "data.train.weight": "一个 epoch 遍历该来源的次数；0.5 表示取一半",
    "batch.global_size": "每个优化步的总行数（所有设备）；拼接后的一行算一行；grpo、dapo、ppo 按提示计",
    "batch.micro_size": "一个设备一次计算的行数",
    "optim.lr": ("peak learning rate", "最高学习率"),
    "optim.schedule": "预热之后的曲线；wsd 为预热、保持、在最后 decay_fraction 内下降",
    "optim.warmup": ("how long the rate rises: a fraction of the run, or `100 steps`", "学习率上升多久：占全程的比例，或 `100 steps`"),
    "optim.min_lr_ratio": "最终学习率与 lr 之比",
    "optim.decay_fraction": "仅 wsd：学习率下降所占全程的比例",
    "optim.weight_decay": "权重衰减；不作用于归一化层与偏置",
    "optim.beta1": ("decay of the first moment", "一阶动量的衰减"),
    "optim.beta2": ("decay of the second moment", "二阶动量的衰减"),
    "optim.eps": ("added to the root of the second moment", "加在二阶动量平方根上的小量"),
    "optim.max_grad_norm": "梯度范数超过此值时按比例缩小；0 表示不缩",
    "optim.in_backward": "每个权重的梯度一到就更新并释放该梯度；需要 max_grad_norm: 0",
    "optim.nonfinite": "损失或梯度出现 NaN、Inf 时：跳过该步或停止",
    "cluster.restarts": "丢失进程的运行自动从最新检查点重新启动的次数",
    "cluster.device": "目录中的设备（cpu、a100-80g、snt9b 等）；auto 取本机所有",
    "cluster.nodes": ("machines", "机器数"),
    "cluster.nproc": "每台机器的设备（进程）数",
    "layout.dp": "数据并行度；auto 为其余并行度剩下的设备数",
    "layout.replicate": "HSDP：dp 内分片模型的副本数（每份分片于 dp/replicate 个设备）",
    "layout.zero": "dp 切分什么：1 优化器状态，2 加梯度，3 加参数",
    "layout.tp": "张量并行度",
    "layout.sp": "序列并行：归一化层也沿 tp 切分；auto 为 tp 大于 1 时开启",
    "layout.pp": "流水线级数",
    "layout.vpp": "每级的虚拟块数",
    "layout.schedule": "流水线中微批的次序：gpipe、1f1b；vpp 大于 1 时 interleaved 或 zero_bubble（用权重梯度填空泡），"
    "vpp 为 2 时还有 V 形的 zbv 与 dualpipev；auto 在 vpp 大于 1 时为 interleaved",
    "layout.stage_layers": "每个流水线块的层数，按模型顺序（共 pp x vpp 个数；0 为空块）；auto 按代价切分",
    "layout.overlap_chunks": "张量并行：一层的输入与输出分几段传输，边传边算；1 为不重叠",
    "layout.ring": "环形上下文并行度",
    "layout.ulysses": "Ulysses 上下文并行度",
    "layout.ep": "专家并行度；专家所在设备是 dp x ring x ulysses x tp 的一部分",
    "layout.recompute": "反向传播中重算什么以节省内存：norm 归一化与 MLP 激活，selective 除注意力与隔个矩阵乘外的全部，full 整层",
    "layout.recompute_layers": "只重算每级的前 n 层",
    "layout.recompute_in_advance": "流水线：一级在等待梯度时先重算，并保留结果直到梯度到达",
    "layout.offload_activations": "把保存的激活放到主机内存",
    "layout.offload_optimizer": "把优化器状态放到主机内存并在那里更新",
    "layout.optim_dtype": "Adam 动量的精度",
    "layout.reuse_params": "bfloat16 权重作为 fp32 主权重的一部分，而不是一份副本",
    "checkpoint.every": "保存间隔",
    "checkpoint.keep": "保留最新的若干个检查点",
    "checkpoint.keep_best": "另外保留评估损失最低的检查点",
    "checkpoint.asynchronous": "训练继续的同时写盘",
    "checkpoint.resume": "auto 取输出文件夹中最新的完好检查点；none 不恢复；或写检查点文件夹",
    "output.dir": "运行文件夹；默认 runs/<配方名>",
    "output.export": "结束时写出 Hugging Face 文件夹（或 peft 适配器）",
    "output.dtype": "导出权重的精度；auto 为模型原有精度",
    "output.log_every": "每隔多少步显示一行进度",
    "output.eval_every": ("how often the evaluation loss is computed", "评估间隔"),
    "output.sample_prompts": "训练前后各回答一次的问题，写入报告",
}
# English where the type's own words need a noun in front of them in a table.
ENGLISH: dict[str, str] = {
    "checkpoint.every": "how often a checkpoint is saved",
    "layout.dp": "data-parallel degree; auto is what the other degrees leave",
    "optim.weight_decay": "decoupled weight decay; not applied to norms and biases",
    "tuning.dora": "weight-decomposed adapters (arXiv:2402.09353); on one device only in this release",
}
TABLES = ("batch", "optim", "cluster", "layout", "checkpoint", "output", "data")  # sections told in a table of their own
HEADS = (("key", "type", "default", "meaning"), ("键", "类型", "默认值", "含义"))
# What this release's engine does not run is refused when planning; see docs/*/errors.md.
NOTES: dict[str, tuple[str, str]] = {
    "objective": (
        "The embedded engine runs `pretrain` and `sft`; the others run on the back ends that have them.",
        "内置引擎可运行 `pretrain` 与 `sft`；其余目标由支持它们的后端运行。",
    ),
    "duration": (
        "Written `500 steps`, `3 epochs` or `2e9 tokens`; in long form `{amount: 3, unit: epochs}`.",
        "写作 `500 steps`、`3 epochs` 或 `2e9 tokens`；完整写法为 `{amount: 3, unit: epochs}`。",
    ),
    "cluster": (
        "Short form: `DEVICE`, `COUNT DEVICE` or `NODESxCOUNT DEVICE`.",
        "简写：`设备`、`数量 设备` 或 `机器数x数量 设备`。",
    ),
    "layout": (
        "`ep` above 1 is refused by the embedded engine with a message in this release.",
        "`ep` 大于 1 时，本版本的内置引擎会拒绝并给出说明。",
    ),
    "data.train": ("The keys of one source, in `data.train` and `data.eval`.", "`data.train` 与 `data.eval` 中每个来源的键。"),
}
ENGLISH_PAGE = """# Recipe reference

Written by `docs/generate_recipe.py` from `ascendfactory/core/recipe.py`. In an editor: `ascendfactory schema > recipe.schema.json`.

A recipe is strict: an unknown key is an error that names the nearest key, and a value of the wrong type is never cast.
`model` and `data` are required. Any setting can follow a recipe on the command line: `--optim.lr=1e-5`, `--data.train[0].weight=0.5`.
Relative paths are relative to the folder in which the command is run. YAML 1.2 rules hold: `1e-5` is a number, `no` is text.

"""
CHINESE_PAGE = """# 配方参考

由 `docs/generate_recipe.py` 根据 `ascendfactory/core/recipe.py` 生成。编辑器补全：`ascendfactory schema > recipe.schema.json`。

配方是严格的：未知的键会报错并指出最接近的键，类型不符的值不会被悄悄转换。
`model` 与 `data` 必填。命令行可在配方之后覆盖任意设置：`--optim.lr=1e-5`、`--data.train[0].weight=0.5`。
相对路径以运行命令的目录为准。按 YAML 1.2 规则：`1e-5` 是数，`no` 是文本。

"""


def groups() -> dict[str, dict[str, Node]]:
    """Heading → the rows below it: top level, each section, one source. Durations and warm-ups are told in a note."""
    keys = all_keys()
    found: dict[str, dict[str, Node]] = {"": {key: node for key, node in keys.items() if "." not in key}}
    for key, node in keys.items():
        section, _, _ = key.rpartition(".")
        if section and section != "data.eval" and not _is_amount(keys[section]):
            found.setdefault(section, {})[key] = node
    return found


def _is_amount(node: Node) -> bool:
    return any(section in (Duration, Warmup) for section in node.sections())


def meaning(key: str, node: Node, zh: bool) -> str:
    """What a setting means, and for which kind alone it is.

    Raises:
        KeyError: the setting has no Chinese meaning here, or no English one anywhere.
    """
    text = MEANINGS[key]
    english, chinese = text if isinstance(text, tuple) else (ENGLISH.get(key) or _description(key, node), text)
    kinds = _kinds_with(key)
    if not kinds:
        return chinese if zh else english
    return f"（{'、'.join(kinds)}）{chinese}" if zh else f"({', '.join(kinds)}) {english}"


def _description(key: str, node: Node) -> str:
    if node.field is None or not node.field.description:
        raise KeyError(f"{key} has no English meaning: describe it in recipe.py, or here")
    return node.field.description


def _kinds_with(key: str) -> list[str]:
    """The members of a union that have the setting, unless all of them do."""
    section, _, name = key.rpartition(".")
    members = all_keys()[section].sections() if section else []
    having = [kind for member in members if name in member.model_fields and (kind := kind_of(member))]
    return having if name != "kind" and len(members) > 1 else []


def default(key: str, node: Node, zh: bool) -> str:
    """The default as it would be written in a recipe; of `kind`, that of its group."""
    section, _, name = key.rpartition(".")
    field = all_keys()[section].field if name == "kind" else node.field
    assert field is not None
    if field.is_required():
        return "必填" if zh else "required"
    by_kind = _defaults_by_kind(key)
    if len(by_kind) > 1:
        if zh:
            return "，".join(f"{_written(value, zh)}（{'、'.join(kinds)}）" for value, kinds in by_kind)
        return ", ".join(f"{_written(value, zh)} ({', '.join(kinds)})" for value, kinds in by_kind)
    return _written(field.default, zh)


def _defaults_by_kind(key: str) -> list[tuple[Any, list[str]]]:
    """The defaults that a setting has in the members of a union, each with its kinds."""
    section, _, name = key.rpartition(".")
    found: list[tuple[Any, list[str]]] = []
    for member in all_keys()[section].sections() if section and name != "kind" else []:
        if (field := member.model_fields.get(name)) and (kind := kind_of(member)):
            same = next((kinds for value, kinds in found if value == field.default), None)
            if same is None:
                found.append((field.default, [kind]))
            else:
                same.append(kind)
    return found


def _written(value: Any, zh: bool) -> str:
    match value:
        case Duration() | Warmup():
            return f"`{value.amount:g}`" if value.unit == "fraction" else f"`{value.amount:g} {value.unit}`"
        case ClusterSpec():
            return f"`{value.device}`"
        case BaseModel():
            return f"`{kind}`" if (kind := getattr(value, "kind", None)) else ("见下" if zh else "see below")
        case bool():
            return f"`{str(value).lower()}`"
        case None:
            return "-"
        case float():
            return f"`{re.sub(r'e-0', 'e-', f'{value:g}')}`"
        case list() | dict():
            return f"`{', '.join(map(str, value))}`" if value else "-"
        case _:
            return f"`{value}`"


def kind_text(key: str, node: Node, zh: bool) -> str:
    """What may stand at a key: a link where it has a table of its own; of `kind`, which one of several words."""
    if key in TABLES:
        return f"[{'映射' if zh else 'mapping'}](#{key.replace('.', '')})"
    section, _, name = key.rpartition(".")
    if name == "kind":
        return expected(all_keys()[section])[zh]
    return expected(node)[zh]


def rows(nodes: dict[str, Node], zh: bool) -> Iterator[str]:
    """The lines of one table."""
    yield "| " + " | ".join(HEADS[zh]) + " |"
    yield "| --- | --- | --- | --- |"
    for key, node in nodes.items():
        cells = [f"`{key.rpartition('.')[2]}`", kind_text(key, node, zh), default(key, node, zh), meaning(key, node, zh)]
        yield "| " + " | ".join(cells) + " |"


def page(zh: bool) -> str:
    """The whole page in one language."""
    parts = [CHINESE_PAGE if zh else ENGLISH_PAGE]
    for section, nodes in groups().items():
        title = section or ("顶层" if zh else "Top level")
        parts.append(f"## {title}\n\n")
        if note := NOTES.get(section or "duration"):
            parts.append(note[zh] + "\n\n")
        parts.append("\n".join(rows(nodes, zh)) + "\n\n")
    return "".join(parts).rstrip("\n") + "\n"


def main() -> None:
    """Writes both pages beside this script."""
    for language in ("en", "zh"):
        path = Path(__file__).parent / language / "recipe.md"
        path.write_text(page(language == "zh"), encoding="utf-8")


if __name__ == "__main__":
    main()
