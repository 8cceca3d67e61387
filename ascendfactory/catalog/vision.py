"""Vision towers: shapes read from `config.json`, and how many weights they hold.

P patch size · C colour channels · T frames a patch · E tower width · F its feed-forward
M patches merged into one token (spatial_merge_size squared) · H width of the language model
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ascendfactory.core.messages import UserError
from ascendfactory.core.plan import Vision

Config = Mapping[str, Any]


def vision_from_config(family: str, config: Config, hidden_size: int, where: str) -> Vision:
    """The tower of a vision-language model.

    Args:
        family: HF model_type of the whole model (`qwen2_5_vl`, `gemma3`, `internvl`, ...).
        config: the whole config.json.
        hidden_size: width of the language model.
        where: the file, for messages.

    Raises:
        UserError: the family's tower is unknown, or a key is missing.
    """
    read = _READERS.get(family)
    if read is None:
        known = ", ".join(sorted(_READERS))
        raise UserError(
            where,
            f"the vision tower of model_type '{family}' is unknown; known: {known}",
            f"不认识 model_type '{family}' 的视觉塔；已支持：{known}",
        )
    try:
        return read(config, config["vision_config"], hidden_size)
    except KeyError as error:
        raise UserError(where, f"vision_config has no key {error}; add it", f"vision_config 缺少键 {error}，请补上") from None


def _linear(size_in: int, size_out: int) -> int:
    return size_in * size_out + size_out


def _layer_norm(size: int) -> int:
    return 2 * size


def _square(value: Any) -> int:
    """Pixels of a patch or picture given by its side or by (height, width)."""
    if isinstance(value, (list, tuple)):
        return int(value[0]) * int(value[1])
    return int(value) ** 2


def _side(value: Any) -> int:
    return int(value[0]) if isinstance(value, (list, tuple)) else int(value)


def _qwen2_vl(config: Config, tower: Config, hidden_size: int) -> Vision:
    """LayerNorm blocks with biases; a merger folds M patches into one token."""
    width, depth, patch = tower.get("embed_dim", 1280), tower.get("depth", 32), tower.get("patch_size", 14)
    ffn = int(width * tower.get("mlp_ratio", 4))
    merged = width * tower.get("spatial_merge_size", 2) ** 2
    block = 2 * _layer_norm(width) + _linear(width, 3 * width) + _linear(width, width) + _linear(width, ffn) + _linear(ffn, width)
    patches = _channels(tower) * tower.get("temporal_patch_size", 2) * patch**2 * width
    merger = _layer_norm(width) + _linear(merged, merged) + _linear(merged, hidden_size)
    return _vision(depth, width, ffn, tower.get("num_heads", 16), patch, patches + depth * block + merger)


def _qwen2_5_vl(config: Config, tower: Config, hidden_size: int) -> Vision:
    """RMSNorm blocks with a gated feed-forward, all linears with biases."""
    width, depth, patch = tower.get("hidden_size", 1280), tower.get("depth", 32), tower.get("patch_size", 14)
    ffn = tower.get("intermediate_size", 3420)
    merged = width * tower.get("spatial_merge_size", 2) ** 2
    block = 2 * width + _linear(width, 3 * width) + _linear(width, width) + 2 * _linear(width, ffn) + _linear(ffn, width)
    patches = _channels(tower) * tower.get("temporal_patch_size", 2) * patch**2 * width
    merger = width + _linear(merged, merged) + _linear(merged, hidden_size)
    return _vision(depth, width, ffn, tower.get("num_heads", 16), patch, patches + depth * block + merger)


def _qwen3_vl(config: Config, tower: Config, hidden_size: int) -> Vision:
    """Learned positions, LayerNorm blocks, one merger at the end and one for each deep-stack level."""
    width, depth, patch = tower.get("hidden_size", 1152), tower.get("depth", 27), tower.get("patch_size", 16)
    ffn = tower.get("intermediate_size", 4304)
    merged = width * tower.get("spatial_merge_size", 2) ** 2
    block = 2 * _layer_norm(width) + _linear(width, 3 * width) + _linear(width, width) + _linear(width, ffn) + _linear(ffn, width)
    patches = _linear(_channels(tower) * tower.get("temporal_patch_size", 2) * patch**2, width)
    positions = tower.get("num_position_embeddings", 2304) * width
    projection = _linear(merged, merged) + _linear(merged, hidden_size)
    levels = len(tower.get("deepstack_visual_indexes", [8, 16, 24]))
    mergers = _layer_norm(width) + projection + levels * (_layer_norm(merged) + projection)
    return _vision(depth, width, ffn, tower.get("num_heads", 16), patch, patches + positions + depth * block + mergers)


def _gemma3(config: Config, tower: Config, hidden_size: int) -> Vision:
    """SigLIP without its pooling head (arXiv:2303.15343), then one matrix into the language model."""
    width, depth, patch = tower["hidden_size"], tower["num_hidden_layers"], tower["patch_size"]
    ffn = tower["intermediate_size"]
    block = 2 * _layer_norm(width) + 4 * _linear(width, width) + _linear(width, ffn) + _linear(ffn, width)
    patches = _linear(_channels(tower) * patch**2, width)
    positions = (tower["image_size"] // patch) ** 2 * width
    projector = width * hidden_size + width
    num_params = patches + positions + depth * block + _layer_norm(width) + projector
    return _vision(depth, width, ffn, tower["num_attention_heads"], patch, num_params)


def _internvl(config: Config, tower: Config, hidden_size: int) -> Vision:
    """InternViT (arXiv:2312.14238): class token, layer scale, biases everywhere; a pixel-shuffle projector."""
    width, depth = tower["hidden_size"], tower["num_hidden_layers"]
    patch, ffn = _side(tower["patch_size"]), tower["intermediate_size"]
    shuffled = round(width / config.get("downsample_ratio", 0.5) ** 2)
    block = 2 * _layer_norm(width) + 4 * _linear(width, width) + _linear(width, ffn) + _linear(ffn, width) + 2 * width
    patches = _linear(_channels(tower) * _square(tower["patch_size"]), width)
    positions = (1 + _square(tower["image_size"]) // _square(tower["patch_size"])) * width
    projector = _layer_norm(shuffled) + _linear(shuffled, hidden_size) + _linear(hidden_size, hidden_size)
    num_params = width + patches + positions + depth * block + projector
    return _vision(depth, width, ffn, tower["num_attention_heads"], patch, num_params)


def _channels(tower: Config) -> int:
    return int(tower.get("in_channels", tower.get("in_chans", tower.get("num_channels", 3))))


def _vision(num_layers: int, hidden_size: int, ffn_size: int, num_heads: int, patch_size: int, num_params: int) -> Vision:
    return Vision(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_size=ffn_size,
        num_heads=num_heads,
        patch_size=patch_size,
        num_params=num_params,
    )


_READERS: dict[str, Callable[[Config, Config, int], Vision]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "gemma3": _gemma3,
    "internvl": _internvl,
    "internvl_chat": _internvl,
}
